"""`trainyard check` agrees with the API server about thousands of mutated RayJobs, RayClusters and pods."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.launcher.mutated_objects import mutated_pod, pod_refusals, refusals
from tests.launcher.rayjobs import Object
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


@pytest.mark.full
def test_no_pod_is_refused_that_the_api_server_accepts_and_few_others_are_missed() -> None:
    is_accepted = api_server(Cluster("default"))
    refused_in_vain: list[tuple[Object, list[str]]] = []
    seen, missed = [], []

    @seed(1)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(mutated_pod())
    def ask(spec: Object) -> None:
        found = pod_refusals(spec)
        if found is None:
            return
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
        if is_accepted(pod):
            refused_in_vain.extend([(spec, found)] if found else [])
        else:
            seen.append(spec)
            missed.extend([] if found else [spec])

    ask()
    assert refused_in_vain == []
    assert len(missed) < 0.05 * len(seen), (len(missed), len(seen))
