"""`storage`: the place of the folders of runs, as a path or as a URI for Ray and pyarrow."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from trainyard_trainer.config.section import Endpoint, Location, Section


class Storage(Section):
    """Where the folders of runs lie."""

    path: Location
    """A folder that all nodes share, or `s3://bucket/prefix`."""

    endpoint: Endpoint | None = None
    """Address of an S3 server that is not AWS, such as `http://minio.storage:9000`."""

    @property
    def uri(self) -> str:
        """As Ray and pyarrow take it: `s3://bucket/prefix?scheme=http&endpoint_override=host:9000`."""
        if self.endpoint is None:
            return self.path
        server = urlsplit(self.endpoint)
        return f"{self.path}?scheme={server.scheme}&endpoint_override={server.netloc}"

    def absolute(self) -> Storage:
        """The same from any working directory."""
        if "://" in self.path:
            return self
        return self.model_copy(update={"path": str(Path(self.path).resolve())})

    @classmethod
    def of_uri(cls, uri: str) -> Storage:
        """Return the storage that has this `uri`."""
        path, _, query = uri.partition("?")
        options = dict(parse_qsl(query))
        if "endpoint_override" not in options:
            return cls(path=path)
        return cls(path=path, endpoint=f"{options['scheme']}://{options['endpoint_override']}")
