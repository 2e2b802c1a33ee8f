"""How fast the launcher answers, beside a bare Python, in alternating rounds of one run.

`make bench`. Prints a table in Markdown for docs/measured.md: median, fastest and slowest, and the
ratio of medians to the reference. Absolute times depend on the machine, the ratio less so.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 21
TRAINYARD = str(ROOT / ".venv/bin/trainyard")
REFERENCE = "python -c pass"
COMMANDS = {
    REFERENCE: [sys.executable, "-c", "pass"],
    "trainyard --help": [TRAINYARD, "--help"],
    "trainyard plan --gpus 16": [TRAINYARD, "plan", "examples/digits.yaml", "--gpus", "16"],
    "trainyard render --gpus 16": [TRAINYARD, "render", "examples/digits.yaml", "--gpus", "16"],
}


def seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return time.perf_counter() - started


def main() -> None:
    for command in COMMANDS.values():
        seconds(command)  # warm: byte code and file cache
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(ROUNDS):
        for name, command in COMMANDS.items():
            times[name].append(seconds(command))
    reference = statistics.median(times[REFERENCE])
    load = os.getloadavg()[0]
    print(f"Python {platform.python_version()}, {os.cpu_count()} CPUs, load {load:.1f}, ", end="")
    print(f"{ROUNDS} rounds\n")
    print("| command | median s | fastest - slowest s | ratio |")
    print("|---|---|---|---|")
    for name, values in times.items():
        median = statistics.median(values)
        spread = f"{min(values):.3f} - {max(values):.3f}"
        print(f"| `{name}` | {median:.3f} | {spread} | {median / reference:.1f} |")


if __name__ == "__main__":
    main()
