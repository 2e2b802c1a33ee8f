"""A run file with a recipe of the user: its code travels with it, and mistakes are refused at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launcher.random_runs import PLATFORM
from trainyard.errors import ConfigError
from trainyard.planning.objects import run_objects
from trainyard.run_file.load import load_run
from trainyard_trainer.config.trainer_config import CONFIG_VARIABLE, OwnRecipeConfig, read_config

EXAMPLES = Path(__file__).parents[2] / "examples"


def own_run(**changes: Any) -> dict[str, Any]:
    """Return the example as a mapping; `train__recipe="a:B"` changes one key, None removes it."""
    run: dict[str, Any] = yaml.safe_load((EXAMPLES / "regression.yaml").read_text())
    run |= {"image": "x/y:1", "code": str(EXAMPLES / "recipes")}
    for path, value in changes.items():
        *sections, key = path.split("__")
        section = run
        for name in sections:
            section = section.setdefault(name, {})
        section.pop(key, None)
        if value is not None:
            section[key] = value
    return run


@pytest.mark.parametrize("source", ["t.csv", "./t.csv", "data/t.csv"])
def test_a_table_at_a_relative_path_is_refused_for_a_cluster(source: str) -> None:
    run = load_run(own_run(data__dataset=None, data__source=source))
    with pytest.raises(
        ConfigError, match="is a relative path, which pods of a cluster cannot read"
    ):
        run_objects(run, PLATFORM, "team")


def test_a_table_at_a_shared_path_is_planned() -> None:
    run = load_run(own_run(data__dataset=None, data__source="/data/t.csv", data__columns=["a"]))
    assert run_objects(run, PLATFORM, "team").job["kind"] == "RayJob"


def test_initial_weights_at_a_relative_path_are_refused_for_a_cluster() -> None:
    run = load_run(own_run(train__init__path="net.safetensors"))
    with pytest.raises(
        ConfigError, match=r"train\.init\.path = net\.safetensors is a relative path"
    ):
        run_objects(run, PLATFORM, "team")


@pytest.mark.parametrize("path", ["/data/net.pt", "s3://b/net.pt", "hf://org/net@main"])
def test_initial_weights_that_pods_can_read_are_planned(path: str) -> None:
    run = load_run(own_run(train__init__path=path))
    assert run_objects(run, PLATFORM, "team").job["kind"] == "RayJob"


def test_the_code_travels_with_the_run_and_its_hash_with_the_config() -> None:
    objects = run_objects(load_run(own_run()), PLATFORM, "team")
    head = objects.job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    variables = {each["name"]: each.get("value", "") for each in head["containers"][0]["env"]}
    config = read_config({CONFIG_VARIABLE: variables[CONFIG_VARIABLE].replace("$$", "$")})
    assert isinstance(config, OwnRecipeConfig)
    assert objects.plan.code is not None
    assert config.code_sha256 == objects.plan.code.sha256
    assert variables["TRAINYARD_CODE"] == objects.plan.code.text
    assert json.loads(config.model_dump_json())["train"]["recipe"] == "regression:Regression"


def test_code_in_the_image_needs_no_folder() -> None:
    objects = run_objects(load_run(own_run(code=None)), PLATFORM, "team")
    assert objects.plan.code is None


@pytest.mark.parametrize(
    "changes",
    [{"data__loader": "ray"}, {"data": {"source": "/t.lance", "stream": True, "loader": "ray"}}],
)
def test_the_ray_loader_reads_on_the_nodes_for_data(changes: dict[str, Any]) -> None:
    run = load_run(own_run(**changes, resources__data={"nodes": 1}))
    objects = run_objects(run, PLATFORM, "team")
    assert isinstance(objects.plan.trainer, OwnRecipeConfig)
    assert objects.plan.trainer.data.ray_nodes == {"trainyard.io/nodes": "data"}
    assert objects.plan.data is not None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"train__recipe": "regression"}, "or module:Class of your own"),
        ({"train__recipe": "a:b:c"}, "must be module:name"),
        ({"data__dataset": "patients"}, "data.dataset = 'patients': must be module:name"),
        ({"data__sorce": "x"}, "data.sorce: unknown key; did you mean source?"),
        ({"data__loader": "dali"}, "data.loader = 'dali': must be 'torch' or 'ray'"),
        ({"train__global_batch_size": 33}, "33"),
        ({"resources__data": {"nodes": 1}}, "resources.data is only for the Ray loader"),
        ({"train__label_smoothing": 0.1}, "train.label_smoothing: unknown key"),
        ({"code": "/nowhere"}, "the folder does not exist"),
    ],
)
def test_a_mistake_is_refused_by_its_path(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        run_objects(load_run(own_run(**changes)), PLATFORM, "team")
    assert told in str(refused.value)
