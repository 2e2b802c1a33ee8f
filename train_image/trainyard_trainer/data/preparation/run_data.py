"""The data set of a run: one that is prepared already, where it is, or prepared into the run's folder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainyard_trainer.config.data import Data
from trainyard_trainer.config.data_sources import BUILT_IN
from trainyard_trainer.data.preparation.plan import Options
from trainyard_trainer.data.preparation.prepare import Means, prepare
from trainyard_trainer.data.prepared import Prepared, is_prepared, read_prepared
from trainyard_trainer.data.sources.find import open_prepared
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.run_folder.folder import RunFolder

TELL_S = 10.0
"""Between two lines about how far a preparation is."""

REQUESTS_PER_CPU = 8
"""Pictures that are fetched at once from an object store: most of the time is waiting."""


def open_data(
    data: Data,
    folder: RunFolder,
    *,
    form: Mapping[str, Any],
    storage_endpoint: str | None,
    say: Callable[[str], None],
) -> Prepared:
    """The run's data set, prepared first if it is not, or not completely; `form` has the options that its
    recipe decides.

    Raises ConfigError for a source that is none, or has bad samples; it names them.
    """
    endpoint = data.endpoint or storage_endpoint
    in_place = open_prepared(data.source, endpoint)
    if in_place is not None:
        if data.valid_source is not None:
            raise ConfigError(
                f"data.valid_source = {data.valid_source} cannot be added to {data.source}, which is "
                "prepared already. Prepare both together: trainyard data prepare --valid."
            )
        return read_prepared(in_place, path=data.source, endpoint=endpoint)
    dest = RunFolder(folder.filesystem, folder.data)
    if not is_prepared(dest):
        options = Options(
            source=absolute(data.source),
            valid_source=absolute(data.valid_source) if data.valid_source else None,
            valid_share=data.valid_share,
            image_column=data.image_column,
            label_column=data.label_column,
            text_files=data.text_files,
            **form,
        )
        means = Means(
            endpoint=endpoint,
            threads=default_threads(data.source),
            max_bad_samples=data.max_bad_samples,
            say=say,
            show=_Teller(say),
        )
        prepare(options, dest, means)
    return read_prepared(dest, path=folder.show(folder.data), endpoint=storage_endpoint)


def absolute(source: str) -> str:
    """The same source from everywhere."""
    if source in BUILT_IN:
        return source
    return source.rstrip("/") if "://" in source else str(Path(source).resolve())


def default_threads(source: str) -> int:
    cpus = len(os.sched_getaffinity(0))
    return cpus * REQUESTS_PER_CPU if source.startswith("s3://") else cpus


class _Teller:
    """Says now and then how far the work is; nothing of work that is done in a moment."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._told = time.monotonic()

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._told >= TELL_S:
            self._told = now
            self._say(f"{stage}: {done:,} of {total:,} samples")
