"""The page docs/results/gpu.md, made from docs/results/gpu.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.bench.rounds import Section

RESULTS = "gpu.json"
PAGE = "gpu.md"
TESTS = "tests"
"""The part of the results that the CUDA tests are; the others are sections of the bench."""

NO_FIGURES = "No figures yet: run `make gpu` on a machine with a CUDA GPU."


def save(results: Mapping[str, Any], folder: Path) -> None:
    """Write the results and their page into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULTS).write_text(json.dumps(results, indent=1) + "\n")
    write(folder)


def write(folder: Path) -> None:
    """Write the page of the results that lie in a folder."""
    (folder / PAGE).write_text(page(load(folder)))


def load(folder: Path) -> dict[str, Any] | None:
    """Return the results in a folder; None if there are none yet."""
    file = folder / RESULTS
    return json.loads(file.read_text()) if file.exists() else None


def page(results: Mapping[str, Any] | None) -> str:
    """Return the page in Markdown."""
    parts = [INTRODUCTION, figures(results) if results else f"{NO_FIGURES}\n", HOW_TO]
    return "\n".join(parts)


def figures(results: Mapping[str, Any]) -> str:
    device, parts = results["device"], dict(results["parts"])
    tests = parts.pop(TESTS, [])
    memory = f" with {device['memory_gib']} GiB" if device["memory_gib"] else ""
    machines = {
        f"Python {each['machine']['python']} and {each['machine']['cpus']} CPUs"
        for each in parts.values()
    }
    lines = [
        f"Measured on {results['date']} on one {device['name']}{memory}, with torch {device['torch']}, "
        f"torchvision {device['torchvision']}, CUDA {device['cuda']}, {' or '.join(sorted(machines))}. "
        f"All figures are in [{RESULTS}]({RESULTS}).",
        "",
        *(Section.of_json(each).markdown() for each in parts.values()),
    ]
    if tests:
        lines += [
            "### CUDA tests",
            "",
            "| test | outcome | time |",
            "|---|---|---|",
            *(
                f"| {test['name']} | {shown_outcome(test['outcome'])} | {test['seconds']} s |"
                for test in tests
            ),
            "",
        ]
    return "\n".join(lines)


def shown_outcome(outcome: str) -> str:
    return outcome if outcome == "passed" else f"**{outcome}**"


INTRODUCTION = """\
# GPU results

`make gpu` measures trainyard on a CUDA GPU beside a plain PyTorch loop with the same model and settings, runs
the CUDA tests, and writes this page. Both loops take turns in one process; each figure is the median of
several rounds, and its spread stands beside it.

## Results
"""

HOW_TO = """\
## Measure on a GPU machine

The machine needs Linux, an NVIDIA driver, and a `python3` of version 3.11 or newer with torch 2.11 or newer,
the torchvision that was made for this torch (0.26 for torch 2.11), and numpy. It needs no Ray, no network and
no root.

1. On a machine with network, download the other packages for the Python of the GPU machine:

    ```console
    make gpu-wheels GPU_PYTHON_VERSION=3.12
    ```

    The wheels lie in `build/gpu-wheels/part-1`, `part-2` and so on, with at most 56 MiB in each part.

2. Copy the checkout and `build/gpu-wheels` to the GPU machine.

3. On the GPU machine, run in the checkout:

    ```console
    make gpu
    ```

    It installs the wheels into `build/gpu-site`, measures and tests for about ten minutes, and writes
    its figures into this page, and as JSON beside it.

If the GPU machine lacks torchvision, name its version of torch, and the fitting torchvision comes with the
wheels: `make gpu-wheels GPU_PYTHON_VERSION=3.12 GPU_TORCH=2.11.0`.

Where `make setup` has been run on a machine with a GPU, `make gpu` uses the packages of `.venv`, and needs no
wheels. `python3 -m tests.gpu --device cpu` runs the same steps with tiny numbers on a machine without a GPU;
its figures mean nothing.
"""
