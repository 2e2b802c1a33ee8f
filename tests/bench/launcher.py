"""How fast the launcher answers, beside a bare Python."""

from __future__ import annotations

import subprocess
import sys
import time
from functools import partial

from tests.bench.rounds import ROOT, Options, Row, Section, alternate, main, ratios

TRAINYARD = str(ROOT / ".venv/bin/trainyard")
REFERENCE = "python -c pass"
COMMANDS = {
    REFERENCE: [sys.executable, "-c", "pass"],
    "trainyard --help": [TRAINYARD, "--help"],
    "trainyard plan --gpus 16": [TRAINYARD, "plan", "examples/digits.yaml", "--gpus", "16"],
    "trainyard render --gpus 16": [TRAINYARD, "render", "examples/digits.yaml", "--gpus", "16"],
}
LIMITS_S = {"trainyard --help": 0.3, "trainyard render --gpus 16": 0.6}


def seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return time.perf_counter() - started


def measure(options: Options) -> list[Section]:
    for command in COMMANDS.values():
        seconds(command)  # warm: byte code and file cache
    ways = {name: partial(seconds, command) for name, command in COMMANDS.items()}
    times = alternate(ways, options.rounds_or(21))
    rows = []
    for name, values in times.items():
        rows.append(Row(what=f"`{name}`", unit="s", values=values, at_most=LIMITS_S.get(name)))
        if name != REFERENCE:
            rows.append(
                Row(what=f"`{name}` over Python", unit="x", values=ratios(values, times[REFERENCE]))
            )
    return [Section(title="The launcher", rows=tuple(rows))]


if __name__ == "__main__":
    main(measure)
