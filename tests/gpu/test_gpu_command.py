"""`make gpu` itself: what it needs, the parts of the wheels, its page, and that it runs without Ray."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.bench.rounds import ROOT, Row, Section
from tests.gpu import __main__ as command
from tests.gpu import page
from tests.gpu.needs import MACHINE, WHEELS, name_of, problems_with, release, requirements_in
from tests.gpu.wheels import PART_BYTES, divide, entry_of

# Requirements.


def test_both_groups_of_packages_are_here() -> None:
    assert problems_with([*requirements_in(MACHINE), *requirements_in(WHEELS)]) == []


def test_a_package_that_is_missing_or_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", {"torch": "2.9.1+cu130", "numpy": "2.5.2"}.get)
    wanted = ["numpy>=2", "torch>=2.11"]
    assert problems_with(wanted) == ["torch>=2.11 (found 2.9.1+cu130)"]
    monkeypatch.undo()
    assert problems_with(["no-such-package"]) == ["no-such-package (not installed)"]


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("2.11.0+cu130", (2, 11, 0)), ("2.13.0a0+git1234", (2, 13, 0)), ("25.0.1", (25, 0, 1))],
)
def test_a_release_is_the_numbers_that_a_version_begins_with(
    version: str, numbers: tuple[int, ...]
) -> None:
    assert release(version) == numbers


def test_without_a_gpu_it_refuses_and_names_the_way_to_try_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    problem = command.make_ready("cuda")
    assert problem
    assert "finds no CUDA GPU" in problem
    assert "python3 -m tests.gpu --device cpu" in problem
    assert command.make_ready("cpu") is None


# A machine that has the packages of both groups and nothing else.


def needed_by(names: list[str]) -> set[str]:
    """Return the names of these distributions and of all that they need, as far as they are installed."""
    found: set[str] = set()
    waiting = [*names]
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        if name not in found:
            found.add(name)
            waiting += [name_of(each) for each in requirements if "extra ==" not in each]
    return found


@pytest.fixture(scope="module")
def bare_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a Python that finds only the packages of both groups, and what they need."""
    home = tmp_path_factory.mktemp("bare")
    packages = home / "packages"
    packages.mkdir()
    groups = [*requirements_in(MACHINE), *requirements_in(WHEELS)]
    for name in needed_by([name_of(each) for each in groups]):
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            link = packages / top
            if top == "nvidia":  # many distributions share this folder
                link.mkdir(exist_ok=True)
                for inner in Path(distribution.locate_file(top)).iterdir():  # type: ignore[arg-type]
                    if not (link / inner.name).exists():
                        (link / inner.name).symlink_to(inner)
            elif not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(top))))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home / "venv"], check=True)
    return {
        "PATH": f"{home / 'venv/bin'}:/usr/bin:/bin",
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "train_image"), str(packages)]),
    }


def python3(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    program = Path(environment["PATH"].partition(":")[0]) / "python3"
    return subprocess.run(
        [program, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


IMPORTS = """
import importlib.util, sys
import tests.bench.gpu, tests.gpu.train
import trainyard_trainer.attempt.without_ray, trainyard_trainer.report.report
import matplotlib, tensorboardX
missing = [name for name in ("ray", "typer", "kubernetes", "sklearn") if importlib.util.find_spec(name)]
sys.exit(f"found {missing}" if missing else 0)
"""


@pytest.mark.ci
def test_the_bench_and_a_run_without_ray_import_no_other_packages(
    bare_environment: dict[str, str],
) -> None:
    done = python3(bare_environment, "-c", IMPORTS)
    assert done.returncode == 0, done.stderr


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_the_whole_command_runs_with_these_packages_alone(
    bare_environment: dict[str, str],
) -> None:
    done = python3(bare_environment, "-m", "tests.gpu", "--device=cpu")
    assert done.returncode == 0, done.stderr
    results = page.load(command.BUILD)
    assert results
    assert results["device"]["peak_bf16_flops"] is None
    assert {each["outcome"] for each in results["parts"]["tests"]} == {"passed"}
    assert (command.BUILD / page.PAGE).read_text() == page.page(results)


# Wheels.


def test_wheels_are_divided_into_parts_that_are_small_enough() -> None:
    assert PART_BYTES <= 60 * 2**20
    assert divide({"a": 3, "b": 9, "c": 4, "d": 6, "e": 1}, 10) == [["b", "e"], ["d", "c"], ["a"]]
    with pytest.raises(ValueError, match="b has 11 bytes, and a part at most 10"):
        divide({"a": 3, "b": 11}, 10)


def test_one_requirement_is_taken_with_its_hashes() -> None:
    text = "torch==2.11.0 \\\n    --hash=sha256:1\ntorchvision==0.26.0 \\\n    --hash=sha256:2\n"
    assert entry_of(text, "torchvision").split() == ["torchvision==0.26.0", "\\", "--hash=sha256:2"]


# The page.

SECTION = Section(
    title="Images",
    rows=(Row(what="resnet50", unit="x", values=(0.99, 1.01, 1.0), at_least=0.98),),
    notes=("MFU is not known.",),
)
RESULTS: dict[str, Any] = {
    "date": "2026-11-25",
    "device": {
        "name": "NVIDIA H100 80GB HBM3",
        "memory_gib": 79.1,
        "peak_bf16_flops": 989e12,
        "torch": "2.11.0+cu130",
        "torchvision": "0.26.0+cu130",
        "cuda": "13.0",
    },
    "parts": {
        "tests": [
            {"name": "test_a[cuda]", "outcome": "passed", "seconds": 1.5},
            {"name": "test_b[cuda]", "outcome": "failed", "seconds": 0.1},
        ],
        "images": SECTION.to_json()
        | {"machine": {"python": "3.12.3", "machine": "x86_64", "cpus": 16, "load": 0.1}},
    },
}


def test_the_page_has_the_figures_and_the_outcomes_of_the_tests(tmp_path: Path) -> None:
    page.save(RESULTS, tmp_path)
    text = (tmp_path / page.PAGE).read_text()
    assert text == page.page(json.loads((tmp_path / page.RESULTS).read_text()))
    assert "on one NVIDIA H100 80GB HBM3 with 79.1 GiB, with torch 2.11.0+cu130" in text
    assert "| resnet50 | 1 x | 0.99 - 1.01 | >= 0.98 | met |" in text
    assert "MFU is not known." in text
    assert "| test_a[cuda] | passed | 1.5 s |" in text
    assert "| test_b[cuda] | **failed** | 0.1 s |" in text
    assert page.NO_FIGURES not in text


@pytest.mark.parametrize(
    ("change", "named"),
    [({"date": "2026-11-24"}, "the date 2026-11-25"), ({"device": {"name": "CPU"}}, "'CPU'")],
)
def test_results_of_another_day_or_device_do_not_stand_beside_new_ones(
    change: dict[str, Any], named: str
) -> None:
    assert command.difference(RESULTS, RESULTS) is None
    found = command.difference(RESULTS, RESULTS | change)
    assert found
    assert named in found


def test_the_page_says_so_where_there_are_no_figures_yet(tmp_path: Path) -> None:
    page.write(tmp_path)
    assert page.NO_FIGURES in (tmp_path / page.PAGE).read_text()


def test_the_outcomes_are_those_of_pytests_report(tmp_path: Path) -> None:
    report = tmp_path / "tests.xml"
    report.write_text(
        '<testsuites><testsuite><testcase name="a" time="0.04"/>'
        '<testcase name="b" time="1"><failure/></testcase>'
        '<testcase name="c" time="2"><error/></testcase>'
        '<testcase name="d" time="0"><skipped/></testcase></testsuite></testsuites>'
    )
    found = {each["name"]: each["outcome"] for each in command.outcomes(report)}
    assert found == {"a": "passed", "b": "failed", "c": "failed", "d": "skipped"}
    assert command.outcomes(tmp_path / "none.xml") == []
