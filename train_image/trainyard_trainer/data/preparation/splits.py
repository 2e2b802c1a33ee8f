"""The samples of the training and the validation split, and their order."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import replace

import numpy as np

from trainyard_trainer.data.preparation.bad_samples import BadSamples
from trainyard_trainer.data.preparation.context import PrepareContext
from trainyard_trainer.data.preparation.labels import Numbered, number_labels
from trainyard_trainer.data.preparation.plan import Options, PlannedSplit, PreparationPlan
from trainyard_trainer.data.sources.columns import ImageColumns
from trainyard_trainer.data.sources.images.find import open_source
from trainyard_trainer.data.sources.images.samples import Cached, Samples, Source
from trainyard_trainer.data.sources.parts import TRAIN, VALID
from trainyard_trainer.data.sources.tokens.byte_rows import open_text
from trainyard_trainer.errors import ConfigError


def open_sources(options: Options, context: PrepareContext) -> dict[str, Source]:
    """Open the source of the training samples, and that of the validation samples if there is one."""
    paths = {TRAIN: options.source, VALID: options.valid_source}
    return {
        name: _open_source(path, options, context)
        for name, path in paths.items()
        if path is not None
    }


def _open_source(path: str, options: Options, context: PrepareContext) -> Source:
    if options.row_bytes is not None:
        return open_text(
            path,
            endpoint=context.endpoint,
            pattern=options.text_files,
            row_bytes=options.row_bytes,
            valid_share=0.0 if options.valid_source else options.valid_share,
            say=context.say,
        )
    return open_source(
        path,
        endpoint=context.endpoint,
        columns=ImageColumns(options.image_column, options.label_column),
        say=context.say,
    )


def plan_splits(
    options: Options, sources: dict[str, Source], bad: BadSamples
) -> tuple[tuple[str, ...], list[PlannedSplit]]:
    """Return the classes, and the training and validation samples in the order of the prepared files.

    Raises ConfigError for too many bad samples, and for a split without samples.
    """
    source = sources[TRAIN]
    samples = {TRAIN: source.part(TRAIN)}
    if VALID in sources:
        samples[VALID] = sources[VALID].part(VALID)
    elif VALID in source.splits:
        samples[VALID] = source.part(VALID)
    classes, numbered = number_labels(samples, source.class_names, options.num_classes)
    for name, found in numbered.items():
        bad.add(
            name,
            [(samples[name].where(row), found.problems[row]) for row in sorted(found.problems)],
        )
    orders = _orders(options, numbered)
    parts = []
    for name in (TRAIN, VALID):
        origin = name if name in samples else TRAIN
        parts.append(
            PlannedSplit(
                name=name,
                samples=samples[origin],
                labels=numbered[origin].labels,
                order=orders[name],
            )
        )
        if not len(orders[name]):
            raise ConfigError(_explain_empty(options, name, len(samples[origin].labels)))
    return classes, parts


def _orders(options: Options, numbered: dict[str, Numbered]) -> dict[str, np.ndarray]:
    if VALID in numbered:
        return {
            name: np.random.default_rng(options.seed).permutation(found.good_rows)
            for name, found in numbered.items()
        }
    good = numbered[TRAIN].good_rows
    train, valid = split(numbered[TRAIN].labels[good], options.valid_share, options.seed)
    return {TRAIN: good[train], VALID: good[valid]}


def split(labels: np.ndarray, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the training and of the validation samples, with the same share of each class.

    Both are in random order, so that any part of a file is a random sample.
    """
    random = np.random.default_rng(seed)
    order = random.permutation(len(labels))
    valid = [
        of_class[: round(len(of_class) * share)]
        for label in np.unique(labels)
        for of_class in [order[labels[order] == label]]
    ]
    is_valid = np.zeros(len(labels), bool)
    is_valid[np.concatenate([np.empty(0, np.int64), *valid])] = True
    return order[~is_valid[order]], order[is_valid[order]]


def _explain_empty(options: Options, name: str, count: int) -> str:
    path = options.valid_source if name == VALID and options.valid_source else options.source
    if name == VALID and count:
        return (
            f"{path}: a share of {options.valid_share} of each class of {count} samples leaves no sample for "
            "validation. Use a larger valid_share, or a source for validation."
        )
    return f"{path}: its {name} split has no usable sample."


def with_random_access(
    parts: list[PlannedSplit], plan: PreparationPlan, pool: Executor
) -> list[PlannedSplit]:
    """Read sequential sources into memory, unless they are sorted on disk; return splits with random
    access."""
    cached: dict[int, Samples] = {}
    fast = []
    for part in parts:
        samples = part.samples
        if not samples.is_random_access and part.name not in plan.rows_per_chunk:
            if id(samples) not in cached:
                cached[id(samples)] = Cached.of(samples, pool)
            samples = cached[id(samples)]
        fast.append(replace(part, samples=samples))
    return fast
