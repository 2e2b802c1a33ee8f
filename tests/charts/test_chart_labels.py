"""Labels of pods, and the selectors that must not depend on all of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.charts.helm_chart import CHART, Object, of_kind, only, pods_of, render

SELECTOR = {"app.kubernetes.io/part-of": "trainyard"}
HEAD_SELECTOR = SELECTOR | {"ray.io/node-type": "head"}
EVERYTHING: Object = {
    "rayCluster": {"enabled": True},
    "prePull": {"enabled": True},
    "test": {"gpus": True},
    "disruptionBudget": {"heads": True},
    "monitoring": {"podMonitor": {"enabled": True}},
    "security": {"networkPolicy": {"enabled": True, "apiServerCidrs": ["10.0.0.1/32"]}},
}


def selectors(node: Any) -> Iterator[Object]:
    """Each `matchLabels` of a pod selector below an object."""
    if isinstance(node, dict):
        for key in ("podSelector", "selector"):
            if isinstance(node.get(key), dict) and "matchLabels" in node[key]:
                yield node[key]["matchLabels"]
        for value in node.values():
            yield from selectors(value)
    elif isinstance(node, list):
        for item in node:
            yield from selectors(item)


def test_policies_monitors_and_budgets_select_by_labels_that_never_change() -> None:
    objects = render(EVERYTHING)
    policies = of_kind(objects, "NetworkPolicy")
    assert list(selectors(policies["trainyard-runs"])) == [SELECTOR] * 3
    assert list(selectors(policies["trainyard-heads"])) == [HEAD_SELECTOR]
    assert list(selectors(only(objects, "PodMonitor"))) == [SELECTOR]
    assert list(selectors(only(objects, "PodDisruptionBudget"))) == [HEAD_SELECTOR]


def test_a_new_label_of_pods_changes_no_selector(tmp_path: Path) -> None:
    chart = tmp_path / "trainyard"
    shutil.copytree(CHART, chart)
    labels = chart / "templates/_labels.tpl"
    definition = '{{- define "trainyard.podLabels" -}}\n'
    assert labels.read_text().count(definition) == 1
    changed = labels.read_text().replace(definition, f"{definition}cost-center: vision\n")
    labels.write_text(changed)

    before, after = render(EVERYTHING), render(EVERYTHING, chart=chart)
    assert list(selectors(after)) == list(selectors(before))
    for place, pod in pods_of(before).items():
        now = pods_of(after)[place]["metadata"]["labels"]
        assert now == pod["metadata"]["labels"] | {"cost-center": "vision"}, place
