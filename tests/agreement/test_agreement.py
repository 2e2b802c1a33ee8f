"""What two rooms promise each other."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_chart import only, platform_of, render
from pydantic import BaseModel

from tests.bench import ways
from tests.e2e import fault_table
from tests.gpu import page as gpu_page
from tests.gpu.__main__ import DOCS
from trainyard.planning.merge import merge
from trainyard.planning.plan import plan_run
from trainyard.planning.render import render_job
from trainyard.platform import Platform, PlatformSection, load_platform, parse_platform
from trainyard.run_file.load import load_run
from trainyard.submission.current_status import HEAD_CONTAINER
from trainyard_trainer.config.section import Section
from trainyard_trainer.config.trainer_config import CONFIG_VARIABLE, read_config
from trainyard_trainer.run_files import submission
from trainyard_trainer.run_files.exit_codes import NOT_FOUND
from trainyard_trainer.run_files.local_ray import LOCAL_RAY_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
DIGITS = ROOT / "examples/digits.yaml"
PYPROJECT = (ROOT / "pyproject.toml").read_text()
DOCKERFILE = (ROOT / "train_image/Dockerfile").read_text()


def pinned(text: str, package: str) -> str:
    found = re.search(rf'(?m)^\W*{package}(?:\[.*?\])?==([^\s"\\;]+)', text)
    assert found is not None, f"{package} is not pinned"
    return found.group(1)


def job_of(platform: Platform, **resources: str) -> dict[str, Any]:
    plan = plan_run(load_run(DIGITS, **resources), platform, "team")
    return merge(render_job(plan), platform, plan)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_each_example_travels_from_the_launcher_to_the_trainer(example: Path) -> None:
    plan = plan_run(load_run(example), load_platform(None), "team")
    assert read_config({CONFIG_VARIABLE: plan.trainer.model_dump_json()}) == plan.trainer


def test_the_pods_of_a_run_are_those_of_the_standing_cluster() -> None:
    objects = render({"rayCluster": {"enabled": True, "replicas": 2}})
    platform = parse_platform(yaml.safe_dump(platform_of(objects)), "test")
    standing = only(objects, "RayCluster")["spec"]
    run = copy.deepcopy(job_of(platform, workers="2")["spec"]["rayClusterSpec"])
    standing.pop("upgradeStrategy")
    for spec in (run, standing):
        (group,) = spec["workerGroupSpecs"]
        group["rayStartParams"].pop("object-store-memory", None)
        group.pop("resources", None)  # a run counts places for its workers
        for part in (spec["headGroupSpec"], group):
            part["template"]["metadata"]["labels"].pop("trainyard.io/run", None)
            part["template"]["metadata"]["labels"].pop("app.kubernetes.io/managed-by", None)
            part["template"]["spec"]["containers"][0].pop("resources")
            container = part["template"]["spec"]["containers"][0]
            # The last one is of the standing cluster: only its pods fork processes.
            ours = (CONFIG_VARIABLE, submission.VARIABLE, LOCAL_RAY_VARIABLE)
            container["env"] = [v for v in container["env"] if v["name"] not in ours]
    assert run == standing


def test_entrypoint_and_reader_are_modules_of_the_image() -> None:
    job = job_of(load_platform(None), workers="2")
    assert job["spec"]["entrypoint"] == "python -I -u -m trainyard_trainer"
    assert (ROOT / "train_image/trainyard_trainer/__main__.py").exists()
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "trainyard_trainer.tools.folder",
            "--path",
            ROOT,
            "no-run",
            "none.json",
        ],
        cwd=ROOT / "train_image",
        capture_output=True,
        check=False,
    )
    assert ended.returncode == NOT_FOUND


def test_the_head_container_is_the_one_whose_log_is_read() -> None:
    spec = load_platform(None).ray_cluster_spec["headGroupSpec"]["template"]["spec"]
    assert spec["containers"][0]["name"] == HEAD_CONTAINER


def test_user_and_home_agree_in_image_and_chart() -> None:
    pod = load_platform(None).ray_cluster_spec["headGroupSpec"]["template"]["spec"]
    (home,) = [v["value"] for v in pod["containers"][0]["env"] if v["name"] == "HOME"]
    assert f"HOME={home}" in DOCKERFILE
    assert re.search(rf"(?m)^USER {pod['securityContext']['runAsUser']}\b", DOCKERFILE)
    assert home in [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]]


def test_the_head_says_where_the_driver_logs_and_the_trainer_reads_it() -> None:
    pod = load_platform(None).ray_cluster_spec["headGroupSpec"]["template"]["spec"]
    assert "TRAINYARD_LOG" in [variable["name"] for variable in pod["containers"][0]["env"]]
    sources = (ROOT / "train_image/trainyard_trainer").rglob("*.py")
    assert any("TRAINYARD_LOG" in source.read_text() for source in sources)


def test_the_ray_version_is_one_number_everywhere() -> None:
    platform = load_platform(None)
    versions = {
        pinned(PYPROJECT, "ray"),
        pinned((ROOT / "requirements.txt").read_text(), "ray"),
        pinned((ROOT / "train_image/requirements.txt").read_text(), "ray"),
        platform.ray_version,
        platform.ray_cluster_spec["rayVersion"],
    }
    assert len(versions) == 1, versions


def test_the_tested_versions_are_those_of_the_documentation() -> None:
    page = (ROOT / "docs/explanation/dependencies.md").read_text()
    servers = "".join(file.read_text() for file in ROOT.glob("tests/cluster/tools/*/go.mod"))
    operator = (ROOT / "tests/cluster/tools/operator/go.mod").read_text()
    (kuberay,) = set(re.findall(r"kuberay/ray-operator v(\S+)", operator))
    (kubernetes,) = set(re.findall(r"k8s\.io/kubernetes v(\S+)", servers))
    ray, torch = pinned(PYPROJECT, "ray"), pinned(PYPROJECT, "torch")
    assert f"Ray {ray}, torch {torch}, KubeRay {kuberay}, Kubernetes {kubernetes}," in page
    assert f"KUBERAY   := {kuberay}\n" in (ROOT / "Makefile").read_text()
    assert kuberay.startswith(f"{load_platform(None).kuberay}.")


def test_the_image_has_the_versions_of_the_project() -> None:
    project = set(re.findall(r"(?m)^[a-z0-9-]+==\S+", (ROOT / "requirements.txt").read_text()))
    image = set(
        re.findall(r"(?m)^[a-z0-9-]+==\S+", (ROOT / "train_image/requirements.txt").read_text())
    )
    assert image
    assert image <= project


@pytest.mark.parametrize("file", ["requirements.txt", "train_image/requirements.txt"])
def test_a_lock_has_hashes_and_names_no_index(file: str) -> None:
    text = (ROOT / file).read_text()
    pins = re.findall(r"(?m)^[a-z0-9-]+==", text)
    assert len(re.findall(r"\\\n    --hash=sha256:[0-9a-f]{64}", text)) >= len(pins) > 0
    assert "://" not in text


@pytest.mark.parametrize(
    "module",
    ["trainyard_trainer.config.trainer_config", "trainyard.cli.app", "trainyard.run_file.load"],
)
def test_the_laptop_side_loads_neither_torch_nor_ray(module: str) -> None:
    script = f"import sys, {module}; sys.exit(sorted({{'torch', 'ray'}} & sys.modules.keys()) or 0)"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def with_subclasses(model: type[BaseModel]) -> set[type[BaseModel]]:
    return {model}.union(*map(with_subclasses, model.__subclasses__()))


SECTIONS = with_subclasses(Section) | with_subclasses(PlatformSection)


@pytest.mark.parametrize(
    "model", sorted(SECTIONS, key=lambda model: model.__name__), ids=lambda model: model.__name__
)
def test_every_field_of_a_run_file_and_a_platform_has_a_description(
    model: type[BaseModel],
) -> None:
    assert [name for name, field in model.model_fields.items() if not field.description] == []


def test_the_table_of_faults_is_what_the_drills_have_shown() -> None:
    results = fault_table.load()
    repair = "run `make fault-table`"
    assert fault_table.PAGE.read_text() == fault_table.page(results), repair


def test_the_table_of_ways_is_what_has_been_measured_of_them() -> None:
    results = ways.Results.load(ways.RESULTS)
    assert results.ways.keys() <= {way.title for way in ways.WAYS}, "run `make compare`"
    repair = "run `python -m tests.bench.ways --page`"
    assert ways.PAGE.read_text() == ways.page(results), repair


def test_the_page_of_gpu_results_is_made_from_the_results() -> None:
    repair = "run `python -m tests.gpu --page`"
    assert (DOCS / gpu_page.PAGE).read_text() == gpu_page.page(gpu_page.load(DOCS)), repair
