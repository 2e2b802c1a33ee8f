"""How fast the launcher answers, beside a bare Python."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from functools import partial

import yaml

from tests.bench.rounds import ROOT, Options, Row, Section, alternate, compile_sources, main, ratios

TRAINYARD = str(ROOT / ".venv/bin/trainyard")
REFERENCE = "python -c pass"
COMMANDS = {
    REFERENCE: [sys.executable, "-c", "pass"],
    "trainyard --help": [TRAINYARD, "--help"],
    "trainyard plan --gpus 16": [TRAINYARD, "plan", "examples/digits.yaml", "--gpus", "16"],
    "trainyard render --gpus 16": [TRAINYARD, "render", "examples/digits.yaml", "--gpus", "16"],
}
LARGE = ["examples/digits.yaml", "--gpus", "8192", "--set", "train.global_batch_size=8192"]
"""The largest run."""
PLAN_LARGE, RENDER_LARGE = "trainyard plan --gpus 8192", "trainyard render --gpus 8192"
COMMANDS |= {PLAN_LARGE: [TRAINYARD, "plan", *LARGE], RENDER_LARGE: [TRAINYARD, "render", *LARGE]}
LARGE_LIMIT_S = 1.0
OBJECT_LIMIT_KIB = 256.0
LIMITS_S = {
    "trainyard --help": 0.1,
    "trainyard plan --gpus 16": 0.2,
    "trainyard render --gpus 16": 0.6,
}


def seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return time.perf_counter() - started


def measure(options: Options) -> list[Section]:
    compile_sources()
    for command in COMMANDS.values():
        seconds(command)  # warm: file cache
    ways = {name: partial(seconds, command) for name, command in COMMANDS.items()}
    times = alternate(ways, options.rounds_or(21))
    rows = []
    for name, values in times.items():
        rows.append(Row(what=f"`{name}`", unit="s", values=values, at_most=LIMITS_S.get(name)))
        if name != REFERENCE:
            rows.append(
                Row(what=f"`{name}` over Python", unit="x", values=ratios(values, times[REFERENCE]))
            )
    both = tuple(map(sum, zip(times[PLAN_LARGE], times[RENDER_LARGE], strict=True)))
    rows += [
        Row(what=f"`{PLAN_LARGE}` and render", unit="s", values=both, at_most=LARGE_LIMIT_S),
        Row(
            what="the object for 8,192 GPUs",
            unit="KiB",
            values=(object_kib(COMMANDS[RENDER_LARGE]),),
            at_most=OBJECT_LIMIT_KIB,
        ),
    ]
    return [Section(title="The launcher", rows=tuple(rows))]


def object_kib(command: list[str]) -> float:
    """What a rendered object is on its way to the API server: JSON."""
    text = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    return len(json.dumps(yaml.safe_load(text))) / 1024


if __name__ == "__main__":
    main(measure)
