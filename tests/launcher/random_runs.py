"""Run files that nobody would think of, and platforms for them, as strategies of hypothesis."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from tests.launcher.pools import platform_with_spot
from trainyard.platform import (
    DataVolume,
    Platform,
    PlatformQueue,
    RunPermissions,
    RunVariables,
    load_platform,
)
from trainyard.run_file.load import load_run

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
EXAMPLE = EXAMPLES / "digits.yaml"
DATA_VOLUMES = tuple(
    DataVolume(
        name=name,
        volume={
            "name": f"data-{name}",
            "persistentVolumeClaim": {"claimName": name, "readOnly": True},
        },
        mount={"name": f"data-{name}", "mountPath": f"/data/{name}", "readOnly": True},
    )
    for name in ("imagenet", "texts")
)
PLATFORM = load_platform(None).model_copy(update={"data_volumes": DATA_VOLUMES})
SEVERAL_POOLS = platform_with_spot().model_copy(update={"data_volumes": DATA_VOLUMES})

OPEN_TO_RUNS = RunPermissions(
    env=RunVariables(deny=()), secrets=("*",), volumes=("*",), labels=("*",)
)
"""All that a platform can permit."""

Made = tuple[dict[str, Any], Platform]


def paths_of(document: Any) -> list[tuple[str, ...]]:
    """The paths of all keys of a mapping."""
    if not isinstance(document, dict):
        return []
    return [
        path
        for key, value in document.items()
        for path in ((key,), *((key, *rest) for rest in paths_of(value)))
    ]


def document_of(example: Path) -> dict[str, Any]:
    """What an example says, from any working directory."""
    document: dict[str, Any] = yaml.safe_load(example.read_text())
    if "code" in document:
        document["code"] = str(EXAMPLES / document["code"])
    return document


KINDS = {path.stem: document_of(path) for path in sorted(EXAMPLES.glob("*.yaml"))}
"""A run file of each kind of run."""

DIGITS = KINDS["digits"]

PATHS = {
    kind: paths_of(load_run(document).model_dump())
    + [("resources", "data", "nodes"), ("network", "preset"), ("x", "y")]
    for kind, document in KINDS.items()
}
"""All keys that a run file of a kind may have, and a few more."""

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["digits", "ray", "torch", "cpu", "gpu", "s3://b/x", "a/b:1", "adamw", "8:16"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


def change(
    draw: st.DrawFn, kind: str, document: dict[str, Any], values: st.SearchStrategy[Any]
) -> dict[str, Any]:
    """The document with a few of its kind's keys changed to such values."""
    for path in draw(st.lists(st.sampled_from(PATHS[kind]), min_size=1, max_size=3)):
        put(document, path, draw(values.filter(is_no_folder) if path == ("code",) else values))
    return document


def put(document: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Change one key, whatever its section was before."""
    for key in path[:-1]:
        if not isinstance(document.get(key), dict):
            document[key] = {}
        document = document[key]
    document[path[-1]] = value


def is_no_folder(value: Any) -> bool:
    """Whether a value of `code` has nothing packed but what an example says: `""` or `/` would have."""
    return not (isinstance(value, str) and os.path.isdir(value))  # noqa: PTH112


@st.composite
def documents(draw: st.DrawFn, kind: str = "digits") -> dict[str, Any]:
    """A run file with a few keys changed to anything."""
    return change(draw, kind, copy.deepcopy(KINDS[kind]), values)


METADATA_KEYS = st.sampled_from(
    ["team", "example.com/team", "queue", "ray.io/x", "sidecar.istio.io/inject", "kubernetes.io/x"]
)
PLAUSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "resources": st.sampled_from(
        [
            {"gpus": 8},
            {"gpus": {"min": 8, "max": 16}},
            {"gpus": 3},
            {"workers": 4},
            {"workers": {"min": 1, "max": 2}},
            {"gpus": 8, "pool": ["spot", "on-demand"]},
            {"gpus": 16, "pool": ["on-demand"]},
        ]
    ),
    "queue": st.sampled_from([None, {"name": "mine"}, {"priority": "high"}]),
    "network": st.sampled_from(
        [
            None,
            {"preset": "tcp", "interface": "eth0"},
            {"preset": "efa", "devices_per_node": 4},
            {"preset": "infiniband", "resource": "rdma/hca", "debug": True},
        ]
    ),
    "env": st.dictionaries(
        st.sampled_from(["A", "OMP_NUM_THREADS"]), st.text(max_size=5), max_size=2
    ),
    "volumes": st.lists(st.sampled_from(["imagenet", "texts", "missing"]), max_size=2),
    "limits": st.builds(dict, max_run_s=st.integers(0, 9), max_start_s=st.integers(1, 9)),
    "secrets": st.sampled_from([{}, {"TOKEN": {"name": "hub", "key": "token"}}]),
    "notify": st.sampled_from([None, {"outcomes": []}, {"url": "https://hooks.example.com/runs"}]),
    "labels": st.dictionaries(METADATA_KEYS, st.sampled_from(["", "a", "a.b"]), max_size=2),
    "annotations": st.dictionaries(METADATA_KEYS, st.text(max_size=5), max_size=2),
    "image": st.sampled_from([None, "registry:5000/a/b:1", f"b@sha256:{64 * 'a'}"]),
    "faults": st.builds(dict, retries=st.integers(0, 9), worker_failures=st.integers(0, 9)),
}


@st.composite
def plausible(draw: st.DrawFn, kind: str = "digits") -> Made:
    """A run file of which each part makes sense alone, and a platform."""
    document = copy.deepcopy(KINDS[kind]) | copy.deepcopy(
        draw(st.fixed_dictionaries({}, optional=PLAUSIBLE))
    )
    if ("train", "global_batch_size") in PATHS[kind]:
        document["train"]["global_batch_size"] = draw(st.sampled_from([48, 64, 192]))
    if ("data", "loader") in PATHS[kind] and (data_nodes := draw(st.integers(0, 3))):
        document["data"]["loader"] = "ray"
        document["resources"]["data"] = {"nodes": data_nodes}
    system: Any = draw(st.sampled_from(["none", "kueue", "volcano", "yunikorn", "kai"]))
    queue = PlatformQueue(system=system, name="" if system == "none" else "team")
    kuberay = draw(st.sampled_from(["1.6", "1.7"]))
    platform = draw(st.sampled_from([PLATFORM, SEVERAL_POOLS]))
    changes = {
        "queue": queue,
        "kuberay": kuberay,
        "runs": draw(st.sampled_from([PLATFORM.runs, OPEN_TO_RUNS])),
    }
    return document, platform.model_copy(update=changes)
