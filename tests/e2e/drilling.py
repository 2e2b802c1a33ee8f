"""Helpers for drills: the run file, the checks of the results, and the file with all results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, Object, Team, get, kubectl, wait_for

from trainyard.cli.commands.cluster_runs.drill_jobs import job_of
from trainyard.cluster.cluster import Cluster
from trainyard.drills.drill import run_drill
from trainyard.drills.report import LATE, DrillReport
from trainyard.drills.scenarios import Scenario
from trainyard.drills.undisturbed import UNDISTURBED, train_undisturbed
from trainyard.platform import CONFIG_MAP, platform_of_config_map

RESULTS = ROOT / "build/drills.json"
DIGITS = ROOT / "examples/digits.yaml"
SETTINGS = ("train.model.image_size=16", "train.epochs=20")
GONE_LIMIT_S = 60.0
LONG = ("train.epochs=60",)
"""Settings for long faults, before whose end the run must not end. It has its own undisturbed run."""
EARLY = 50
"""The step of faults during which training must continue. An epoch has 22 steps."""


def keep(result: Object, scenario: Scenario) -> None:
    """Add the result of a drill to the file of results."""
    words = {"fault": scenario.fault, "answer": scenario.answer, "actor": scenario.actor}
    store(scenario.name, words | {"within_s": scenario.within_s} | result)


def store(name: str, result: Object) -> None:
    """Write a result into the file of results."""
    RESULTS.parent.mkdir(exist_ok=True)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(results | {name: result}, indent=2))


def check(result: Object) -> None:
    """Check the result of a drill, except for the time to recover, which depends on the machine's load."""
    told = json.dumps(result, indent=2)
    assert result["is_recovered"], told
    assert result["has_equal_weights"] or result["is_elastic"], told
    assert not [each for each in result["missed"] if not each.startswith(LATE)], told


@contextmanager
def leaving_nothing(namespace: str) -> Iterator[None]:
    """Check that the block leaves no objects in the namespace, of whatever kind."""
    before = objects_in(namespace)
    yield
    wait_for("it has left nothing", lambda: objects_in(namespace) <= before, GONE_LIMIT_S)


def objects_in(namespace: str) -> set[str]:
    """Return all objects in a namespace except events and Helm's records of releases."""
    listed = kubectl("api-resources", "--namespaced", "--verbs=list", "-o", "name").split()
    kinds = ",".join(kind for kind in listed if kind.partition(".")[0] != "events")
    found = kubectl("get", kinds, "-n", namespace, "-o", "name").split()
    return {name for name in found if not name.startswith("secret/sh.helm.release.")}


def volume_of(namespace: str) -> Path:
    """Return the folder on this machine that is the volume of a namespace's storage."""

    def bound() -> str:
        claim = get("pvc", namespace, "trainyard-storage")
        return str(claim["spec"].get("volumeName", ""))

    spec = get("pv", "default", wait_for("the claim is bound", bound))["spec"]
    if "hostPath" not in spec:
        pytest.skip("only the volumes of tests/cluster are folders of this machine")
    return Path(spec["hostPath"]["path"])


def process_of(cgroup: str, pid: int) -> int:
    """Return the process ID on this machine of a process in a container, found by a part of its cgroup."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            status, cgroups = ((process / file).read_text() for file in ("status", "cgroup"))
            ids = re.search(r"NSpid:.*\s(\d+)\n", status)
            if cgroup in cgroups and ids and int(ids[1]) == pid:
                found.append(int(process.name))
    (one,) = found
    return one


def of_length(folder: Path, epochs: str) -> tuple[Path, tuple[str, ...]]:
    """Return a run file and settings with another number of epochs and its own name."""
    run_file = folder / "run.yaml"
    name = f"digits-{epochs.rpartition('=')[2]}"
    run_file.write_text(yaml.safe_dump(yaml.safe_load(DIGITS.read_text()) | {"name": name}))
    return run_file, (*SETTINGS, epochs)


def drill(team: Team, scenario: Scenario, folder: Path, at_step: int | None = None) -> Object:
    """Run a drill, check its result, and add it to the results for the table."""
    with leaving_nothing(team.namespace):
        result = strike(team, scenario, folder, at_step).to_json()
        keep(result, scenario)
        check(result)
    return result


def strike(team: Team, scenario: Scenario, folder: Path, at_step: int | None = None) -> DrillReport:
    """Run a drill as the command does, but with a custom fault."""
    if at_step is None and scenario.restarts == "never":
        at_step = EARLY
    epochs = next((each for each in scenario.settings if each.startswith("train.epochs=")), None)
    run_file = DIGITS if epochs is None else of_length(folder, epochs)[0]
    cluster = Cluster(team.namespace)
    platform = platform_of_config_map(cluster.get("ConfigMap", CONFIG_MAP), team.namespace)

    def job(word: str) -> Any:
        own = [*SETTINGS, *scenario.settings]
        return job_of(run_file, own, None, None, word, platform, team.namespace)

    weights = train_undisturbed(cluster, platform, job(UNDISTURBED), print)
    return run_drill(
        cluster,
        platform,
        job(scenario.name),
        scenario,
        weights=weights,
        at_step=at_step,
        say=print,
    )
