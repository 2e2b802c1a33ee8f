"""`pip install .` in a clean environment: a launcher with its templates, without torch and ray."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml
from helm_chart import cluster_bin, need_tool, platform_of, render

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of a release, as `make dist-packages` builds them."""
    folder = tmp_path_factory.mktemp("dist")
    need_tool("helm")
    path = os.pathsep.join([os.environ["PATH"], str(cluster_bin())])
    built = subprocess.run(
        [sys.executable, "-m", "release", "--dist", folder, "packages"],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode != 0 and not os.environ.get("CI"):
        pytest.skip(f"the package index is needed here: {built.stderr[-200:]}")
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def clean_environment(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin/ of a virtual environment that holds the wheel and the launcher's dependencies alone."""
    home = tmp_path_factory.mktemp("clean")
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, home / "venv"], check=True)
    (wheel,) = dist.glob("*.whl")
    installed = subprocess.run(
        [*uv, "pip", "install", "--quiet", "--python", home / "venv/bin/python", wheel],
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


def test_it_installs_two_packages_and_nothing_else(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    names = {name.split("/")[0] for name in ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {
        "trainyard",
        "trainyard_trainer",
    }


def test_the_sdist_builds_the_same_wheel(dist: Path, tmp_path: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    build = [sys.executable, "-m", "uv", "build", "--quiet", "--wheel", "--out-dir", tmp_path]
    subprocess.run([*build, sdist], check=True)
    (wheel,), (rebuilt,) = dist.glob("*.whl"), tmp_path.glob("*.whl")
    assert ZipFile(rebuilt).namelist() == ZipFile(wheel).namelist()


def test_it_plans_and_renders_with_the_packaged_chart(
    dist: Path, clean_environment: Path, tmp_path: Path
) -> None:
    (chart,) = dist.glob("*.tgz")
    objects = render({}, chart=chart)
    assert objects == render({})
    platform = tmp_path / "platform.yaml"
    platform.write_text(yaml.safe_dump(platform_of(objects)))
    run = str(ROOT / "examples/digits.yaml")
    arguments = (run, "--gpus", "16", "--platform", str(platform))
    rendered = ended(clean_environment / "trainyard", "render", *arguments, cwd=tmp_path)
    golden = yaml.safe_load((ROOT / "tests/golden/objects/digits-gpus-16.yaml").read_text())
    assert yaml.safe_load(rendered.stdout) == golden, rendered.stderr
