"""An explanation in words: for a terminal, and for the end of a watch."""

from __future__ import annotations

from collections.abc import Iterator

from trainyard.diagnosis.catalogue import Explanation, Finding


def explanation_lines(explanation: Explanation) -> Iterator[str]:
    """How the run stands, the one cause, where it was seen, and the one remedy."""
    submission = f" ({explanation.submission})" if explanation.submission else ""
    yield f"run {explanation.run}{submission}: {explanation.activity}"
    if explanation.finding is not None:
        yield from finding_lines(explanation.finding)
    elif explanation.is_failed:
        yield "cause:    none that is known; this was said:"
        yield from (f"          {seen.source}: {seen.text}" for seen in explanation.observations)
        yield (
            f"remedy:   send what `trainyard explain {explanation.run} -n {explanation.namespace} --save "
            "snapshot.yaml` writes to those who care for trainyard"
        )
    if explanation.unread:
        yield f"not read: {', '.join(explanation.unread)}"


def finding_lines(finding: Finding) -> Iterator[str]:
    """Return the lines of a finding: its cause, its evidence and its remedy."""
    yield f"cause:    {finding.cause}"
    yield from (f"          {seen.source}: {seen.text}" for seen in finding.evidence)
    yield f"remedy:   {finding.remedy}"
    yield f"          (docs/reference/failures.md: {finding.failure})"
