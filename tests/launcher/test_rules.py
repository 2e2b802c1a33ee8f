"""Each rule finds the object that breaks it, at its place, and is content with the mended one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.launcher.rayjobs import ABSENT, rayjob
from tests.launcher.rule_cases import CASES, DELETION, HEAD, RAY, WORKER, C, Case, H, W
from trainyard.errors import ConfigError
from trainyard.rules.check import RULES, check, require
from trainyard.rules.field_path import Kuberay
from trainyard.rules.operator_messages import OPERATOR_MESSAGES, explain
from trainyard.rules.pods import pod_security
from trainyard.rules.practice import shell_syntax
from trainyard.rules.subject import Subject


def plain(path: str) -> str:
    """`a.0.b` -> `a[0].b`, as findings write it."""
    parts = path.split(".")
    return "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in parts).lstrip(".")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rule_finds_what_breaks_it_and_is_content_when_it_is_mended(case: Case) -> None:
    for kuberay in case.kuberay:
        mended = {finding.rule for finding in check(case.build({}), kuberay)}
        assert case.rule not in mended - set(case.beside)
        assert mended <= {*case.beside, *pod_security.NAMES}
        found = [one for one in check(case.build(case.broken), kuberay) if one.rule == case.rule]
        assert plain(case.at.replace("ray.io", "ray_io")).replace("ray_io", "ray.io") in [
            one.path for one in found
        ]
        others = {one.rule for one in check(case.build(case.broken), kuberay)} - {case.rule}
        assert others <= {*case.beside, *pod_security.NAMES, "required", "choice", "volume"}
        for finding in found:
            assert finding.problem
            assert finding.remedy.endswith((".", "?"))


def test_every_rule_has_a_case() -> None:
    finders = set()
    for case in CASES:
        subject = Subject(case.build(case.broken), case.kuberay[0])
        finders |= {rule for rule in RULES if case.rule in {one.rule for one in rule(subject)}}
    assert [rule.__name__ for rule in RULES if rule not in finders] == []


@pytest.mark.parametrize("case", [c for c in CASES if len(c.kuberay) == 1], ids=str)
def test_rules_of_one_release_are_silent_for_the_other(case: Case) -> None:
    (other,) = {"1.6", "1.7"} - set(case.kuberay)
    found = {one.rule for one in check(case.build(case.broken), other)}  # type: ignore[arg-type]
    assert case.rule not in found


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("python train.py --lr 0.1", ""),
        ("python -c 'import os; print(os.environ)'", ""),
        ('python -c "a; b | c\nd"', ""),
        ("python train.py; ls", ";"),
        ("a && b", "&&"),
        ("a | b", "|"),
        ("a\nb", "a line break"),
        ("echo $HOME", "$"),
        ('echo "$HOME"', "$"),
        ("echo '$HOME'", ""),
        (r"echo \$HOME", ""),
        ("echo `date`", "`"),
        ('echo "`date`"', "`"),
    ],
)
def test_shell_syntax_is_found_outside_of_quotes(command: str, found: str) -> None:
    assert shell_syntax(command) == found


def test_every_error_of_an_object_that_is_to_be_sent_is_listed() -> None:
    broken = rayjob({"metadata.name": "A", "spec.backoffLimit": -1})
    with pytest.raises(ConfigError, match="violates 2 rules") as raised:
        require(broken, "1.6", "2.60.0")
    assert "metadata.name = 'A'" in str(raised.value)
    assert "spec.backoffLimit = -1: must be at least 0" in str(raised.value)


def test_warnings_are_handed_back() -> None:
    (warning,) = require(rayjob({f"{W}.replicas": 1}), "1.6", "2.60.0")
    assert warning.rule == "replicas-range"


def test_an_object_that_does_not_confine_its_pods_has_four_warnings_for_each() -> None:
    unconfined = {
        f"{place}.securityContext": ABSENT
        for place in (HEAD, RAY, WORKER, f"{WORKER}.containers.0")
    }
    found = check(rayjob(unconfined), "1.6")
    assert {one.severity for one in found} == {"warning"}
    assert [one.path.partition(".spec.containers")[0] for one in found].count(plain(WORKER)) == 0
    assert len(found) == 8
    assert require(rayjob(unconfined), "1.6", "2.60.0") == ()


def test_the_version_of_ray_is_that_of_the_image_where_it_is_known() -> None:
    (found,) = check(rayjob({}), "1.6", "2.61.0")
    assert (found.rule, found.severity) == ("ray-version", "error")


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
PLACES = [
    "metadata", "metadata.labels", "metadata.annotations", "spec", "spec.deletionStrategy", DELETION,
    "spec.clusterSelector", "spec.runtimeEnvYAML", "spec.submitterPodTemplate", C, H, W, RAY, HEAD,
    f"{C}.workerGroupSpecs", f"{C}.autoscalerOptions", f"{C}.networkPolicy", f"{RAY}.env",
    f"{C}.gcsFaultToleranceOptions", f"{W}.labels", f"{RAY}.ports", f"{RAY}.image", f"{W}.replicas",
]  # fmt: skip


@given(st.sampled_from(PLACES), junk, st.sampled_from(["1.6", "1.7"]))
def test_no_object_brings_a_rule_down(place: str, value: Any, kuberay: Kuberay) -> None:
    for finding in check(rayjob({place: value}), kuberay):
        assert finding.path


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (
            "The RayJob status is invalid: JobDeploymentStatus cannot be `Waiting` when SubmissionMode "
            "is not InteractiveMode",
            "submissionMode of the RayJob was changed",
        ),
        ("RayJobDeletionPolicy feature gate must be enabled to use DeletionStrategy", "gate"),
        (
            "spec.networkPolicy requires the RayClusterNetworkPolicy feature gate to be enabled",
            "RayClusterNetworkPolicy",
        ),
        ("RayClusterHistoryServer feature gate is not enabled", "RayClusterHistoryServer"),
        (
            'RayJob.ray.io "a" is invalid: spec: Invalid value: the managedBy field is immutable',
            "managedBy of an existing RayJob was changed",
        ),
        ("gcsFaultToleranceOptions.backend is immutable", "backend"),
        ("upgradeStrategy cannot be set when RayCluster is created by RayJob", "set in a RayJob"),
        (
            "invalid RayCluster State: rayv1.RayClusterSuspending and rayv1.RayClusterSuspended "
            "conditions should not be both true",
            "both suspending and suspended",
        ),
        (
            "The RayJob spec is invalid: backoffLimit must be a positive integer",
            "backoffLimit must be",
        ),
    ],
)
def test_what_only_the_operator_sees_is_put_into_words(message: str, cause: str) -> None:
    found = explain(message)
    assert found is not None
    assert cause in found.cause
    assert "{" not in found.cause + found.remedy


def test_each_explanation_is_needed_and_unknown_words_have_none() -> None:
    assert explain("all is well") is None
    assert len({one.cause for one in OPERATOR_MESSAGES}) == len(OPERATOR_MESSAGES)
