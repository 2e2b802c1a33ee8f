"""Find possible sizes near the one that a run asks for, for the hints of error messages."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from math import lcm

from trainyard.errors import ConfigError
from trainyard.planning.sizing.layout import count, layout_for
from trainyard.platform import Platform, Pool
from trainyard.run_file.models import (
    WORKER_LIMIT,
    NetworkRun,
    RunConfig,
)


def _is_possible(run: RunConfig, pool: Pool, workers: int) -> bool:
    """Return whether a run can have a number of workers on a pool."""
    # Dividing the batch is the cheap test, and excludes most numbers.
    if isinstance(run, NetworkRun) and run.train.global_batch_size % workers:
        return False
    try:
        layout_for(run, pool, workers)
    except ConfigError:
        return False
    return True


def _first(run: RunConfig, pool: Pool, numbers: Iterable[int]) -> list[int]:
    """Return a list of the first possible number of workers, or an empty list."""
    return next(([number] for number in numbers if _is_possible(run, pool, number)), [])


def next_possible_sizes(run: RunConfig, pool: Pool) -> list[str]:
    """Return a line with the nearest possible sizes below and above the one asked for."""
    asked, highest = run.resources.bounds[0], _most(run)
    found = [
        *_first(run, pool, range(min(asked, highest + 1) - 1, 0, -1)),
        *_first(run, pool, range(asked + 1, highest + 1)),
    ]
    batch = (
        f" with train.global_batch_size = {run.train.global_batch_size}"
        if isinstance(run, NetworkRun)
        else ""
    )
    if not found:
        return [f"No number is possible{batch} on pool {pool.name}."]
    numbers = " or ".join(str(number) for number in found[:-1] + [count(found[-1], pool.unit)])
    return [f"Use {numbers}{batch} on pool {pool.name}."]


def _most(run: RunConfig) -> int:
    """Return the largest number of workers that the run's batch allows."""
    if isinstance(run, NetworkRun):
        return min(run.train.global_batch_size, WORKER_LIMIT)
    return WORKER_LIMIT


def other_pools(run: RunConfig, pool: Pool, platform: Platform) -> list[str]:
    """Return a line that names other pools on which the number asked for is possible, if there are any."""
    asked = run.resources.bounds[0]
    names = [
        other.name
        for other in platform.pools
        if other.unit == pool.unit and other != pool and _is_possible(run, other, asked)
    ]
    if not names:
        return []
    return [f"{count(asked, pool.unit)} fit pool {' and '.join(names)}: set resources.pool."]


def possible_ranges(run: NetworkRun, pool: Pool) -> list[str]:
    """Return a line with the possible sizes of an elastic run, and with the ranges in which all sizes are."""
    sizes = [
        size
        for size in range(pool.slots, _most(run) + 1, pool.slots)
        if _is_possible(run, pool, size)
    ]
    ranges = [
        f"{size_range[0]}:{size_range[-1]}"
        for _, group in groupby(enumerate(sizes), lambda item: item[1] - item[0] * pool.slots)
        if len(size_range := [size for _, size in group]) > 1
    ]
    low, high = (max(1, end // pool.slots) for end in run.resources.bounds)
    multiple = lcm(*range(low, high + 1)) * pool.slots
    numbers = ", ".join(str(size) for size in sizes) or "none"
    possible = (
        f"Possible sizes with train.global_batch_size = {run.train.global_batch_size}: {numbers}"
    )
    remedy = (
        f"use {' or '.join(ranges)}, in which all sizes are possible"
        if ranges
        else "no range has only possible sizes"
    )
    return [f"{possible}; {remedy}. {_batch_hint(multiple)}"]


def _batch_hint(multiple: int) -> str:
    if multiple > 10**6:
        return "Or use a shorter range."
    return f"Or use a multiple of {multiple} as batch, or a fixed number."
