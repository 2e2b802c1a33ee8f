"""What a run file sets of its pods is what the platform permits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainyard.errors import ConfigError
from trainyard.planning.objects import run_objects
from trainyard.planning.plan import plan_run
from trainyard.planning.reasons import explain_plan
from trainyard.platform import DataVolume, Platform, RunPermissions, load_platform, parse_platform
from trainyard.run_file.load import load_run
from trainyard.run_file.models import RunConfig

IMAGENET = {
    "name": "imagenet",
    "volume": {"name": "data-imagenet", "persistentVolumeClaim": {"claimName": "imagenet-ro"}},
    "mount": {"name": "data-imagenet", "mountPath": "/data/imagenet", "readOnly": True},
}

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
PLATFORM = load_platform(None)

each_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)


def permitting(**runs: Any) -> Platform:
    """The packaged platform with other values of `runs`."""
    default = PLATFORM.runs.model_dump(by_alias=True)
    permissions = RunPermissions.model_validate(default | runs)
    return PLATFORM.model_copy(update={"runs": permissions})


def with_keys(example: Path = ROOT / "examples/digits.yaml", **keys: Any) -> RunConfig:
    """An example with further keys."""
    document = yaml.safe_load(example.read_text()) | keys
    if "code" in document:
        document["code"] = str(example.parent / document["code"])
    return load_run(document)


def refusal(run: RunConfig, platform: Platform = PLATFORM) -> str:
    with pytest.raises(ConfigError) as raised:
        plan_run(run, platform, "team")
    return str(raised.value)


def rows(run: RunConfig, platform: Platform = PLATFORM) -> dict[str, tuple[str, str]]:
    """The rows that `trainyard plan` prints, by their names."""
    plan = plan_run(run, platform, "team")
    return {row.name: (row.value, row.why) for row in explain_plan(plan, run, platform)}


@each_example
def test_variables_of_every_kind_of_run_are_in_its_config_and_its_plan(example: Path) -> None:
    run = with_keys(example, env={"OMP_NUM_THREADS": "4", "HF_HUB_OFFLINE": "0"})
    assert plan_run(run, PLATFORM, "team").trainer.env == run.env
    assert rows(run)["variables"] == ("2", "of driver and workers: OMP_NUM_THREADS, HF_HUB_OFFLINE")


@pytest.mark.parametrize(
    "name", ["LD_PRELOAD", "PYTHONSTARTUP", "AWS_REGION", "NVIDIA_VISIBLE_DEVICES", "HOME"]
)
def test_a_variable_that_the_platform_denies_is_refused_with_the_rule_and_who_can_change_it(
    name: str,
) -> None:
    message = refusal(with_keys(env={name: "x", "FINE": "y"}))
    assert f"env.{name}: the name matches " in message
    assert "of runs.env.deny" in message
    assert "the platform's administrator, who can change these values" in message
    assert "FINE" not in message


def test_the_administrator_decides_which_variables_are_denied() -> None:
    platform = permitting(env={"deny": ["WANDB_*"]})
    assert run_objects(with_keys(env={"LD_PRELOAD": "x"}), platform, "team").job
    assert "env.WANDB_MODE: the name matches WANDB_*" in refusal(
        with_keys(env={"WANDB_MODE": "x"}), platform
    )


def test_a_chart_that_says_nothing_about_runs_permits_nothing() -> None:
    document = yaml.safe_load((ROOT / "launcher/trainyard/platform.yaml").read_text())
    del document["runs"]
    platform = parse_platform(yaml.safe_dump(document), "old")
    assert "env.A: the name matches * of runs.env.deny" in refusal(
        with_keys(env={"A": "x"}), platform
    )
    assert run_objects(with_keys(), platform, "team").job


HUB = {"HF_TOKEN": {"name": "hub", "key": "token"}}


@each_example
def test_a_secret_is_a_reference_in_every_ray_container(example: Path) -> None:
    run = with_keys(example, secrets=HUB)
    platform = permitting(secrets=["h*"])
    shape = run_objects(run, platform, "team").job["spec"]["rayClusterSpec"]
    for group in (shape["headGroupSpec"], *shape["workerGroupSpecs"]):
        env = group["template"]["spec"]["containers"][0]["env"]
        assert [each for each in env if each["name"] == "HF_TOKEN"] == [
            {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
        ]
    assert rows(run, platform)["secrets"] == (
        "1",
        "variables by reference: HF_TOKEN from hub/token",
    )


def test_secrets_are_refused_unless_the_administrator_names_them() -> None:
    run = with_keys(secrets=HUB)
    assert "secrets.HF_TOKEN.name = hub: runs.secrets permits none" in refusal(run)
    message = refusal(run, permitting(secrets=["wandb", "hub-*"]))
    assert "runs.secrets permits only wandb, hub-*" in message


def test_a_secret_replaces_no_variable_of_the_platform() -> None:
    run = with_keys(secrets={"LD_X": HUB["HF_TOKEN"]})
    assert "secrets.LD_X: the name matches LD_*" in refusal(run, permitting(secrets=["*"]))
    platform = permitting(secrets=["*"], env={"deny": []})
    with pytest.raises(ConfigError, match="already have the variable HOME"):
        run_objects(with_keys(secrets={"HOME": HUB["HF_TOKEN"]}), platform, "team")


METADATA = {
    "labels": {"example.com/team": "vision"},
    "annotations": {"sidecar.istio.io/inject": "false", "example.com/note": "a $ {{ b }}"},
}


@each_example
def test_labels_and_annotations_are_those_of_the_rayjob_and_of_every_pod(example: Path) -> None:
    run = with_keys(example, **METADATA)
    platform = permitting(labels=["example.com/*", "sidecar.istio.io/inject"])
    job = run_objects(run, platform, "team").job
    shape = job["spec"]["rayClusterSpec"]
    groups = (shape["headGroupSpec"], *shape["workerGroupSpecs"])
    for metadata in (job["metadata"], *(group["template"]["metadata"] for group in groups)):
        assert metadata["labels"].items() >= METADATA["labels"].items()
        assert metadata["annotations"] == METADATA["annotations"]
    assert rows(run, platform)["labels"] == ("1", "of the RayJob and its pods: example.com/team")


def test_labels_are_refused_unless_the_administrator_permits_their_keys() -> None:
    message = refusal(with_keys(**METADATA), permitting(labels=["sidecar.istio.io/*"]))
    assert "labels.example.com/team: runs.labels permits only sidecar.istio.io/*" in message
    assert "annotations.example.com/note: runs.labels" in message
    assert "annotations.sidecar.istio.io/inject" not in message


def test_a_label_of_the_platform_s_pods_is_not_replaced() -> None:
    spec = copy.deepcopy(PLATFORM.ray_cluster_spec)
    spec["workerGroupSpecs"][0]["template"]["metadata"]["labels"]["example.com/team"] = "infra"
    platform = permitting(labels=["*"]).model_copy(update={"ray_cluster_spec": spec})
    message = refusal(with_keys(**METADATA), platform)
    assert "labels.example.com/team: the pods of the platform have it already" in message


@pytest.mark.parametrize("pattern", ["[a-z]", "A?", "", "a b"])
def test_a_pattern_has_no_signs_but_the_asterisk(pattern: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        RunPermissions.model_validate({"env": {"deny": [pattern]}})


def offering(*volumes: dict[str, Any], **runs: Any) -> Platform:
    """The packaged platform with data volumes."""
    found = tuple(DataVolume.model_validate(volume) for volume in volumes)
    return permitting(**runs).model_copy(update={"data_volumes": found})


@each_example
def test_head_and_workers_of_every_kind_of_run_mount_its_data_volumes(example: Path) -> None:
    run, platform = with_keys(example, volumes=["imagenet"]), offering(IMAGENET)
    why = "claim imagenet-ro, read-only; mounted by head and workers"
    assert rows(run, platform)["volume imagenet"] == ("/data/imagenet", why)
    shape = run_objects(run, platform, "team").job["spec"]["rayClusterSpec"]
    for group in (shape["headGroupSpec"], *shape["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        assert pod["volumes"][-1] == IMAGENET["volume"]
        assert pod["containers"][0]["volumeMounts"][-1] == IMAGENET["mount"]


def test_a_run_that_names_no_data_volume_mounts_none() -> None:
    job = run_objects(with_keys(), offering(IMAGENET), "team").job
    assert "data-imagenet" not in str(job)


def test_an_unknown_data_volume_is_refused_with_the_known_ones() -> None:
    text = refusal(with_keys(volumes=["imagnet"]), offering(IMAGENET))
    assert "imagnet is no data volume of the platform" in text
    assert "Data volumes: imagenet." in text


@pytest.mark.parametrize(("patterns", "is_permitted"), [(["texts-*"], False), (["image*"], True)])
def test_the_platform_says_which_data_volumes_a_run_mounts(
    patterns: list[str], is_permitted: bool
) -> None:
    run, platform = with_keys(volumes=["imagenet"]), offering(IMAGENET, volumes=patterns)
    if is_permitted:
        assert plan_run(run, platform, "team").volumes
    else:
        assert "volumes: imagenet: runs.volumes permits only texts-*" in refusal(run, platform)


@pytest.mark.parametrize("volumes", ["imagenet", ["a", "a"], ["A"], ["../a"], [1], {"a": "b"}])
def test_volumes_is_a_list_of_names(volumes: Any) -> None:
    with pytest.raises(ConfigError, match="volumes"):
        with_keys(volumes=volumes)


@pytest.mark.parametrize(
    "value", ["\U0001f680", "\U000137d4", r"\ud83d\ude80", "<&'>", "\x85\u2028", 'a "b" \\ c', "é"]
)
def test_the_characters_of_an_annotation_are_kept(value: str) -> None:
    run = with_keys(annotations={"example.com/note": value})
    job = run_objects(run, permitting(labels=["*"]), "team").job
    assert job["metadata"]["annotations"] == {"example.com/note": value}
