"""Measure and test on this machine's CUDA GPU, and write docs/results/gpu.json and gpu.md.

    python3 -m tests.gpu [--rounds N] [--device cpu] [--page]

`make gpu` runs it. It needs the packages of the dependency groups `gpu-machine` and `gpu-wheels` in
pyproject.toml. What is missing of the second group is installed into build/gpu-site from the wheels in
build/gpu-wheels, without network and without root. `--device cpu` runs the same steps with tiny numbers where
there is no GPU, and writes into build/gpu in place of docs/results.

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
PACKAGES = (ROOT, ROOT / "train_image", SITE)
"""Where child processes find the checkout and the installed wheels."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m tests.gpu", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, help="rounds of each comparison, in place of 3")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--page", action="store_true", help="write docs/results/gpu.md anew, and measure nothing"
    )
    wanted = parser.parse_args()
    if not wanted.page and (problem := make_ready(wanted.device)):
        print(f"error: {problem}", file=sys.stderr)
        return 2
    # Only now: it imports what the wheels have brought.
    from tests.gpu import page

    if wanted.page:
        page.write(DOCS)
        return 0
    is_cuda = wanted.device == "cuda"
    BUILD.mkdir(parents=True, exist_ok=True)
    ends = [run_bench(wanted.device, wanted.rounds), run_tests(is_cuda)]
    found = results(wanted.device)
    folder = DOCS if is_cuda else BUILD
    (BUILD / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
    failed = [test["name"] for test in found["tests"] if test["outcome"] == "failed"]
    if ends[0]:
        print(f"error: the bench failed; {DOCS.name}/gpu.json stays as it is", file=sys.stderr)
        return 1
    page.save(found, folder)
    print(f"wrote {folder / 'gpu.json'} and {folder / 'gpu.md'}", file=sys.stderr)
    if ends[1]:
        print(f"error: tests failed: {', '.join(failed) or 'pytest itself'}", file=sys.stderr)
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


def run_bench(device: str, rounds: int | None) -> int:
    """Return the bench's exit code; its figures lie in build/gpu/bench.json."""
    (BUILD / "bench.json").unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.bench.gpu", f"--json={BUILD / 'bench.json'}"]
    command += [f"--device={device}", *(["--quick"] if device == "cpu" else [])]
    command += [f"--rounds={rounds}"] if rounds else []
    return subprocess.run(command, cwd=ROOT, env=environment(), check=False).returncode


def run_tests(is_cuda: bool) -> int:
    """Return pytest's exit code; its outcomes lie in build/gpu/tests.xml."""
    (BUILD / "tests.xml").unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "tests/gpu/test_cuda.py", "-q"]
    command += ["-m", "gpu" if is_cuda else "not gpu and not slow"]
    command += [f"--junitxml={BUILD / 'tests.xml'}", "-p", "no:cacheprovider"]
    # The options of the whole suite need packages that a bare machine has not.
    command += ["--confcutdir=tests/gpu"]
    return subprocess.run(command, cwd=ROOT, env=environment(), check=False).returncode


def results(device: str) -> dict[str, Any]:
    """Return what gpu.json holds."""
    figures = BUILD / "bench.json"
    bench = json.loads(figures.read_text()) if figures.exists() else {"machine": {}, "sections": []}
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": describe(device),
        "machine": bench["machine"],
        "sections": bench["sections"],
        "tests": outcomes(BUILD / "tests.xml"),
    }


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
