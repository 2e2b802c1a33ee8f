"""A data set of the user's own: samples by their index, read in the order of the run's seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from trainyard_trainer.config.training.own_recipe import OwnData
from trainyard_trainer.data.loading.batch import Batch, BatchRequest
from trainyard_trainer.data.loading.stream_order import StreamOrder
from trainyard_trainer.data.sources.lance_datasets import LanceVersion
from trainyard_trainer.data.sources.rows.find_rows import TableSplit
from trainyard_trainer.data.sources.rows.row_source import Columns, Values, rows_of
from trainyard_trainer.errors import ConfigError, DatasetError, TrainerError
from trainyard_trainer.run_files.programs.code_imports import Imports
from trainyard_trainer.user_import import described, import_reference, user_errors

SplitName = Literal["train", "valid"]

Sample = Mapping[str, Any]
"""The columns of one sample by name: tensors, arrays or numbers."""

Collate = Callable[[Sequence[Sample]], Mapping[str, torch.Tensor]]
"""A function that makes the columns of a batch of the columns of its samples."""


def stacked(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Stack the samples' values of each column along a new first axis, as PyTorch's `default_collate`.

    Raises ConfigError for strings, bytes, and arrays of different shapes.
    """
    for name, value in samples[0].items():
        if lacking := [sample for sample in samples if name not in sample]:
            raise ConfigError(
                f"column {name} is in some samples, and not in others, which have {', '.join(lacking[0])}"
            )
        shapes = {tuple(np.shape(sample[name])) for sample in samples}
        if isinstance(value, str | bytes) or len(shapes) > 1:
            kind = f"shapes {sorted(shapes)}" if len(shapes) > 1 else type(value).__name__
            raise ConfigError(
                f"column {name} has {kind}, which cannot be stacked: override collate in the recipe to make "
                "a tensor of it, or leave it out"
            )
    columns: dict[str, torch.Tensor] = default_collate([dict(sample) for sample in samples])
    return columns


def stacked_columns(columns: Columns) -> dict[str, torch.Tensor]:
    """Make the tensors that `stacked` makes of the rows of a table, column by column."""
    return {name: _stacked_column(name, values) for name, values in columns.items()}


def _stacked_column(name: str, values: Values) -> torch.Tensor:
    if isinstance(values, np.ndarray) and values.dtype.isnative and values.dtype.kind in NUMBERS:
        return torch.from_numpy(values)
    return stacked([{name: value} for value in values])[name]


NUMBERS = "biufc"
"""The kinds of NumPy's types of booleans and numbers."""


TABLE = "trainyard_trainer.data.sources.rows.find_rows:open_table"
"""The function that opens a table, as data sets are named."""


class UserSamples(Protocol):
    """What the user's function returns for a split: a map-style data set, as PyTorch calls it."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class UserDataInfo:
    """What is known of a data set of the user."""

    source: str
    """The function or class that makes it, as `module:name`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UserDataset:
    """A data set that a function of the user's code makes, once for each split."""

    dataset: str
    """The function or class as `module:name`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Its arguments beside `split`."""
    num_train: int
    num_valid: int
    bad_samples: int = 0
    table: str | None = None
    """The path of a table that trainyard reads; None for a data set of the user."""
    stream: StreamOrder | None = None
    """The order of the training samples if the table is streamed."""

    @property
    def info(self) -> UserDataInfo:
        """Return what the checkpoints and the report say of the data."""
        return UserDataInfo(source=self.table or self.dataset)

    @property
    def origin(self) -> str:
        """Return the key and the value of the run file that name the data."""
        return f"data.source = {self.table}" if self.table else f"data.dataset = {self.dataset}"

    @classmethod
    def open(
        cls, dataset: str, options: Mapping[str, Any], *, table: str | None = None
    ) -> UserDataset:
        """Make both splits once, to count their samples. Raises ConfigError."""
        counts, stream = {}, None
        for split in ("train", "valid"):
            samples = make_samples(dataset, options, split)
            counts[split] = len(samples)
            if not counts[split]:
                raise ConfigError(f"data.dataset = {dataset}: the split {split!r} has no samples")
            with user_errors(f"data.dataset = {dataset}: reading sample 0 of {split!r}"):
                require_sample(samples[0], f"data.dataset = {dataset}")
            if table is None or not isinstance(samples, TableSplit):
                continue
            # The other split, and all workers, read the same version.
            options = {**options, "versions": {**options["versions"], **samples.versions}}
            if split == "train" and samples.group_rows:
                stream = StreamOrder.of_table(samples, options["groups_at_once"])
        return cls(
            dataset=dataset,
            options=options,
            num_train=counts["train"],
            num_valid=counts["valid"],
            table=table,
            stream=stream,
        )

    @classmethod
    def open_table(
        cls,
        data: OwnData,
        *,
        endpoint: str | None,
        seed: int,
        versions: Mapping[str, LanceVersion] | None = None,
    ) -> UserDataset:
        """Open the table at `data.source`. Raises ConfigError if there is none.

        `versions` are those of data sets of Lance that the run has read before, by their addresses.
        """
        options: dict[str, Any] = {
            "source": data.source,
            "endpoint": data.endpoint or endpoint,
            "columns": data.columns,
            "valid_share": data.valid_share,
            "seed": seed,
            "versions": versions or {},
        }
        if data.stream:
            options["groups_at_once"] = data.stream_groups
        else:
            options["memory_bytes"] = data.memory_bytes
        return cls.open(TABLE, options, table=data.source)

    @property
    def versions(self) -> Mapping[str, LanceVersion]:
        """The versions of the data sets of Lance that a table is read from, by their addresses."""
        found: Mapping[str, LanceVersion] = self.options["versions"] if self.table else {}
        return found

    def samples(self, split: SplitName) -> UserSamples:
        """Make the samples of a split in this process. Raises ConfigError."""
        return make_samples(self.dataset, self.options, split)


def make_samples(dataset: str, options: Mapping[str, Any], split: str) -> UserSamples:
    """Call the user's function for a split. Raises ConfigError with the file and line if it fails."""
    with user_errors(f"data.dataset = {dataset}"):
        make = import_reference(dataset, "data.dataset")
    with user_errors(f"data.dataset = {dataset}: the call with split={split!r}"):
        samples: UserSamples = make(split=split, **options)
    require_map_style(samples, f"data.dataset = {dataset}")
    return samples


def require_map_style(samples: object, origin: str) -> None:
    """Raise ConfigError if an object is no data set; `origin` says in the message what returned it."""
    for method in ("__len__", "__getitem__"):
        if not hasattr(samples, method):
            raise ConfigError(
                f"{origin} returned {type(samples).__name__}, which has no {method}: "
                "a data set has __len__ and __getitem__"
            )


def require_sample(sample: object, origin: str) -> None:
    """Raise ConfigError if a sample is not a mapping of column names to values; `origin` is the data set."""
    if not isinstance(sample, Mapping) or not all(isinstance(name, str) for name in sample):
        raise ConfigError(
            f"{origin}: a sample is {type(sample).__name__}, and has to be a mapping of "
            'column names to tensors, arrays or numbers, such as {"x": ..., "y": ...}'
        )


def seed_generators(seed: int, epoch: int, index: int) -> None:
    """Seed the global generators of random numbers for reading a sample of the user's data set."""
    seeds = np.random.SeedSequence([seed, epoch, index]).generate_state(3)
    random.seed(int(seeds[0]))
    np.random.seed(seeds[1])
    torch.default_generator.manual_seed(int(seeds[2]))


class UserRows(Dataset[Batch]):
    """A split of the user's data set whose items are whole batches. It is pickled without its samples.

    Before each sample is read, the generators of `random`, `numpy.random` and `torch` are seeded from the
    run's seed, the epoch and the sample's index. So random changes in `__getitem__` are the same on any
    worker, and after a resume.
    """

    def __init__(self, data: UserDataset, split: SplitName, *, seed: int, collate: Collate) -> None:
        self.data = data
        self.split: SplitName = split
        self.seed = seed
        self.collate = collate
        self._samples: UserSamples | None = None

    def __getstate__(self) -> tuple[Imports, dict[str, Any]]:
        return Imports(), self.__dict__ | {"_samples": None}

    def __setstate__(self, state: tuple[Imports, dict[str, Any]]) -> None:
        self.__dict__ |= state[1]

    def __len__(self) -> int:
        return self.data.num_train if self.split == "train" else self.data.num_valid

    def __getitem__(self, request: BatchRequest) -> Batch:
        indices = request.indices
        if not len(indices):
            one = self[BatchRequest(np.zeros(1, np.int64), request.epoch)]
            return one.rows(0, 0)
        if self._samples is None:
            self._samples = self.data.samples(self.split)
        columns = self._collated(self._samples, indices, request.epoch)
        return Batch(columns, torch.from_numpy(indices))

    def _collated(
        self, samples: UserSamples, indices: np.ndarray, epoch: int
    ) -> Mapping[str, torch.Tensor]:
        """Read samples and collate them: those of a table all at once, others one after the other."""
        collate: Callable[[], Mapping[str, torch.Tensor]]
        if isinstance(samples, TableSplit):
            columns = samples.read(indices)
            if self.collate is stacked:
                collate = partial(stacked_columns, columns)
            else:
                collate = partial(self.collate, rows_of(columns))
        else:
            # One at a time, though some data sets of PyTorch have __getitems__: each has a seed of its own.
            rows = [self._read_one(samples, index, epoch) for index in indices.tolist()]
            collate = partial(self.collate, rows)
        try:
            return collate()
        except TrainerError:
            raise
        except Exception as error:  # the samples are the user's
            raise DatasetError(
                f"{self.data.origin}: the samples {indices.tolist()} of {self.split!r} cannot be collated: "
                f"{described(error)}"
            ) from error

    def _read_one(self, samples: UserSamples, index: int, epoch: int) -> Sample:
        """Read a sample, whose random numbers depend on seed, epoch and index alone."""
        seed_generators(self.seed, epoch, index)
        try:
            return samples[index]
        except Exception as error:  # the data set is the user's
            raise DatasetError(
                f"{self.data.origin}: sample {index} of {self.split!r} cannot be read: {described(error)}"
            ) from error
