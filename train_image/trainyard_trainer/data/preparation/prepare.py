"""Any source of images or text -> Parquet that trains fast: checked, split, in random order, in good files.

A killed preparation goes on where it was, and ends with the same bytes as one that nobody disturbed:

    <dest>/.prepare/plan.json             source, options, and what follows from them; written first
    <dest>/train/part-00000.parquet
    <dest>/.prepare/train-00000.json      that file is finished: its size, SHA-256, sums of its pixels
    <dest>/dataset.json                   the data set is finished, and .prepare is removed
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from trainyard_trainer.data.preparation.labels import Numbered, number_labels
from trainyard_trainer.data.preparation.plan import Options, Part, Plan, make_plan
from trainyard_trainer.data.preparation.work import STATE, Finished, Work, Written, state_path
from trainyard_trainer.data.prepared import DATASET, FORMAT, Images, header_of, read_known
from trainyard_trainer.data.sources.find import open_source
from trainyard_trainer.data.sources.samples import TRAIN, VALID, Cached, Place, Samples, Source
from trainyard_trainer.data.sources.text import open_text
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.storage import ASIDE

MEMORY_BYTES = 256 * 2**20
"""A source that gives its rows only one after the other is read into memory up to this size."""

SHOWN = 5

SMALLEST_SPREAD = 1 / 255
"""Of images that are all alike: nothing can be divided by 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Means:
    """What a preparation works with, and that makes no difference to its result."""

    endpoint: str | None = None
    """Address of the sources' S3 server."""
    threads: int = 1
    max_bad_samples: int = 0
    memory_bytes: int = MEMORY_BYTES
    say: Callable[[str], None] = print
    show: Callable[[str, int, int], None] = lambda stage, done, total: None
    """Hears how many images of how many are done, in which stage."""


def prepare(options: Options, dest: RunFolder, means: Means) -> None:
    """Write the data set, or what is missing of it.

    Raises ConfigError for a source that is none, for more bad samples than allowed, and for a destination
    that holds something else.
    """
    _refuse_nested(dest, options)
    if is_finished(dest, options):
        return
    with ThreadPoolExecutor(means.threads) as pool:
        sources = _open_sources(options, means)
        bad = BadSamples(options.source, means.max_bad_samples)
        classes, parts = _divide(options, sources, bad)
        plan = _settle(
            dest,
            asdict(options)
            | {f"files of {name}": source.stamp for name, source in sources.items()},
            lambda: make_plan(options, classes, parts, pool, means.memory_bytes),
        )
        form = plan.form
        work = Work(
            dest,
            plan,
            header_of(options.source, form.shape, form.encoding, plan.classes),
            pool=pool,
            show=means.show,
            note_bad=bad.add,
        )
        written = {part.name: work.write(part) for part in _with_fast_access(parts, plan, pool)}
    _commit(dest, options, plan, written, bad)


# What may be in the destination.


def is_finished(dest: RunFolder, options: Options) -> bool:
    """Whether the destination has this data set. Raises ConfigError if it has something else."""
    if dest.exists(f"{dest.root}/{DATASET}"):
        _refuse_others(dest, read_known(dest)["options"], asdict(options))
        _clear(dest)
        return True
    if not dest.exists(state_path(dest, "plan.json")) and any(
        not file.endswith(ASIDE) for file in dest.files()
    ):
        raise ConfigError(
            f"{dest.show(dest.root)} has files that are none of a data set. Use a new or an empty folder."
        )
    return False


def _refuse_nested(dest: RunFolder, options: Options) -> None:
    place = dest.show(dest.root)
    for source in (options.source, options.valid_source):
        if source is not None and f"{place}/".startswith(f"{source}/"):
            raise ConfigError(
                f"{place} lies in {source}, whose files it would be taken for. Use a folder beside it."
            )


def _refuse_others(dest: RunFolder, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    different = [key for key in wanted if found.get(key) != wanted[key]]
    if different:
        lines = "".join(
            f"\n       {key}: {found.get(key)} there, {wanted[key]} here" for key in different
        )
        raise ConfigError(
            f"{dest.show(dest.root)} holds another data set, or another one begun:{lines}\n"
            "       Use another destination, or delete that one."
        )


def _settle(dest: RunFolder, wanted: dict[str, Any], make: Callable[[], Plan]) -> Plan:
    """The plan that was made when the work began, or a new one."""
    path = state_path(dest, "plan.json")
    if dest.exists(path):
        found = json.loads(dest.read(path))
        _refuse_others(dest, found["options"], wanted)
        return Plan.of_json(found["plan"])
    plan = make()
    dest.write(path, json.dumps({"options": wanted, "plan": asdict(plan)}, indent=1))
    return plan


def _clear(dest: RunFolder) -> None:
    """Remove what was needed for the work alone."""
    dest.delete(f"{dest.root}/{STATE}")
    if dest.is_local:
        dest.sweep()


# Which samples there are, and in which order.


def _open_sources(options: Options, means: Means) -> dict[str, Source]:
    paths = {TRAIN: options.source, VALID: options.valid_source}
    return {
        name: _open_source(path, options, means) for name, path in paths.items() if path is not None
    }


def _open_source(path: str, options: Options, means: Means) -> Source:
    if options.row_bytes is not None:
        return open_text(
            path,
            endpoint=means.endpoint,
            pattern=options.text_files,
            row_bytes=options.row_bytes,
            valid_share=0.0 if options.valid_source else options.valid_share,
            say=means.say,
        )
    return open_source(
        path,
        endpoint=means.endpoint,
        image_column=options.image_column,
        label_column=options.label_column,
        say=means.say,
    )


def _divide(
    options: Options, sources: dict[str, Source], bad: BadSamples
) -> tuple[tuple[str, ...], list[Part]]:
    """The classes, and the training and the validation samples in the order in which they will lie."""
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
            Part(
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
    """Indices of the training and of the validation samples, each class in the same share.

    Both come in random order, so that any stretch of a file is a fair sample of it.
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
            f"{path}: a share of {options.valid_share} of each class of {count} samples in all leaves "
            "no sample for validation. Use a larger valid_share, or a source for validation."
        )
    return f"{path}: its part for {name} has no sample that can be used."


class BadSamples:
    """Counts what cannot be used, and refuses to go on when it is too much."""

    def __init__(self, source: str, allowed: int) -> None:
        self.found: list[dict[str, Any]] = []
        self._source = source
        self._allowed = allowed

    def add(self, split: str, found: list[tuple[Place, str]]) -> None:
        """Raises ConfigError if there are more than allowed."""
        self.found += [
            {
                "split": split,
                "file": place.file,
                "row": place.row,
                "place": str(place),
                "reason": reason,
            }
            for place, reason in found
        ]
        if len(self.found) <= self._allowed:
            return
        lines = "".join(f"\n       {bad['place']}: {bad['reason']}" for bad in self.found[:SHOWN])
        more = len(self.found) - SHOWN
        raise ConfigError(
            f"{self._source}: samples that cannot be used: {len(self.found)}, where max_bad_samples "
            f"allows {self._allowed}:{lines}"
            + (f"\n       and {more} more" if more > 0 else "")
            + "\n"
            "       Repair them, or set data.max_bad_samples (--max-bad-samples) to leave so many out."
        )


def _with_fast_access(parts: list[Part], plan: Plan, pool: Executor) -> list[Part]:
    """The parts from memory, where their source gives rows only one after the other and is not spilled."""
    cached: dict[int, Samples] = {}
    fast = []
    for part in parts:
        samples = part.samples
        if not samples.is_random_access and part.name not in plan.rows_per_run:
            if id(samples) not in cached:
                cached[id(samples)] = Cached.of(samples, pool)
            samples = cached[id(samples)]
        fast.append(replace(part, samples=samples))
    return fast


# The end.


def _commit(
    dest: RunFolder, options: Options, plan: Plan, written: dict[str, Written], bad: BadSamples
) -> None:
    for name, part in written.items():
        if not any(found.rows for found in part.files):
            raise ConfigError(
                f"{options.source}: its part for {name} has no sample that can be used."
            )
    sums = written[TRAIN].sums
    images = Images(
        source=options.source,
        shape=plan.form.shape,
        kind="images" if options.row_bytes is None else "text",
        encoding=plan.form.encoding,
        classes=plan.classes,
        mean=sums.mean,
        spread=tuple(max(spread, SMALLEST_SPREAD) for spread in sums.spread),
    )
    known = {
        "format": FORMAT,
        "options": asdict(options),
        "images": asdict(images),
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
    dest.write(f"{dest.root}/{DATASET}", json.dumps(known, indent=1))
    _clear(dest)


def _count_classes(files: list[Finished], num_classes: int) -> list[int]:
    counts = np.zeros(num_classes, int)
    for found in files:
        for label, count in found.class_counts.items():
            counts[label] += count
    return counts.tolist()
