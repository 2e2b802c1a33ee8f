"""How soon a run on a cluster trains its first step: with a RayCluster of its own, and on the standing one.

    python -m tests.bench.cluster_start --image IMAGE

The test cluster must be up, with the image in its registry. Each run has a recipe of its own, whose code
changes from round to round.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from tests.bench.rounds import ROOT, Options, Row, Section, main, say
from tests.bench.scale import TRAINYARD, in_cluster
from tests.support.settings import set_all

VALUES = ROOT / "tests/cluster/values.yaml"
NAMESPACE = "trainyard-bench"
WORKERS = 2

MOST_OWN_S = 14.0
MOST_STANDING_S = 5.0

READY_S = 300
"""Seconds within which the standing cluster must be ready."""

BEFORE = "from the command to the driver's attempt"
"""The phase before those that the run's summary has."""

PHASES = ("lease", "prepare", "ray", "workers", "model", "first_batch", "first_step")
"""The phases of a start in the run's summary, in their order."""

STARTUP = """
import json, sys, trainyard
run = trainyard.Run(sys.argv[1], namespace=sys.argv[2])
print(json.dumps(run.result().summary["startup"]))
"""
"""Prints the phases of the start of a run that has ended."""

WAYS = {
    "own": ("A run with its own RayCluster", MOST_OWN_S),
    "standing": ("A run on the standing cluster", MOST_STANDING_S),
}


@contextmanager
def platform(image: str, folder: Path, *, stands: bool, forks: bool) -> Iterator[None]:
    """Install the platform in a namespace, which is deleted after the block.

    With `stands` it has a standing cluster, whose pods fork processes with `forks`.
    """
    values = yaml.safe_load(VALUES.read_text())
    standing = {"enabled": stands, "pool": "cpu", "replicas": WORKERS}
    set_all(values, {"rayCluster": standing, "forkedWorkers": forks})
    (file := folder / "values.yaml").write_text(yaml.safe_dump(values))
    in_cluster("kubectl", "create", "namespace", NAMESPACE)
    try:
        variables = (f"NAMESPACE={NAMESPACE}", f"VALUES={file}", f"IMAGE={image}")
        in_cluster("make", "platform", *variables)
        if stands:
            ready = ("wait", "raycluster/trainyard", "--for=jsonpath={.status.state}=ready")
            in_cluster("kubectl", *ready, "-n", NAMESPACE, f"--timeout={READY_S}s")
        yield
    finally:
        # The operator needs the namespace for the finalizers of its objects.
        in_cluster("kubectl", "delete", "rayjobs,rayclusters", "--all", "-n", NAMESPACE)
        in_cluster("kubectl", "delete", "namespace", NAMESPACE)


def start(run_file: Path, way: str, number: int) -> dict[str, float]:
    """Submit a run with changed code; return the seconds of each phase up to the end of the first step."""
    code = run_file.parent / "code/demo.py"
    code.write_text(f"{code.read_text()}\n# {number}\n")
    name = f"{way}-{number}"
    options = ("--warm",) if way == "standing" else ()
    began = time.time()
    in_cluster(
        *(TRAINYARD, "submit", str(run_file), "--name", name, "--workers", f"{WORKERS}"),
        *("--set", "train.epochs=1", "--wait", "-n", NAMESPACE, *options),
    )
    phases = json.loads(in_cluster(sys.executable, "-c", STARTUP, name, NAMESPACE))
    found = {BEFORE: phases["began"] - began} | {phase: phases[phase] for phase in PHASES}
    told = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in found.items())
    say(f"  {name}: {sum(found.values()):.1f} s, load {os.getloadavg()[0]:.1f}: {told}")
    return found


def measure(options: Options) -> list[Section]:
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as scratch:
        run_file = Path(scratch) / "run.yaml"
        subprocess.run([TRAINYARD, "init", str(run_file), "--recipe", "demo"], check=True)
        # One after the other: the pods of a standing cluster would take CPU time of runs beside it.
        for way, starts in found.items():
            stands, forks = way == "standing", not options.more.unforked
            with platform(options.more.image, Path(scratch), stands=stands, forks=forks):
                for number in range(options.rounds_or(5)):
                    starts.append(start(run_file, way, number))
    return [section(way, starts) for way, starts in found.items()]


def section(way: str, starts: list[dict[str, float]]) -> Section:
    title, at_most = WAYS[way]
    phases = tuple(
        Row(what=f"- {phase}", unit="s", values=tuple(each[phase] for each in starts))
        for phase in (BEFORE, *PHASES)
    )
    total = tuple(sum(each.values()) for each in starts)
    first = Row(what="from the command to the first step", unit="s", values=total, at_most=at_most)
    return Section(title=title, rows=(first, *phases))


if __name__ == "__main__":
    main(
        measure,
        image={"required": True, "help": "the image in the test cluster's registry"},
        unforked={
            "action": "store_true",
            "help": "with forkedWorkers: false in the chart's values",
        },
    )
