"""The rules of Pod Security agree with Kubernetes' own examples of accepted and refused pods."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from helm_chart import missing

from tests.charts.crd_schemas import module_folder
from trainyard.rules.field_path import FieldPath
from trainyard.rules.pods.pod_security import baseline, containers_of, restricted

WINDOWS = {"base_windows.yaml"}
"""Examples of Windows pods, for which `restricted` asks for less."""


def examples(level: str, verdict: str) -> list[Path]:
    """The newest examples of a profile that Kubernetes accepts (`pass`) or refuses (`fail`)."""
    module = module_folder("k8s.io/pod-security-admission")
    if module is None:
        missing("the module k8s.io/pod-security-admission is not in Go's module cache")
    versions = (module / "test/testdata" / level).glob("v1.*")
    newest = max(versions, key=lambda folder: int(folder.name.removeprefix("v1.")))
    return [file for file in sorted((newest / verdict).glob("*.yaml")) if file.name not in WINDOWS]


@pytest.mark.parametrize("verdict", ["pass", "fail"])
@pytest.mark.parametrize(("level", "least"), [("baseline", 8), ("restricted", 20)])
def test_the_rules_agree_with_kubernetes(level: str, verdict: str, least: int) -> None:
    files = examples(level, verdict)
    assert len(files) >= least
    wrong = []
    for file in files:
        pod = FieldPath("", yaml.safe_load(file.read_text()))
        found = list(baseline(pod, containers_of(pod)))
        if level == "restricted":
            found += restricted(pod, containers_of(pod))
        if bool(found) != (verdict == "fail"):
            wrong.append((file.name, [str(one) for one in found]))
    assert wrong == []
