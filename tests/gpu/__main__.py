"""Measure and test on this machine's CUDA GPU, and write docs/results/gpu.json and gpu.md.

    python3 -m tests.gpu [--only PART ...] [--rounds N] [--device cpu] [--page]

`make gpu` runs it. A part is a section of tests/bench/gpu.py, or `tests`; each runs in a process of its own,
and its results are saved when it ends. With `--only`, the results of the other parts stay as they are.

It needs the packages of the dependency groups `gpu-machine` and `gpu-wheels` in pyproject.toml. What is
missing of the second group is installed into build/gpu-site from the wheels in build/gpu-wheels,
without network and without root. `--device cpu` runs the same steps with tiny numbers where there is no
GPU, and writes into build/gpu in place of docs/results.

This module itself imports the standard library alone until the packages are there.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.gpu.needs import MACHINE, WHEELS, problems_with, requirements_in

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build/gpu"
SITE = ROOT / f"build/gpu-site/{sys.version_info.major}.{sys.version_info.minor}"
WHEEL_FOLDER = ROOT / "build/gpu-wheels"
DOCS = ROOT / "docs/results"
TEST_FILES = ("tests/gpu/test_cuda.py", "tests/gpu/test_cuda_runs.py")
TEST_PROCESSES = {"cuda": 6, "cpu": 0}
"""So many processes run tests at once: together they use a small part of a GPU's memory. The few tests that
need no GPU run in pytest's own process, since each further process would import PyTorch for them."""
PACKAGES = (ROOT, ROOT / "train_image", SITE)
"""Where child processes find the checkout and the installed wheels."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m tests.gpu", allow_abbrev=False)
    parser.add_argument("--only", nargs="+", metavar="PART", help="run these parts alone")
    parser.add_argument("--rounds", type=int, help="rounds of each comparison, in place of 3")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--page", action="store_true", help="write docs/results/gpu.md anew, and measure nothing"
    )
    wanted = parser.parse_args()
    if not wanted.page and (problem := make_ready(wanted.device)):
        print(f"error: {problem}", file=sys.stderr)
        return 2
    # Only now: they import what the wheels have brought.
    from tests.bench.gpu import SECTIONS
    from tests.gpu import page

    if wanted.page:
        page.write(DOCS)
        return 0
    known = [page.TESTS, *SECTIONS]
    if unknown := [part for part in wanted.only or () if part not in known]:
        parser.error(f"unknown part {unknown[0]}: use {', '.join(known)}")
    folder = DOCS if wanted.device == "cuda" else BUILD
    BUILD.mkdir(parents=True, exist_ok=True)
    found = {"date": today(), "device": describe(wanted.device), "parts": {}}
    if wanted.only and (before := page.load(folder)):
        if problem := difference(before, found):
            print(f"error: {problem}", file=sys.stderr)
            return 2
        found["parts"] = before["parts"]
    failed = []
    for part in wanted.only or known:
        print(f"part {part}", file=sys.stderr, flush=True)
        if part == page.TESTS:
            code, result = run_tests(wanted.device)
        else:
            code, result = run_section(part, wanted.device, wanted.rounds)
        if code:
            failed.append(part)
        if result is not None:
            parts = found["parts"] | {part: result}
            found["parts"] = {name: parts[name] for name in known if name in parts}
            page.save(found, folder)
    print(f"wrote {folder / page.RESULTS} and {folder / page.PAGE}", file=sys.stderr)
    if failed:
        print(f"error: these parts failed: {', '.join(failed)}", file=sys.stderr)
        return 1
    return 0


# Requirements.


def make_ready(device: str) -> str | None:
    """Install what is missing from the wheels; return what prevents measuring, None if nothing does."""
    sys.path[:0] = map(str, PACKAGES)
    if problems := problems_with(requirements_in(MACHINE)):
        return f"this machine must have {', '.join(problems)}.\n       {sys.executable} was asked."
    if problems_with(requirements_in(WHEELS)):
        install_wheels()
    if problems := problems_with(requirements_in(WHEELS)):
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return (
            f"packages are missing: {', '.join(problems)}.\n"
            f"       Run `make gpu-wheels GPU_PYTHON_VERSION={version}` on a machine with network, and copy "
            "build/gpu-wheels here; or use the Python of `make setup`."
        )
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} finds no CUDA GPU (torch.cuda.is_available() is False).\n"
            "       Install the NVIDIA driver and a build of torch for CUDA, or try the same steps with "
            "`python3 -m tests.gpu --device cpu`."
        )
    return None


def install_wheels() -> None:
    wheels = sorted(WHEEL_FOLDER.glob("*/*.whl"))
    if not wheels:
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-cache-dir", "--upgrade", "--target", str(SITE)]
    subprocess.run([*command, *map(str, wheels)], check=True)
    importlib.invalidate_caches()


# Bench and tests.


def environment() -> dict[str, str]:
    """Return the environment in which child processes find the checkout and the installed wheels."""
    before = os.environ.get("PYTHONPATH")
    paths = [*map(str, PACKAGES), *([before] if before else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def run_section(name: str, device: str, rounds: int | None) -> tuple[int, dict[str, Any] | None]:
    """Measure a section; return the exit code, and the section with the machine's facts as JSON."""
    file = BUILD / f"{name}.json"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.bench.gpu", "--only", name, f"--json={file}"]
    command += [f"--device={device}", *(["--quick"] if device == "cpu" else [])]
    command += [f"--rounds={rounds}"] if rounds else []
    code = subprocess.run(command, cwd=ROOT, env=environment(), check=False).returncode
    if code:
        return code, None
    bench = json.loads(file.read_text())
    (section,) = bench["sections"]
    return 0, section | {"machine": bench["machine"]}


def run_tests(device: str) -> tuple[int, list[dict[str, Any]]]:
    """Run the tests, several at once; return the exit code and the outcome of each."""
    report = BUILD / "tests.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", *TEST_FILES, "-q", "--color=no"]
    command += ["-m", "gpu" if device == "cuda" else "not gpu and not slow"]
    command += [f"-n={TEST_PROCESSES[device]}", f"--junitxml={report}", "-p", "no:cacheprovider"]
    # The options of the whole suite need packages that a bare machine has not.
    command += ["--confcutdir=tests/gpu"]
    code = subprocess.run(command, cwd=ROOT, env=environment(), check=False).returncode
    return code, outcomes(report)


def today() -> str:
    return datetime.now(timezone.utc).date().isoformat()


def difference(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Return why new results must not stand beside earlier ones; None if they may."""
    for key in ("date", "device"):
        if before[key] != now[key]:
            return (
                f"the results so far have the {key} {before[key]}, and new ones would have {now[key]}. "
                "Run all parts: leave out --only."
            )
    return None


def describe(device: str) -> dict[str, Any]:
    """Return the device's name and memory, its peak FLOP/s if it is known, and the versions."""
    import torch
    import torchvision

    from trainyard_trainer.hardware import peak_flops

    found: dict[str, Any] = {"name": "CPU", "memory_gib": None, "peak_bf16_flops": None}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found = {
            "name": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "peak_bf16_flops": peak_flops(torch.device("cuda", 0)),
        }
    return found | {
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "cuda": torch.version.cuda,
    }


def outcomes(report: Path) -> list[dict[str, Any]]:
    """Return what became of each test, by pytest's report in JUnit's format."""
    if not report.exists():
        return []
    return [
        {
            "name": case.attrib["name"],
            "outcome": "failed"
            if case.find("failure") is not None or case.find("error") is not None
            else "skipped"
            if case.find("skipped") is not None
            else "passed",
            "seconds": round(float(case.attrib["time"]), 1),
        }
        for case in ElementTree.parse(report).iter("testcase")
    ]


if __name__ == "__main__":
    sys.exit(main())
