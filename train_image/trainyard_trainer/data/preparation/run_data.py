"""The data set of a run: a prepared one is read in place, another source is prepared into the run's
folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from trainyard_trainer.config.data.section import Data
from trainyard_trainer.config.data.sources import BUILT_IN, absolute
from trainyard_trainer.data.preparation.context import PrepareContext
from trainyard_trainer.data.preparation.plan import Options
from trainyard_trainer.data.preparation.prepare import prepare
from trainyard_trainer.data.preparation.tokens.open_shards import open_shards
from trainyard_trainer.data.preparation.tokens.prepare_stream import StreamOptions, prepare_stream
from trainyard_trainer.data.preparation.tokens.prepare_tokens import TokenOptions, prepare_tokens
from trainyard_trainer.data.prepared import (
    DatasetInfo,
    Prepared,
    TokenInfo,
    TokenStreamInfo,
    is_prepared,
    kind_of,
    read_prepared,
)
from trainyard_trainer.data.sources.images.find import open_prepared
from trainyard_trainer.data.sources.tokens.token_files import TokenShards, token_paths
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.hardware import usable_cpus
from trainyard_trainer.run_folder.folder import RunFolder

PROGRESS_S = 10.0
"""Seconds between two lines about the progress of a preparation."""

REQUESTS_PER_CPU = 8
"""The number of image files that are requested at once from an object store, per CPU."""


def open_data(
    data: Data,
    folder: RunFolder,
    *,
    form: Mapping[str, Any],
    storage_endpoint: str | None,
    say: Callable[[str], None],
) -> Prepared | TokenShards:
    """Return the run's data set; prepare it first if that has not been done, or not completely.

    `form` has the preparation options that the recipe decides. Raises ConfigError if the source cannot be
    read, or has more bad samples than allowed.
    """
    endpoint = data.endpoint or storage_endpoint
    if paths := _token_paths(data.source, endpoint, form):
        return open_shards(data, paths, form["stream"], folder, endpoint=endpoint, say=say)
    in_place = open_prepared(data.source, endpoint)
    if in_place is not None:
        if data.valid_source is not None:
            raise ConfigError(
                f"data.valid_source = {data.valid_source} cannot be added to {data.source}, which is a "
                "prepared data set. Prepare both together: trainyard data prepare --valid."
            )
        found = read_prepared(in_place, path=data.source, endpoint=endpoint)
        _require_kind(found, form)
        return found
    dest = RunFolder(folder.filesystem, folder.data)
    if not is_prepared(dest):
        context = PrepareContext(
            endpoint=endpoint,
            threads=default_threads(data.source),
            max_bad_samples=data.max_bad_samples,
            owns_destination=True,
            say=say,
            show=_ProgressLines(say),
        )
        if "tokens" in form:
            prepare_tokens(TokenOptions(**_sources(data), form=form["tokens"]), dest, context)
        elif "stream" in form:
            options = StreamOptions(
                **_sources(data), text_files=data.text_files, form=form["stream"]
            )
            prepare_stream(options, dest, context)
        else:
            prepare(_options(data, form), dest, context)
    return read_prepared(dest, path=folder.show(folder.data), endpoint=storage_endpoint)


def _token_paths(source: str, endpoint: str | None, form: Mapping[str, Any]) -> list[str]:
    """Return the files of tokens of a source of text. Raises ConfigError for a model of bytes."""
    if not form.keys() & {"stream", "row_bytes"} or source in BUILT_IN:
        return []
    paths = token_paths(source, endpoint)
    if paths and "stream" not in form:
        raise ConfigError(
            f"data.source = {source} has files of tokens, such as {paths[0]}. Set train.model.vocab_size, or "
            "train.model.tokenizer to the tokenizer that has made them."
        )
    return paths


def _require_kind(found: Prepared, form: Mapping[str, Any]) -> None:
    """Raise ConfigError for a prepared data set that recipes of another kind train on."""
    holds = f"data.source = {found.path} holds {kind_of(found.info)}"
    if "tokens" in form and not isinstance(found.info, TokenInfo):
        raise ConfigError(
            f"{holds}, and recipe causal_lm trains on tokens. Name chats, or the data folder of another run "
            "of causal_lm."
        )
    if "stream" in form and not isinstance(found.info, TokenStreamInfo):
        raise ConfigError(
            f"{holds}, and a run with train.model.tokenizer trains on tokens of text. Name text, or the data "
            "folder of another run with this tokenizer."
        )
    if not form.keys() & {"tokens", "stream"} and not isinstance(found.info, DatasetInfo):
        raise ConfigError(f"{holds}.")


def _sources(data: Data) -> dict[str, Any]:
    """Return the options that all kinds of preparation have."""
    return {
        "source": absolute(data.source),
        "valid_source": absolute(data.valid_source) if data.valid_source else None,
        "valid_share": data.valid_share,
    }


def _options(data: Data, form: Mapping[str, Any]) -> Options:
    return Options(
        **_sources(data),
        image_column=data.image_column,
        label_column=data.label_column,
        text_files=data.text_files,
        **form,
    )


def default_threads(source: str) -> int:
    """Return the number of threads that read and decode a source."""
    cpus = usable_cpus()
    return cpus * REQUESTS_PER_CPU if source.startswith("s3://") else cpus


class _ProgressLines:
    """Prints the progress of a preparation every few seconds."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._printed = time.monotonic()

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._printed >= PROGRESS_S:
            self._printed = now
            self._say(f"{stage}: {done:,} of {total:,} samples")
