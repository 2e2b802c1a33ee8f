"""The variables of a run file reach the driver and every process that works for it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from attempts import Attempts, ray_config

from trainyard_trainer.environment import JOB_CONFIG_VARIABLE, set_variables

WORKERS = """
import json, os, sys
from trainyard_trainer.environment import set_variables
set_variables({"CANARY": "5$ (a) sings"})
from trainyard_trainer.on_ray.ray_cluster import ray_running
from trainyard_trainer.config.scaling import Scaling
import ray, ray.data

def seen(*_):
    return {"canary": [os.environ.get("CANARY", "")]}

with ray_running(Scaling(num_workers=1, use_gpu=False, cpus_per_worker=1)):
    task = ray.get(ray.remote(seen).remote())
    data = ray.data.range(1).map_batches(seen).take(1)
json.dump([os.environ["CANARY"], *task["canary"], data[0]["canary"]], open(sys.argv[1], "w"))
"""


def test_variables_are_added_to_those_that_ray_s_job_server_has_set() -> None:
    job = {"metadata": {"a": "b"}, "runtime_env": {"env_vars": {"A": "1"}, "working_dir": "x"}}
    environment = {JOB_CONFIG_VARIABLE: json.dumps(job), "HOME": "/"}
    set_variables({"B": "2"}, environment)
    assert (environment["B"], environment["HOME"]) == ("2", "/")
    assert json.loads(environment[JOB_CONFIG_VARIABLE]) == {
        "metadata": {"a": "b"},
        "runtime_env": {"env_vars": {"A": "1", "B": "2"}, "working_dir": "x"},
    }


def test_without_variables_the_environment_stays_as_it_is() -> None:
    environment: dict[str, str] = {}
    set_variables({}, environment)
    assert environment == {}


@pytest.mark.ci
def test_tasks_and_ray_data_have_the_variables_as_they_are_written(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    subprocess.run([sys.executable, "-c", WORKERS, str(found)], check=True)
    assert json.loads(found.read_text()) == ["5$ (a) sings"] * 3


@pytest.fixture
def attempts(fresh_attempts: Attempts) -> Attempts:
    """Start the processes of attempts as users start them: their start is tested."""
    return fresh_attempts


@pytest.mark.ci
def test_the_workers_of_a_recipe_have_the_variables(attempts: Attempts) -> None:
    """A library of torch says in each process what it was told by variables."""
    config = ray_config(attempts, 2, env={"OMP_DISPLAY_ENV": "TRUE", "OMP_STACKSIZE": "3M"})
    output = attempts.finish(config)
    told = r"\(RayTrainWorker pid=(\d+)\).*OMP_STACKSIZE = '3145728'"
    assert len(set(re.findall(told, output))) == 2
