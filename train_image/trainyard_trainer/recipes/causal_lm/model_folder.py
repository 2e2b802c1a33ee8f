"""The folder of a model on this machine: `train.model.path` itself, or what was fetched from its address."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from trainyard_trainer.config.location import HUB_MODEL, is_remote
from trainyard_trainer.data.sources.tokens.tokenizer_address import FILES
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.fetching.hub import HubSource
from trainyard_trainer.fetching.node_cache import (
    fetched,
    say_on_stderr,
    sha256_of_files,
    source_of,
)
from trainyard_trainer.fetching.source import RemoteSource
from trainyard_trainer.recipes.causal_lm.folder import (
    CONFIG,
    INDEX,
    SINGLE,
    fingerprint,
    weight_map,
)

KEY, ENDPOINT_KEY = "train.model.path", "train.model.endpoint"
"""The keys of a run file that name the folder."""

SMALL = (*FILES, INDEX, "generation_config.json", "LICENSE*", "NOTICE*")
"""The files without weights that are of use; programs and pickles of a model are never fetched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFolder:
    """A model, wherever it lies."""

    path: str
    """`train.model.path`."""
    endpoint: str | None = None
    """The S3 server of a folder in a bucket."""
    say: Callable[[str], None] = say_on_stderr
    """Prints a line about a fetch."""

    @property
    def is_remote(self) -> bool:
        """Whether the model has to be fetched."""
        return is_remote(self.path)

    @property
    def hub_name(self) -> tuple[str, str | None] | None:
        """Name and revision of a model of the hub; None of others."""
        match = HUB_MODEL.fullmatch(self.path)
        return (match["name"], match["revision"]) if match else None

    @property
    def name(self) -> str:
        """A short name for messages and model cards: that of the hub, or that of the folder."""
        return self.hub_name[0] if self.hub_name else self.path.rstrip("/").rpartition("/")[2]

    def pinned(self) -> str:
        """Return the path, of a model of the hub with the commit that its revision has now."""
        return HubSource(self.path, KEY).pinned if self.hub_name else self.path

    def without_weights(self) -> str:
        """Return a folder of this machine with the config and the tokenizer. Raises TrainerError."""
        if not self.is_remote:
            return self.path
        folder = fetched_once(self, SMALL)
        if not (folder / CONFIG).is_file():
            names = sorted(each.name for each in folder.iterdir() if each.name[0] != ".")
            raise ConfigError(
                f"{KEY} = {self.path} has no {CONFIG}, but {', '.join(names)}.\n"
                "       Use a folder that save_pretrained of Transformers wrote, or a model of the Hugging "
                "Face Hub in its format."
            )
        return str(folder)

    def whole(self) -> str:
        """Return a folder of this machine with the weights as well. Raises TrainerError."""
        return str(fetched_once(self, self._wanted())) if self.is_remote else self.path

    def require_weights(self) -> None:
        """Raise ConfigError if the address lacks files with weights, before anything is fetched."""
        known = {file.name for file in self.source().files()}
        missing = sorted(set(self._weights()) - known)
        if missing:
            raise ConfigError(
                f"{KEY} = {self.path} lacks {len(missing)} files with weights, such as {missing[0]}.\n"
                "       Use a model with safetensors, or train.model.init: random."
            )

    def sha256(self) -> str:
        """Return the SHA-256 of the model, the same one wherever it lies. What is remote is fetched."""
        folder = self.whole()
        return fingerprint(folder, sha256_of_files(Path(folder)) if self.is_remote else None)

    def _wanted(self) -> tuple[str, ...]:
        return (*SMALL, *self._weights())

    def _weights(self) -> Sequence[str]:
        """Return the names of the files with weights; others of the same format may lie beside them."""
        index = Path(self.without_weights()) / INDEX
        if not index.is_file():
            return (SINGLE,)
        return sorted(set(weight_map(index, self.path).values()))

    def source(self) -> RemoteSource:
        """Return where a remote model is fetched from."""
        return source_of(self.path, self.endpoint, names=(KEY, ENDPOINT_KEY))


@lru_cache(maxsize=8)
def fetched_once(model: ModelFolder, wanted: Sequence[str]) -> Path:
    """Return the fetched folder, which stays the same for this process if the address changes."""
    return fetched(model.source(), wanted, model.say)
