"""Convert a source of images or text into shuffled, split and checked Parquet files.

A preparation that was killed resumes, and ends with the same bytes as one that was not:

    <dest>/.prepare/plan.json             the source, the options and the plan; written first
    <dest>/train/part-00000.parquet
    <dest>/.prepare/train-00000.json      marks that file as finished: its size, its SHA-256, its pixel sums
    <dest>/dataset.json                   marks the data set as complete; .prepare is removed then
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import numpy as np

from trainyard_trainer.data.preparation.bad_samples import BadSamples
from trainyard_trainer.data.preparation.context import PrepareContext
from trainyard_trainer.data.preparation.destination import (
    clear_state,
    is_finished,
    refuse_nested,
    settle_plan,
)
from trainyard_trainer.data.preparation.plan import Options, PreparationPlan, make_plan
from trainyard_trainer.data.preparation.split_writer import FinishedFile, SplitWriter, WrittenSplit
from trainyard_trainer.data.preparation.splits import (
    open_sources,
    plan_splits,
    with_random_access,
)
from trainyard_trainer.data.prepared import DATASET, FORMAT, DatasetInfo
from trainyard_trainer.data.sources.parts import TRAIN
from trainyard_trainer.data.stored_rows import header_of
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.run_folder.folder import RunFolder

SMALLEST_STD = 1 / 255
"""The standard deviation that is stored for images that are all equal, so that no one divides by 0."""


def prepare(options: Options, dest: RunFolder, context: PrepareContext) -> None:
    """Write the data set, or the files of it that are still missing.

    Raises ConfigError if the source cannot be read, if it has more bad samples than allowed, and if the
    destination holds something else.
    """
    refuse_nested(dest, [options.source, options.valid_source])
    if is_finished(dest, asdict(options)):
        return
    with ThreadPoolExecutor(context.threads) as pool:
        sources = open_sources(options, context)
        bad = BadSamples(options.source, context.max_bad_samples)
        classes, parts = plan_splits(options, sources, bad)
        settled = settle_plan(
            dest,
            asdict(options),
            {f"files of {name}": source.stamp for name, source in sources.items()},
            lambda: asdict(make_plan(options, classes, parts, pool, context.memory_bytes)),
            context,
        )
        plan = PreparationPlan.of_json(dict(settled))
        form = plan.form
        writer = SplitWriter(
            dest,
            plan,
            header_of(options.source, form.shape, form.encoding, plan.classes),
            pool=pool,
            show=context.show,
            note_bad=bad.add,
        )
        written = {part.name: writer.write(part) for part in with_random_access(parts, plan, pool)}
    _commit(dest, options, plan, written, bad)


def _commit(
    dest: RunFolder,
    options: Options,
    plan: PreparationPlan,
    written: dict[str, WrittenSplit],
    bad: BadSamples,
) -> None:
    for name, part in written.items():
        if not any(found.rows for found in part.files):
            raise ConfigError(f"{options.source}: its {name} split has no usable sample.")
    sums = written[TRAIN].sums
    info = DatasetInfo(
        source=options.source,
        shape=plan.form.shape,
        kind="images" if options.row_bytes is None else "text",
        encoding=plan.form.encoding,
        classes=plan.classes,
        mean=sums.mean,
        std=tuple(max(std, SMALLEST_STD) for std in sums.std),
    )
    document = {
        "format": FORMAT,
        "options": asdict(options),
        "images": asdict(info),
        "splits": {
            name: {
                "files": [
                    {
                        "file": found.file,
                        "rows": found.rows,
                        "bytes": found.bytes,
                        "sha256": found.sha256,
                    }
                    for found in part.files
                    if found.rows
                ],
                "class_counts": _count_classes(part.files, len(plan.classes)),
            }
            for name, part in written.items()
        },
        "bad_samples": bad.found,
    }
    dest.write(f"{dest.root}/{DATASET}", json.dumps(document, indent=1))
    clear_state(dest)


def _count_classes(files: list[FinishedFile], num_classes: int) -> list[int]:
    counts = np.zeros(num_classes, int)
    for found in files:
        for label, count in found.class_counts.items():
            counts[label] += count
    return counts.tolist()
