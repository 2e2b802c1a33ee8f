"""Run files that nobody would think of, and platforms for them, as strategies of hypothesis."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from launcher.config import RecipeRun
from launcher.platform import Platform, PlatformQueue, load_platform

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/digits.yaml"
DIGITS: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
PLATFORM = load_platform(None)

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


EVERY_KEY = RecipeRun.model_validate(DIGITS).model_dump()
PATHS = paths_of(EVERY_KEY) + [("resources", "data", "nodes"), ("network", "preset"), ("x", "y")]

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
    draw: st.DrawFn, document: dict[str, Any], values: st.SearchStrategy[Any]
) -> dict[str, Any]:
    """The document with a few of its keys changed to such values."""
    for path in draw(st.lists(st.sampled_from(PATHS), min_size=1, max_size=3)):
        place = document
        for key in path[:-1]:
            if not isinstance(place.get(key), dict):
                place[key] = {}
            place = place[key]
        place[path[-1]] = draw(values)
    return document


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """A run file with a few keys changed to anything."""
    return change(draw, copy.deepcopy(DIGITS), values)


PLAUSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "resources": st.sampled_from(
        [
            {"gpus": 8},
            {"gpus": {"min": 8, "max": 16}},
            {"gpus": 3},
            {"workers": 4},
            {"workers": {"min": 1, "max": 2}},
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
    "image": st.sampled_from([None, "registry:5000/a/b:1", f"b@sha256:{64 * 'a'}"]),
    "faults": st.builds(dict, retries=st.integers(0, 9), worker_failures=st.integers(0, 9)),
}


@st.composite
def plausible(draw: st.DrawFn) -> Made:
    """A run file of which each part makes sense alone, and a platform."""
    document = copy.deepcopy(DIGITS) | copy.deepcopy(
        draw(st.fixed_dictionaries({}, optional=PLAUSIBLE))
    )
    document["train"]["global_batch_size"] = draw(st.sampled_from([48, 64, 192]))
    if data_nodes := draw(st.integers(0, 3)):
        document["data"]["loader"] = "ray"
        document["resources"]["data"] = {"nodes": data_nodes}
    system: Any = draw(st.sampled_from(["none", "kueue", "volcano", "yunikorn", "kai"]))
    queue = PlatformQueue(system=system, name="" if system == "none" else "team")
    kuberay = draw(st.sampled_from(["1.6", "1.7"]))
    return document, PLATFORM.model_copy(update={"queue": queue, "kuberay": kuberay})
