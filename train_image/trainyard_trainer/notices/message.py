"""The message about the end of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainyard_trainer.config.notify import Outcome
from trainyard_trainer.config.training.metric import VALIDATION_PREFIX

SHOWN_METRICS = 4
"""The number of metrics in a message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """A message about the end of a run."""

    outcome: Outcome
    title: str
    body: str
    facts: Mapping[str, str]
    """What a webhook gets beside title and body, by name."""


def message_of(
    run: str,
    outcome: Outcome,
    *,
    error: str | None,
    summary: Mapping[str, Any],
    submission: str | None,
) -> Message:
    """Write the message about the end of a run.

    `summary` is that of the last attempt, empty if it has none.
    """
    words = {"succeeded": "has succeeded", "failed": "has failed", "stopped": "was stopped"}
    cause = f": {error.rstrip('.')}" if error else ""
    lines = [f"Run {run} {words[outcome]}{cause}."]
    told = {
        key: summary[key] for key in ("attempts", "epochs", "steps") if summary.get(key) is not None
    }
    if told:
        lines.append(", ".join(f"{key} {value}" for key, value in told.items()))
    if metrics := _metrics(summary):
        lines.append(", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
    if outcome == "succeeded" and summary.get("report"):
        lines.append(f"Report: {summary['report']}")
    if outcome == "failed":
        lines.append(f"`trainyard explain {run}` names the cause.")
    facts = {"run": run, "outcome": outcome, **{key: f"{value}" for key, value in told.items()}}
    if submission:
        facts["submission"] = submission
    if error:
        facts["error"] = error
    return Message(
        outcome=outcome,
        title=f"trainyard: {run} {outcome}",
        body="\n".join(lines),
        facts=facts,
    )


def without_secrets(error: str, secrets: Iterable[str]) -> str:
    """Return an error without the values of secrets: it is the text of a library or of the user's code."""
    for secret in filter(None, secrets):
        error = error.replace(secret, "***")
    return error


def _metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the first validation metrics of a summary, or what the user's program has reported."""
    own = summary.get("metrics")
    source = own if isinstance(own, Mapping) else summary
    numbers = {
        name: value
        for name, value in source.items()
        if isinstance(value, int | float) and (source is own or name.startswith(VALIDATION_PREFIX))
    }
    return dict(list(numbers.items())[:SHOWN_METRICS])
