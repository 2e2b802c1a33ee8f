"""How soon `list` and `status` answer on a cluster with 10 runs, and with 1,000 runs and 10,000 pods.

The API server is the real one of tests/cluster, the nodes are kwok's; both must be up already.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.bench.many_runs import NAMESPACE, PODS_PER_RUN, WAITING_IN
from tests.bench.rounds import ROOT, Options, Row, Section, alternate, compile_sources, main, say

TRAINYARD = str(ROOT / ".venv/bin/trainyard")
IN_CLUSTER = str(ROOT / "tests/cluster/run")
FEW = 10
LIMIT_S = 2.0
FEW_LIMITS_S = {"list": 0.3}
NODES = 100
START_LIMIT_S = 600.0
COMMANDS = {
    "list": ["list", "-n", NAMESPACE],
    "list -A -o json": ["list", "-A", "-o", "json"],
    "status": ["status", "-n", NAMESPACE],
    "status -o wide": ["status", "-n", NAMESPACE, "-o", "wide"],
    "status run-0000": ["status", "run-0000", "-n", NAMESPACE],
}


def in_cluster(*command: str) -> str:
    ended = subprocess.run(
        [IN_CLUSTER, *command], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    return ended.stdout


def seconds(command: list[str]) -> float:
    started = time.perf_counter()
    in_cluster(TRAINYARD, *command)
    return time.perf_counter() - started


@contextmanager
def many_runs(runs: int) -> Iterator[None]:
    """So many runs, all of whose pods run that ever will."""
    many = (sys.executable, "-m", "tests.bench.many_runs")
    kwok = (sys.executable, str(ROOT / "tests/cluster/cluster.py"), "kwok")
    subprocess.run([*kwok, str(NODES)], check=True)
    try:
        in_cluster(*many, "fill", f"--runs={runs}", f"--nodes={NODES}")
        wanted = (runs - -(-runs // WAITING_IN)) * PODS_PER_RUN
        deadline = time.monotonic() + START_LIMIT_S
        while (count := int(in_cluster(*many, "running"))) < wanted:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{count} of {wanted} pods run after {START_LIMIT_S:g} s")
            say(f"{count} of {wanted} pods run")
            time.sleep(5)
        yield
    finally:
        in_cluster(*many, "remove")
        subprocess.run([*kwok, "0"], check=True)


def measure(options: Options) -> list[Section]:
    home = os.environ.get("TRAINYARD_CLUSTER_HOME") or Path.home() / ".cache/trainyard/cluster"
    if not (Path(home) / "kubeconfig").exists():
        return [Section(title="Many runs", rows=(), notes=("There is no test cluster here.",))]
    compile_sources()
    return [
        section_of(FEW, options, FEW_LIMITS_S),
        section_of(options.choose(1000, 20), options, dict.fromkeys(COMMANDS, LIMIT_S)),
    ]


def section_of(runs: int, options: Options, limits_s: Mapping[str, float]) -> Section:
    """Measure all commands on a cluster with so many runs."""
    with many_runs(runs):
        for command in COMMANDS.values():
            seconds(command)  # warm: file cache
        ways = {name: partial(seconds, command) for name, command in COMMANDS.items()}
        times = alternate(ways, options.rounds_or(11))
    rows = tuple(
        Row(what=f"`trainyard {name}`", unit="s", values=values, at_most=limits_s.get(name))
        for name, values in times.items()
    )
    return Section(title=f"{runs:,} runs, {runs * PODS_PER_RUN:,} pods", rows=rows)


if __name__ == "__main__":
    main(measure)
