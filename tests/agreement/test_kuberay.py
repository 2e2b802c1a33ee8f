"""What the launcher renders and refuses, held against the pinned operator: its CRDs, samples and checks."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_chart import missing, need_tool, only, render

from tests.agreement.upstream_cases import recorded_cases
from tests.agreement.variants import VARIANTS, rendered
from tests.charts.crd_schemas import FILE_NAME, module_folder, write_ray_schemas
from tests.golden.golden import FOLDER, ROOT
from tests.launcher.rayjobs import ABSENT
from tests.launcher.rule_cases import CASES, Case
from trainyard.rules.check import check

VALIDATE = ROOT / "tests/cluster/tools/operator"

Object = dict[str, Any]

pytestmark = pytest.mark.timeout(900)  # the first build of the operator's validation takes minutes

OPERATORS = {case.rule for case in CASES if case.operator}
"""The names of the operator's rules; the others are the API server's, or nobody's."""

PAIRS = 700 if os.environ.get("CI") else 100
"""How many pairs of broken rules the operator is asked about."""


def operator() -> Path:
    """The operator's module, as the test cluster is built from it."""
    folder = module_folder("github.com/ray-project/kuberay/ray-operator")
    if folder is None:
        missing("the operator's module is not in Go's module cache")
    return folder


@cache
def documents(folder: Path) -> list[tuple[str, Object]]:
    """Each RayJob and RayCluster of the operator's samples, with the name of its file."""
    found = []
    for file in sorted(folder.rglob("*.yaml")):
        for document in yaml.load_all(file.read_text(), yaml.CSafeLoader):
            if isinstance(document, dict) and document.get("kind") in ("RayJob", "RayCluster"):
                found.append((file.name, document))
    return found


@pytest.fixture(scope="session")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[Object]], list[str]]:
    """What KubeRay's own validation says against each object; "" for a valid one."""
    operator()
    program = tmp_path_factory.mktemp("validate") / "validate"
    subprocess.run(
        [str(shutil.which("go")), "build", "-mod=readonly", "-trimpath", "-buildvcs=false"]
        + ["-o", str(program), "./validate"],
        cwd=VALIDATE,
        check=True,
        env=os.environ | {"GOFLAGS": "", "GOPROXY": "off"},
    )

    def validate(objects: list[Object]) -> list[str]:
        lines = "".join(json.dumps(with_defaults(one)) + "\n" for one in objects)
        ended = subprocess.run([program], input=lines, capture_output=True, text=True, check=True)
        said = ended.stdout.splitlines()
        assert len(said) == len(objects), ended.stderr
        return said

    return validate


def with_defaults(document: Object) -> Object:
    """The object with what the API server fills in by the CRD."""
    document = json.loads(json.dumps(document))
    spec, metadata = document["spec"], document["metadata"]
    metadata.setdefault("name", f"{metadata.get('generateName')}abcde")
    if document["kind"] == "RayJob":
        spec.setdefault("submissionMode", "K8sJobMode")
        spec = spec.get("rayClusterSpec", {})
    for group in spec.get("workerGroupSpecs") or []:
        for key, value in (("replicas", 0), ("minReplicas", 0), ("maxReplicas", 2**31 - 1)):
            group.setdefault(key, value)
    return document


@pytest.mark.parametrize(("system", "run", "kuberay"), VARIANTS)
def test_what_is_rendered_obeys_the_rules(system: str, run: str, kuberay: str) -> None:
    assert check(rendered(system, run, kuberay), kuberay, "2.60.0") == ()  # type: ignore[arg-type]


@pytest.mark.ci
def test_what_is_rendered_fits_the_crds(tmp_path: Path) -> None:
    write_ray_schemas(operator(), tmp_path)
    objects = [rendered(*variant) for variant in VARIANTS]
    objects += [yaml.load(file.read_text(), yaml.CSafeLoader) for file in FOLDER.glob("*.yaml")]
    ended = subprocess.run(
        [need_tool("kubeconform"), "-strict", "-summary"]
        + ["-schema-location", f"{tmp_path}/{FILE_NAME}"],
        input=yaml.dump_all(objects, Dumper=yaml.CSafeDumper),
        text=True,
        capture_output=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    assert f"Valid: {len(objects)}," in ended.stdout


@pytest.mark.ci
def test_what_is_rendered_is_valid_for_the_operator(
    refusals: Callable[[list[Object]], list[str]],
) -> None:
    said = refusals([rendered(*variant) for variant in VARIANTS])
    assert dict(zip(VARIANTS, said, strict=True)) == dict.fromkeys(VARIANTS, "")


@pytest.mark.parametrize("kuberay", ["1.6", "1.7"])
def test_the_operators_samples_break_no_rule(kuberay: Any) -> None:
    samples = documents(operator() / "config/samples")
    assert len([one for _, one in samples if one["kind"] == "RayJob"]) >= 20
    errors = [
        (name, str(finding))
        for name, sample in samples
        for finding in check(sample, kuberay)
        if finding.severity == "error"
    ]
    assert errors == []


@pytest.mark.ci
def test_the_operators_samples_are_valid_for_itself(
    refusals: Callable[[list[Object]], list[str]],
) -> None:
    samples = [
        one for _, one in documents(operator() / "config/samples") if "name" in one["metadata"]
    ]
    assert set(refusals(samples)) == {""}


@pytest.mark.ci
def test_the_operator_refuses_what_its_rules_find_and_takes_what_is_mended(
    refusals: Callable[[list[Object]], list[str]],
) -> None:
    cases: list[Case] = [case for case in CASES if case.operator]
    assert len(cases) >= 70
    broken = refusals([case.build(case.broken) for case in cases])
    assert [str(case) for case, said in zip(cases, broken, strict=True) if not said] == []
    mended = refusals([case.build({}) for case in cases])
    assert [(str(case), said) for case, said in zip(cases, mended, strict=True) if said] == []


@pytest.mark.ci
def test_the_rules_agree_with_the_operator_about_two_things_at_once(
    refusals: Callable[[list[Object]], list[str]],
) -> None:
    cases = [case for case in CASES if "1.6" in case.kuberay and case.rule in OPERATORS]
    pairs = [pair for pair in itertools.combinations(cases, 2) if _go_together(*pair)]
    objects = []
    for one, other in random.Random(0).sample(pairs, PAIRS):
        both = {**one.given, **other.given}
        objects += [case.made_of({**both, **case.broken}) for case in (one, other)]
        objects.append(one.made_of(both))
    said = refusals(objects)
    assert min(said.count(""), len(said) - said.count("")) > PAIRS / 7
    wrong = []
    for document, refusal in zip(objects, said, strict=True):
        found = [one for one in check(document, "1.6") if one.severity == "error"]
        errors = [str(one) for one in found if one.rule in OPERATORS]
        if bool(errors) != bool(refusal):
            wrong.append((refusal, errors, document))
    assert wrong == []


def _go_together(one: Case, other: Case) -> bool:
    """Whether neither removes what the other changes."""
    changes = {**one.given, **other.given, **one.broken, **other.broken}
    removed = tuple(f"{path}." for path, value in changes.items() if value is ABSENT)
    return one.of == other.of and not any(path.startswith(removed) for path in changes)


UNSEEN = re.compile("feature gate is enabled|must set both minReplicas and maxReplicas")
"""What the operator's settings decide, and what the defaults of the API server rule out."""


@pytest.mark.slow
def test_the_rules_agree_with_each_case_of_the_operators_own_tests(tmp_path: Path) -> None:
    cases = recorded_cases(operator(), tmp_path)
    assert len(cases) > 100
    assert len([said for _, said in cases if said]) > 50
    wrong = []
    for document, said in cases:
        document["metadata"].setdefault("name", "case")
        document.setdefault("apiVersion", "ray.io/v1")  # the operator's tests leave it out
        found = [one for one in check(document, "1.6") if one.severity == "error"]
        errors = [str(one) for one in found if one.rule in {*OPERATORS, "range"}]
        if bool(errors) != bool(said) and not UNSEEN.search(said):
            wrong.append((said, errors, document))
    assert wrong == []


@pytest.mark.parametrize("pool", ["cpu", "gpu"])
@pytest.mark.parametrize("kuberay", ["1.6", "1.7"])
def test_the_charts_standing_cluster_breaks_no_rule(pool: str, kuberay: Any) -> None:
    standing = only(render({"rayCluster": {"enabled": True, "pool": pool}}), "RayCluster")
    assert check(standing, kuberay, "2.60.0") == ()
