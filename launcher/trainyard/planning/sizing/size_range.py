"""The smallest and the largest layout of a run; they are equal unless the run is elastic."""

from __future__ import annotations

from trainyard.errors import ConfigError
from trainyard.planning.nodes.placement import packing_of
from trainyard.planning.sizing.alternatives import next_possible_sizes, other_pools, possible_ranges
from trainyard.planning.sizing.layout import Layout, asked_amount, count, layout_for
from trainyard.platform import Platform, Pool
from trainyard.run_file.models import (
    NetworkRun,
    RunConfig,
)


def layout_range(run: RunConfig, pool: Pool, platform: Platform) -> tuple[Layout, Layout]:
    """Return the smallest and the largest layout of a run. Raises ConfigError with possible sizes."""
    ends = run.resources.bounds
    if not run.resources.is_elastic:
        try:
            layout = layout_for(run, pool, ends[0])
        except ConfigError as error:
            hints = (*next_possible_sizes(run, pool), *other_pools(run, pool, platform))
            raise ConfigError(error.what, *error.details, *hints) from None
        return layout, layout
    assert isinstance(
        run, NetworkRun
    )  # the run file's models refuse {min, max} for other kinds of runs
    sizes = range(ends[0], ends[1] + 1, pool.slots)
    try:
        for end in ends:
            if end % pool.slots:
                raise ConfigError(
                    f"resources.{run.resources.unit} = {asked_amount(run)}: an elastic run grows by whole "
                    f"nodes, and pool {pool.name} has {count(pool.slots, pool.unit)} per node"
                )
        layouts = [layout_for(run, pool, size) for size in sizes]
    except ConfigError as error:
        raise ConfigError(error.what, *error.details, *possible_ranges(run, pool)) from None
    _require_autoscaling(run, pool, platform)
    return layouts[0], layouts[-1]


def _require_slices(pool: Pool, platform: Platform, asked: str, remedy: str) -> None:
    """Raise ConfigError if Kueue cannot change the size of a run in this pool."""
    if not platform.queue.elastic:
        raise ConfigError(
            f"{asked}, and the platform does not say that its Kueue changes the size of an admitted run",
            "Set queue.kueue.elastic in the chart's values if Kueue's feature gate "
            f"ElasticJobsViaWorkloadSlices is enabled, or {remedy}",
        )
    if packing_of(platform.worker_group(pool.name)["template"]) is not None:
        raise ConfigError(
            f"{asked}, and pool {pool.name} has a topologyKey: Kueue does not pack the workers of runs whose "
            "size changes",
            f"Name a pool without topologyKey, or {remedy}",
        )


def _require_autoscaling(run: RunConfig, pool: Pool, platform: Platform) -> None:
    """Raise ConfigError if the platform cannot add nodes to a running cluster."""
    low, high = run.resources.bounds
    asked = (
        f"resources.{run.resources.unit} = {asked_amount(run)} is elastic, which needs autoscaling"
    )
    if platform.queue.system == "kueue":
        _require_slices(pool, platform, asked, f"use a fixed number: {low} or {high}.")
    if platform.autoscaler is None:
        raise ConfigError(
            f"{asked}, and the platform has no autoscaler",
            "Set elastic.enabled in the chart's values and upgrade it (`make platform`), or use a fixed "
            f"number: {low} or {high}.",
        )
