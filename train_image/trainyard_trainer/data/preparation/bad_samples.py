"""Samples that cannot be used: their records, and the end of a preparation that has too many of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainyard_trainer.data.sources.parts import SampleLocation
from trainyard_trainer.errors import ConfigError

SHOWN = 5
"""The largest number of bad samples that an error message lists."""


def bad_record(place: SampleLocation, reason: str) -> dict[str, Any]:
    """Return the record of a bad sample, as dataset.json has it."""
    return {"file": place.file, "row": place.row, "place": str(place), "reason": reason}


def require_few(
    source: str, found: Sequence[Mapping[str, Any]], allowed: int, *, what: str = "samples"
) -> None:
    """Raise ConfigError if there are more bad samples than allowed; `what` is their name in the plural."""
    if len(found) <= allowed:
        return
    raise ConfigError(
        f"{source}: {what} that cannot be used: {len(found)}, where max_bad_samples allows {allowed}:"
        f"{listed(found)}\n"
        "       Repair them, or set data.max_bad_samples (--max-bad-samples) to leave so many out."
    )


def listed(found: Sequence[Mapping[str, Any]]) -> str:
    """Return the first bad samples, each with its place and reason in a line of an error message."""
    lines = "".join(f"\n       {bad['place']}: {bad['reason']}" for bad in found[:SHOWN])
    more = len(found) - SHOWN
    return lines + (f"\n       and {more} more" if more > 0 else "")


class BadSamples:
    """The samples that cannot be used. More of them than allowed end the preparation."""

    def __init__(self, source: str, allowed: int) -> None:
        self.found: list[dict[str, Any]] = []
        self._source = source
        self._allowed = allowed

    def add(self, split: str, found: list[tuple[SampleLocation, str]]) -> None:
        """Add samples, with the reason for each. Raises ConfigError if there are more than allowed."""
        self.found += [{"split": split, **bad_record(*each)} for each in found]
        require_few(self._source, self.found, self._allowed)
