"""Format an explanation as lines of text, for a terminal and for the end of a watch."""

from __future__ import annotations

from collections.abc import Iterator

from trainyard.cluster.command_options import command_options
from trainyard.diagnosis.catalogue import Explanation, Finding


def explanation_lines(explanation: Explanation) -> Iterator[str]:
    """Yield the lines of an explanation: the state of the run, the cause, its evidence and its remedy."""
    submission = f" ({explanation.submission})" if explanation.submission else ""
    yield f"run {explanation.run}{submission}: {explanation.activity}"
    if explanation.finding is not None:
        yield from finding_lines(explanation.finding)
    elif explanation.is_failed:
        yield "cause:    not a known failure; these messages were found:"
        yield from (f"          {seen.source}: {seen.text}" for seen in explanation.observations)
        options = command_options(explanation.namespace, explanation.context)
        yield (
            f"remedy:   send what `trainyard explain {explanation.run} {options} --save "
            "snapshot.yaml` writes to the maintainers of trainyard"
        )
    if explanation.unread:
        yield f"not read: {', '.join(explanation.unread)}"


def finding_lines(finding: Finding) -> Iterator[str]:
    """Return the lines of a finding: its cause, its evidence and its remedy."""
    yield f"cause:    {finding.cause}"
    yield from (f"          {seen.source}: {seen.text}" for seen in finding.evidence)
    yield f"remedy:   {finding.remedy}"
    yield f"          (docs/reference/failures.md: {finding.failure})"
