"""The address of a tokenizer: a folder, or a place in a bucket or on the hub, from which it is fetched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from trainyard_trainer.config.location import HUB, is_remote
from trainyard_trainer.data.sources.tokens.tokenizer_folder import (
    SETTINGS_FILES,
    TEMPLATES,
    TOKENIZER_FILES,
)
from trainyard_trainer.fetching.hub import HubSource
from trainyard_trainer.fetching.node_cache import fetched, source_of

FILES = ("config.json", *TOKENIZER_FILES, *SETTINGS_FILES, f"{TEMPLATES}/*.jinja", "*.tiktoken")
"""The files that are fetched; the type of model in config.json may choose the class of the tokenizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerAddress:
    """Where the folder of a tokenizer lies, and how messages call it."""

    path: str
    """A folder, `s3://bucket/prefix`, or `hf://org/name@revision`."""
    endpoint: str | None
    """The S3 server of a folder in a bucket; None for AWS."""
    names: tuple[str, str]
    """What path and endpoint are called in messages, such as keys of a run file."""
    say: Callable[[str], None]
    """Prints a line about a fetch."""

    def pinned(self) -> TokenizerAddress:
        """Return the address with the commit that a revision of the hub has now. Raises TrainerError."""
        if not self.path.startswith(HUB):
            return self
        return replace(self, path=HubSource(self.path, self.names[0]).pinned)

    def folder(self) -> str:
        """Return a folder of this machine with the tokenizer, which is fetched once. Raises TrainerError."""
        return _fetched_once(self) if is_remote(self.path) else self.path


@lru_cache(maxsize=8)
def _fetched_once(address: TokenizerAddress) -> str:
    source = source_of(address.path, address.endpoint, names=address.names)
    return str(fetched(source, FILES, address.say))
