"""A model on the Hugging Face Hub, at one commit, as a source of files."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from trainyard_trainer.config.location import HUB, HUB_MODEL
from trainyard_trainer.errors import ConfigError, RunError
from trainyard_trainer.fetching.source import RemoteFile, RemoteSource

ENDPOINT = "https://huggingface.co"
MAIN = "main"
COMMIT = re.compile(r"[0-9a-f]{40}")

TIMEOUT_S = 30.0
"""Seconds to wait for the hub's answer about a model."""

QUIET = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
"""Variables that huggingface_hub reads when it is imported."""

DENIED = (401, 403)


class HubSource(RemoteSource):
    """A model of the hub. Its revision is resolved to a commit once, and all files are of that commit."""

    def __init__(self, address: str, key: str) -> None:
        """`key` is the key of the address, for messages. No request is sent yet."""
        match = HUB_MODEL.fullmatch(address)
        assert match is not None
        self.address = address
        self._key = key
        self._name = match["name"]
        self._revision = match["revision"] or MAIN
        self._endpoint = os.environ.get("HF_ENDPOINT", ENDPOINT).rstrip("/")
        self._token = os.environ.get("HF_TOKEN") or None

    @cached_property
    def commit(self) -> str:
        """The commit of the revision."""
        return self._revision if COMMIT.fullmatch(self._revision) else str(self._model.sha)

    @property
    def pinned(self) -> str:
        """The address of the same files for ever: with the commit in place of a branch or tag."""
        return f"{HUB}{self._name}@{self.commit}"

    def identity(self, wanted: Sequence[str]) -> str:
        return repr((self._endpoint, self._name, self.commit))

    def files(self) -> Sequence[RemoteFile]:
        return [
            RemoteFile(
                name=each.rfilename,
                size=each.size,
                version=each.blob_id,
                sha256=each.lfs.sha256 if each.lfs else None,
            )
            for each in self._model.siblings
        ]

    def download(self, file: RemoteFile, folder: Path) -> None:
        with self._explained():
            from huggingface_hub import hf_hub_download

            hf_hub_download(
                self._name,
                file.name,
                revision=self.commit,
                local_dir=folder,
                endpoint=self._endpoint,
                token=self._token or False,
            )
        if file.sha256 is None:
            self._check_blob(file, folder / file.name)

    def _check_blob(self, file: RemoteFile, path: Path) -> None:
        """Raise RunError if a small file, of which the hub has the hash of git alone, has other bytes."""
        data = path.read_bytes()
        found = hashlib.sha1(f"blob {len(data)}\0".encode() + data, usedforsecurity=False)
        if found.hexdigest() != file.version:
            raise RunError(
                f"{self.address}: {file.name} has come with other bytes than the hub has: {len(data):,} of "
                f"git hash {found.hexdigest()[:12]}, and not {file.size:,} of {file.version[:12]}"
            )

    @cached_property
    def _model(self) -> Any:
        """What the hub says about the model at the revision."""
        with self._explained():
            from huggingface_hub import HfApi

            api = HfApi(endpoint=self._endpoint, token=self._token or False)
            return api.model_info(
                self._name, revision=self._revision, files_metadata=True, timeout=TIMEOUT_S
            )

    # Errors.

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise ConfigError for what the hub refuses, and RunError where it cannot be reached."""
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        from httpx2 import HTTPError
        from huggingface_hub import errors

        where = f"{self._key} = {self.address}"
        try:
            yield
        except errors.GatedRepoError as error:
            raise ConfigError(
                f"{where}: the model is gated. Accept its terms at {self._endpoint}/{self._name}, and "
                f"{self._token_remedy}."
            ) from error
        except errors.RepositoryNotFoundError as error:
            raise ConfigError(
                f"{where}: {self._endpoint} shows no such model. Check its name; if it is private, "
                f"{self._token_remedy}."
            ) from error
        except errors.RevisionNotFoundError as error:
            raise ConfigError(
                f"{where}: the model has no revision {self._revision}. Use a branch, a tag or a commit of "
                f"{self._endpoint}/{self._name}."
            ) from error
        except errors.HfHubHTTPError as error:
            status = error.response.status_code
            problem = f"{where}: {self._endpoint} has answered with {status}"
            if status in DENIED:
                raise ConfigError(f"{problem}. To be allowed, {self._token_remedy}.") from error
            raise RunError(f"{problem}. Try again later.") from error
        except errors.HFValidationError as error:
            raise ConfigError(
                f"{where} names no model: {str(error).splitlines()[0]}. Write hf://org/name@revision."
            ) from error
        except errors.OfflineModeIsEnabled as error:
            raise ConfigError(
                f"{where} needs the hub, and HF_HUB_OFFLINE = 1 forbids to ask it. Remove the variable, set "
                'env: {HF_HUB_OFFLINE: "0"} in the run file, or use a folder.'
            ) from error
        except (HTTPError, errors.LocalEntryNotFoundError) as error:
            cause = error.__cause__ or error
            raise RunError(
                f"{where}: {self._endpoint} cannot be reached: {type(cause).__name__}: {cause}\n"
                "       Pods need a way to the hub, a mirror (HF_ENDPOINT) or a proxy (HTTPS_PROXY). Without "
                "one, copy the model to the storage."
            ) from error

    @property
    def _token_remedy(self) -> str:
        """What to do about the token, as the end of a sentence."""
        if self._token is None:
            return "set HF_TOKEN, which is not set (secrets: {HF_TOKEN: {name: ..., key: ...}})"
        return "use a token in HF_TOKEN whose owner may read it"
