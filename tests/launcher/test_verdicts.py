"""`trainyard check` refuses what a real API server refuses, and nothing else."""

from __future__ import annotations

from tests.launcher.mutated_objects import refusals
from tests.launcher.verdicts import stored


def test_the_schema_agrees_with_the_stored_verdicts_of_an_api_server() -> None:
    verdicts = list(stored())
    accepted = sum(is_accepted for _, is_accepted in verdicts)
    assert min(accepted, len(verdicts) - accepted) > 50
    wrong = [
        (document, refusals(document), is_accepted)
        for document, is_accepted in verdicts
        if bool(refusals(document)) == is_accepted
    ]
    assert wrong == []
