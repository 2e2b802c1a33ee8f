"""`pip install .` in a clean environment: a launcher with its templates, without torch and ray."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def clean_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin/ of a virtual environment that holds the launcher's own dependencies alone."""
    home = tmp_path_factory.mktemp("clean")
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, home / "venv"], check=True)
    installed = subprocess.run(
        [*uv, "pip", "install", "--quiet", "--python", home / "venv/bin/python", ROOT],
        capture_output=True,
        text=True,
        check=False,
    )
    if installed.returncode != 0 and not os.environ.get("CI"):
        pytest.skip(f"the package index is needed here: {installed.stderr[-200:]}")
    assert installed.returncode == 0, installed.stderr
    return home / "venv/bin"


def ended(program: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "HOME": str(cwd), "KUBECONFIG": str(cwd / "none")}
    return subprocess.run(
        [program, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def test_it_holds_neither_torch_nor_ray(clean_environment: Path, tmp_path: Path) -> None:
    script = "import importlib.util as u, sys; sys.exit(any(map(u.find_spec, ['torch', 'ray'])))"
    assert ended(clean_environment / "python", "-c", script, cwd=tmp_path).returncode == 0


def test_it_plans_and_renders_from_anywhere(clean_environment: Path, tmp_path: Path) -> None:
    run = str(ROOT / "examples/digits.yaml")
    trainyard = clean_environment / "trainyard"
    assert "16 GPUs" in ended(trainyard, "plan", run, "--gpus", "16", cwd=tmp_path).stdout
    rendered = ended(trainyard, "render", run, "--gpus", "16", cwd=tmp_path)
    assert yaml.safe_load(rendered.stdout)["kind"] == "RayJob", rendered.stderr


def test_it_submits_as_far_as_there_is_a_cluster(clean_environment: Path, tmp_path: Path) -> None:
    run = str(ROOT / "examples/digits.yaml")
    refused = ended(clean_environment / "trainyard", "submit", run, cwd=tmp_path)
    assert (refused.returncode, "no usable kubeconfig" in refused.stderr) == (3, True)


def test_it_says_what_training_here_would_need(clean_environment: Path, tmp_path: Path) -> None:
    run = str(ROOT / "examples/digits.yaml")
    refused = ended(clean_environment / "trainyard", "train", run, cwd=tmp_path)
    assert (refused.returncode, "trainyard[train]" in refused.stderr) == (2, True)
