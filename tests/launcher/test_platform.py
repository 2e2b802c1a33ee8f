"""A platform is read as strictly as a run file, from a file and from the chart's ConfigMap."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainyard.errors import ClusterError, ConfigError
from trainyard.platform import load_platform, parse_platform, platform_of_config_map

PACKAGED = Path(__file__).resolve().parents[2] / "launcher/trainyard/platform.yaml"

Object = dict[str, Any]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda p: p.pop("formatVersion"), "has platform format version None"),
        (lambda p: p.update(formatVersion=2), "this launcher reads 1"),
        (lambda p: p.pop("storage"), "storage: is required"),
        (lambda p: p["head"].update(cpu=1), "head.cpu: unknown key; did you mean cpus?"),
        (lambda p: p.update(rayClusterSpec={}), "must have headGroupSpec and workerGroupSpecs"),
        (
            lambda p: p["rayClusterSpec"]["headGroupSpec"]["template"]["spec"].pop("containers"),
            "must have headGroupSpec and workerGroupSpecs",
        ),
        (lambda p: p.update(readerPod={"spec": {}}), "must be a Pod with metadata and a container"),
        (lambda p: p["defaultPools"].update(workers="x"), "defaultPools.workers = 'x' is none"),
    ],
)
def test_a_broken_platform_is_refused(change: Callable[[Object], object], problem: str) -> None:
    document = yaml.safe_load(PACKAGED.read_text())
    change(document)
    with pytest.raises(ConfigError) as raised:
        parse_platform(yaml.safe_dump(document), "test")
    assert problem in str(raised.value)


@pytest.mark.parametrize(
    ("config_map", "problem"),
    [
        ({}, "has no key platform.yaml"),
        ({"data": {"other": ""}}, "has no key platform.yaml"),
        ({"data": {"platform.yaml": "a: ["}}, "is not valid YAML"),
        ({"data": {"platform.yaml": ""}}, "must hold a mapping, not nothing"),
    ],
)
def test_a_config_map_that_holds_no_platform_is_named(config_map: Object, problem: str) -> None:
    with pytest.raises(ConfigError, match="ConfigMap team/trainyard-platform") as raised:
        platform_of_config_map(config_map, "team")
    assert problem in str(raised.value)


def test_a_namespace_without_the_chart_is_told_how_to_get_it() -> None:
    with pytest.raises(ClusterError, match="make platform NAMESPACE=team"):
        platform_of_config_map(None, "team")


def test_the_config_map_holds_what_a_file_may_hold() -> None:
    config_map = {"data": {"platform.yaml": PACKAGED.read_text()}}
    assert platform_of_config_map(config_map, "team") == load_platform(None)
