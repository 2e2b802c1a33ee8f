"""`trainyard check` agrees with the API server about thousands of mutated RayJobs and RayClusters."""

from __future__ import annotations

import pytest

from tests.launcher.mutated_objects import refusals
from tests.launcher.verdicts import api_server, collect, with_changes
from trainyard.cluster.cluster import Cluster

EXAMPLES = 3000


@pytest.mark.full
def test_the_schema_agrees_with_the_api_server() -> None:
    wrong = []
    for kind, changes, is_accepted in collect(EXAMPLES, 1, api_server(Cluster("default"))):
        found = refusals(with_changes(kind, changes))
        if bool(found) == is_accepted:
            wrong.append((kind, changes, is_accepted, found))
    assert wrong == []
