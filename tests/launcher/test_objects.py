"""A plan becomes a RayJob: strict templates, named places, a name that is a hash of the rest."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainyard.errors import ConfigError
from trainyard.planning.merge import merge, object_hash
from trainyard.planning.plan import Plan, plan_run
from trainyard.planning.render import render_job
from trainyard.platform import Platform
from trainyard.run_file.load import load_run
from trainyard_trainer.config.trainer_config import CONFIG_VARIABLE, BuiltInConfig
from trainyard_trainer.run_files import submission
from trainyard_trainer.run_files.local_ray import LOCAL_RAY_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = (ROOT / "manifests/rayjob.yaml.j2").read_text()


def plan_of(platform: Platform, *settings: str, gpus: str | None = None) -> Plan:
    return plan_run(load_run(ROOT / "examples/digits.yaml", settings, gpus=gpus), platform, "team")


def job_of(platform: Platform, *settings: str, gpus: str | None = None) -> dict[str, Any]:
    plan = plan_of(platform, *settings, gpus=gpus)
    return merge(render_job(plan), platform, plan)


def head_of(job: dict[str, Any]) -> dict[str, Any]:
    return job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]


def test_the_limits_of_a_run_are_deadlines_of_its_rayjob(platform: Platform) -> None:
    spec = job_of(platform)["spec"]
    default_s = platform.job.pre_running_deadline_seconds
    assert "activeDeadlineSeconds" not in spec
    assert spec["preRunningDeadlineSeconds"] == default_s
    spec = job_of(platform, "limits.max_run_s=3600")["spec"]
    assert spec["activeDeadlineSeconds"] == 3600 + default_s
    # KubeRay has no deletion rule for a job that was stopped.
    assert "deletionStrategy" not in spec
    assert spec["shutdownAfterJobFinishes"] is True
    spec = job_of(platform, "limits.max_run_s=3600", "limits.max_start_s=60")["spec"]
    assert (spec["activeDeadlineSeconds"], spec["preRunningDeadlineSeconds"]) == (3660, 60)


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "1e12", "2000000000", "true"])
@pytest.mark.parametrize("key", ["limits.max_run_s", "limits.max_start_s"])
def test_a_limit_is_a_whole_number_of_seconds(platform: Platform, key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=key):
        job_of(platform, f"{key}={value}")


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (TEMPLATE.replace("plan.run ", "plan.rnu "), "has no attribute 'rnu'"),
        (TEMPLATE.replace("plan.run ", "paln.run "), "'paln' is undefined"),
        (TEMPLATE.replace("{{ plan.run | tojson }}", '"'), "while scanning a quoted scalar"),
    ],
)
def test_a_misspelled_variable_of_the_template_is_an_error(
    platform: Platform, template: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=r"rayjob\.yaml\.j2") as raised:
        render_job(plan_of(platform), template)
    assert problem in str(raised.value)


@pytest.mark.parametrize(
    "template",
    [
        TEMPLATE.replace("podMetadata:", "metadata:"),
        TEMPLATE.replace("---", ""),
        TEMPLATE.replace("  labels:", "  finalizers:", 1),
        f"{TEMPLATE}\n---\nkind: RayJob\n",
    ],
    ids=["another key", "one document", "finalizers of pods", "three documents"],
)
def test_a_template_without_its_two_documents_is_an_error(
    platform: Platform, template: str
) -> None:
    assert template != TEMPLATE
    with pytest.raises(ConfigError, match=r"two YAML documents|cannot be rendered"):
        render_job(plan_of(platform), template)


def test_labels_and_annotations_of_the_template_reach_every_pod(platform: Platform) -> None:
    template = TEMPLATE.replace(
        "podMetadata:\n", "podMetadata:\n  annotations: {example.com/scrape: 'true'}\n"
    )
    plan = plan_run(
        load_run(
            ROOT / "examples/digits.yaml",
            ["data.loader=ray", "resources.data={nodes: 1}"],
            gpus="16",
        ),
        platform,
        "team",
    )
    job = merge(render_job(plan, template), platform, plan)
    spec = job["spec"]["rayClusterSpec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    assert len(groups) == 3
    for group in groups:
        metadata = group["template"]["metadata"]
        assert metadata["annotations"] == {"example.com/scrape": "true"}
        assert metadata["labels"]["trainyard.io/run"] == plan.run
        assert metadata["labels"]["app.kubernetes.io/part-of"] == "trainyard"
    assert "annotations" not in job["metadata"]


@pytest.mark.parametrize("name", ["yes", "null", "on", "e1"])
def test_a_name_that_yaml_would_take_for_something_else_stays_text(
    platform: Platform, name: str
) -> None:
    job = job_of(platform, f"name='{name}'")
    assert job["metadata"]["labels"]["trainyard.io/run"] == name


def test_the_name_is_the_run_and_a_hash_of_everything_else(platform: Platform) -> None:
    job = job_of(platform)
    nameless = copy.deepcopy(job)
    name = nameless["metadata"].pop("name")
    assert name == f"digits-{object_hash(nameless)}"
    assert len(object_hash(nameless)) == 8


@pytest.mark.parametrize(
    "setting",
    ["train.seed=1", "faults.retries=7", "image=other:2", "resources.workers=4"],
)
def test_a_changed_run_has_another_name(platform: Platform, setting: str) -> None:
    assert job_of(platform, setting)["metadata"]["name"] != job_of(platform)["metadata"]["name"]


def test_only_the_named_places_of_the_shape_are_filled(platform: Platform) -> None:
    job = job_of(platform, gpus="16")
    shape = copy.deepcopy(platform.ray_cluster_spec)
    spec = job["spec"]["rayClusterSpec"]
    (group,) = spec["workerGroupSpecs"]
    (own,) = [one for one in shape["workerGroupSpecs"] if one["groupName"] == "gpu"]
    assert [group.pop(key) for key in ("replicas", "minReplicas", "maxReplicas")] == [2, 2, 2]
    assert group["rayStartParams"].pop("object-store-memory") == str(480 * 2**30 * 3 // 10)
    for filled, original in ((group, own), (spec["headGroupSpec"], shape["headGroupSpec"])):
        for side in (filled, original):
            container = side["template"]["spec"]["containers"][0]
            for place in ("resources", "image"):
                assert (place in container) == (side is filled)
                container.pop(place, None)
            ours = (CONFIG_VARIABLE, submission.VARIABLE)
            container["env"] = [v for v in container["env"] if v["name"] not in ours]
            for label in ("trainyard.io/run", "app.kubernetes.io/managed-by"):
                side["template"]["metadata"]["labels"].pop(label, None)
            for key in ("replicas", "minReplicas", "maxReplicas"):
                side.pop(key, None)
        assert filled == original
    spec.pop("headGroupSpec"), spec.pop("workerGroupSpecs")
    shape.pop("headGroupSpec"), shape.pop("workerGroupSpecs")
    assert spec == shape


def test_gpus_are_requested_and_limited_alike(platform: Platform) -> None:
    (group,) = job_of(platform, gpus="4")["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    resources = group["template"]["spec"]["containers"][0]["resources"]
    assert resources["limits"] == {"cpu": "32", "memory": "245760Mi", "nvidia.com/gpu": "4"}
    assert resources["requests"]["nvidia.com/gpu"] == "4"


def test_resources_that_kuberay_does_not_count_are_counted_for_ray(
    platform_with: Callable[..., Platform],
) -> None:
    def start(resource: str) -> dict[str, str]:
        job = job_of(platform_with(gpu={"gpuResource": resource}), gpus="4")
        (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
        params: dict[str, str] = group["rayStartParams"]
        return params

    assert start("nvidia.com/gpu.shared")["num-gpus"] == "4"
    for known in ("nvidia.com/gpu", "amd.com/gpu", "nvidia.com/mig-1g.10gb"):
        assert "num-gpus" not in start(known)


def test_disk_is_requested_and_limited_alike(platform_with: Callable[..., Platform]) -> None:
    job = job_of(platform_with(gpu={"ephemeralStorageGib": 100}), gpus="4")
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    resources = group["template"]["spec"]["containers"][0]["resources"]
    assert resources["limits"]["ephemeral-storage"] == "51200Mi"
    assert resources["requests"]["ephemeral-storage"] == "51200Mi"


@pytest.mark.parametrize("text", ['a"b', "a\nb", "$(HOME)", "$$", "${x}", "a'b\\", "ü€"])
def test_the_config_survives_kubernetes_expansion(platform: Platform, text: str) -> None:
    setting = f"train.model.name={json.dumps(text, ensure_ascii=False)}"
    (variable,) = [
        v for v in head_of(job_of(platform, setting))["env"] if v["name"] == CONFIG_VARIABLE
    ]
    assert "$" not in variable["value"].replace("$$", "")
    config = BuiltInConfig.model_validate_json(variable["value"].replace("$$", "$"))
    assert config.train.model.name == text


def test_nothing_of_the_users_reaches_the_entrypoint(platform: Platform) -> None:
    assert job_of(platform)["spec"]["entrypoint"] == "python -I -u -m trainyard_trainer"


def test_a_shape_without_the_pools_group_is_refused(platform: Platform) -> None:
    plan = plan_of(platform, gpus="8")
    shape = copy.deepcopy(platform.ray_cluster_spec)
    shape["workerGroupSpecs"] = [g for g in shape["workerGroupSpecs"] if g["groupName"] != "gpu"]
    with pytest.raises(ConfigError, match="no worker group for pool gpu"):
        merge(render_job(plan), platform.model_copy(update={"ray_cluster_spec": shape}), plan)


def test_merging_leaves_the_platform_as_it_was(platform: Platform) -> None:
    before = yaml.safe_dump(platform.ray_cluster_spec)
    job_of(platform, gpus="8")
    assert yaml.safe_dump(platform.ray_cluster_spec) == before


@pytest.mark.parametrize(
    ("settings", "resources", "is_forked"),
    [
        ((), {"workers": "2"}, False),
        (("faults.replace_workers=true",), {"workers": "2"}, True),
        (("faults.replace_workers=true",), {"workers": "1"}, False),
        (("faults.replace_workers=true",), {"gpus": "2"}, False),
    ],
)
def test_the_workers_of_a_run_are_forked_where_lost_ones_are_replaced(
    platform: Platform, settings: tuple[str, ...], resources: dict[str, str], is_forked: bool
) -> None:
    run = load_run(ROOT / "examples/digits.yaml", settings, **resources)
    plan = plan_run(run, platform, "team")
    spec = merge(render_job(plan), platform, plan)["spec"]["rayClusterSpec"]
    pods = [each["template"]["spec"] for each in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    forks = [
        any(one["name"] == LOCAL_RAY_VARIABLE for one in pod["containers"][0]["env"])
        for pod in pods
    ]
    assert forks == [False, is_forked]
