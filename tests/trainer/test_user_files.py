"""Files of the user with the names of modules never replace these modules in trainyard's processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from trainyard_trainer.run_files.programs import code_imports
from trainyard_trainer.run_files.programs.isolation import isolated, python_with_code

MODULES = (
    *("trainer", "trainyard_trainer", "trainyard", "torch", "ray", "numpy", "pydantic", "yaml"),
    *("xgboost", "sklearn", "pandas", "ctypes", "types", "json", "logging", "random", "signal"),
    *("sitecustomize", "usercustomize", "pickle", "queue", "copy", "email", "launcher", "utils"),
)
FOLDERS = ("data", "config", "tests", "engine", "tools")

RUN = """
name: shadow
resources: {workers: 2}
"""
BOOSTING = """
data: {source: breast_cancer, label_column: diagnosis}
train: {recipe: gradient_boosting, library: xgboost, objective: binary, rounds: 2}
"""
NETWORK = """
data: {source: digits, decode_workers: 1}
train:
  epochs: 1
  global_batch_size: 64
  model: {name: shufflenet_v2_x0_5, in_channels: 1, num_classes: 10, image_size: 8}
"""
FUNCTION = """
code: code
function: mine:train
"""
TORCHRUN = """
code: code
command: [scripts/mine.py]
run_with: torchrun
"""

MINE_ON_RAY = """
import json, random, torch, types
import ray.train, utils, data
def train(config):
    assert utils.OWNER == data.OWNER == "user"
    assert torch.ones(2).sum() == 2
    ray.train.report({"done": 1})
"""
MINE_UNDER_TORCHRUN = """
import torch.distributed
torch.distributed.init_process_group("gloo")
print("trained by", torch.distributed.get_world_size(), flush=True)
torch.distributed.destroy_process_group()
"""


def fill(folder: Path, modules: Sequence[str] = MODULES) -> None:
    """Write modules that end the process that imports them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in modules:
        text = 'OWNER = "user"\n' if name == "utils" else f"import os\nos._exit(77)  # {name}\n"
        (folder / f"{name}.py").write_text(text)
    for name in FOLDERS:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text('OWNER = "user"\n')


def trainyard(folder: Path, *arguments: str, **variables: str) -> str:
    """Run the program `trainyard` in a folder; return its output."""
    program = Path(sys.executable).with_name("trainyard")
    ended = subprocess.run(
        [program, *arguments],
        cwd=folder,
        env={**os.environ, "RAY_AUTH_MODE": "disabled", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


@pytest.mark.ci
@pytest.mark.parametrize("arguments", [("--without-ray",), ("--torchrun",), ()])
def test_a_recipe_is_trained_whatever_files_lie_in_the_current_folder(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    fill(tmp_path)
    recipe = BOOSTING if arguments == ("--without-ray",) else NETWORK
    (tmp_path / "run.yaml").write_text(RUN + recipe)
    output = trainyard(tmp_path, "train", "run.yaml", *arguments)
    assert "succeeded: validation accuracy" in output
    assert (tmp_path / "runs/shadow/summary.json").exists()


@pytest.mark.ci
def test_a_tool_is_that_of_trainyard_whatever_files_lie_in_the_current_folder(
    tmp_path: Path,
) -> None:
    fill(tmp_path)
    assert "digits" in trainyard(tmp_path, "data", "inspect", "digits")


@pytest.mark.ci
def test_a_folder_of_pythonpath_replaces_no_module(tmp_path: Path) -> None:
    # Python itself imports modules of the standard library from there, before any program starts.
    mine = ("trainer", "torch", "ray", "numpy", "pydantic", "yaml", "xgboost", "sklearn")
    fill(tmp_path / "mine", mine)
    (tmp_path / "run.yaml").write_text(RUN + BOOSTING)
    output = trainyard(tmp_path, "train", "run.yaml", PYTHONPATH=str(tmp_path / "mine"))
    assert "succeeded: validation accuracy" in output


@pytest.mark.ci
def test_a_function_is_called_by_ray_train_whatever_files_its_code_holds(tmp_path: Path) -> None:
    fill(tmp_path / "code")
    (tmp_path / "code/mine.py").write_text(MINE_ON_RAY)
    (tmp_path / "run.yaml").write_text(RUN + FUNCTION)
    output = trainyard(tmp_path, "train", "run.yaml")
    assert "torch.py in the code of this run is not imported" in output
    assert "utils.py in the code" not in output
    assert '"done": 1' in (tmp_path / "runs/shadow/metrics.jsonl").read_text()


@pytest.mark.ci
def test_torchrun_starts_its_workers_whatever_files_the_code_holds(tmp_path: Path) -> None:
    # A worker of torchrun is a process of the user: what it imports may be from its own code.
    fill(tmp_path / "code", ("trainer", "ray", "pydantic", "yaml", "xgboost", "launcher", "utils"))
    (tmp_path / "code/scripts").mkdir()
    (tmp_path / "code/scripts/mine.py").write_text(MINE_UNDER_TORCHRUN)
    (tmp_path / "run.yaml").write_text(RUN + TORCHRUN)
    assert "trained by 2" in trainyard(tmp_path, "train", "run.yaml")


@pytest.mark.parametrize("name", ["torch", "random", "types", "numpy", "trainyard_trainer", "PIL"])
def test_names_of_dependencies_and_of_the_standard_library_are_reserved(name: str) -> None:
    assert code_imports.is_reserved(name)


@pytest.mark.parametrize("name", ["trainer", "utils", "data", "tests", "mine", "transformers"])
def test_other_names_are_the_users(name: str) -> None:
    assert not code_imports.is_reserved(name)


SPAWNS = """
import multiprocessing
from mine import double
if __name__ == "__main__":
    with multiprocessing.get_context("{start}").Pool(1) as pool:
        print(pool.map(double, [21]))
"""


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_processes_of_multiprocessing_are_isolated_too(tmp_path: Path, start: str) -> None:
    fill(tmp_path)
    (tmp_path / "mine.py").write_text("def double(n):\n    return 2 * n\n")
    (tmp_path / "program.py").write_text(SPAWNS.format(start=start))
    command = [*python_with_code(), "program.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.stdout == "[42]\n", ended.stderr


def test_an_isolated_python_finds_packages_that_are_installed_on_pythonpath(
    tmp_path: Path,
) -> None:
    (tmp_path / "here-1.0.dist-info").mkdir()
    (tmp_path / "here.py").write_text('print("found")\n')
    (tmp_path / "there.py").write_text('print("found")\n')

    def found(module: str) -> bool:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        command = isolated(module)
        return subprocess.run(command, env=environment, capture_output=True).returncode == 0

    assert found("here")
    (tmp_path / "here-1.0.dist-info").rmdir()
    assert not found("there")
