"""What the launcher reads, and the standing cluster that comes from the same shape."""

from __future__ import annotations

import copy
from typing import Any

import yaml

from tests.charts.helm_chart import CHART, Object, environment, only, platform_of, pods_of, render
from trainyard.platform import parse_platform
from trainyard_trainer.config.scaling import WORKER_RESOURCE


def test_platform_holds_what_a_run_needs(platform):
    spec, reader = platform.pop("rayClusterSpec"), platform.pop("readerPod")
    autoscaler = platform.pop("autoscaler")
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert platform == {
        "formatVersion": 1,
        "kuberay": "1.6",
        "rayVersion": values["rayVersion"],
        "image": values["image"],
        "runs": values["runs"],
        "storage": {"path": "/mnt/trainyard"},
        "defaultPools": {"gpus": "gpu", "workers": "cpu"},
        "head": {
            "cpus": 2,
            "cpuRequest": 1,
            "memoryGib": 4,
            "memoryMibPerWorker": 8,
            "workersPerCpu": 512,
        },
        "pools": [
            {
                "name": "cpu",
                "gpusPerNode": 0,
                "workersPerNode": 1,
                "cpus": 2,
                "cpuRequest": 2,
                "memoryGib": 4,
            },
            {
                "name": "gpu",
                "gpusPerNode": 8,
                "gpuResource": "nvidia.com/gpu",
                "cpus": 64,
                "cpuRequest": 64,
                "memoryGib": 480,
            },
        ],
        "job": {
            "preRunningDeadlineSeconds": 1800,
            "ttlSecondsAfterFinished": 600,
            "keepHeadSecondsAfterFailure": 3600,
            "separateAttempts": False,
        },
        "queue": {"system": "none", "name": ""},
        "standingCluster": {"name": "trainyard", "pool": "cpu", "nodes": 1},
    }
    assert sorted(spec) == ["authOptions", "headGroupSpec", "rayVersion", "workerGroupSpecs"]
    assert (reader["apiVersion"], reader["kind"]) == ("v1", "Pod")
    assert autoscaler["options"]["version"] == "v2"


def test_the_autoscaler_is_as_confined_as_the_pods_and_mounts_what_is_there(platform):
    head = platform["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    options, volumes = platform["autoscaler"]["options"], platform["autoscaler"]["volumes"]
    assert options["securityContext"] == head["containers"][0]["securityContext"]
    there = {volume["name"] for volume in [*head["volumes"], *volumes]}
    assert {mount["name"] for mount in options["volumeMounts"]} <= there


def test_each_pool_has_one_group_of_its_name(platform):
    groups = platform["rayClusterSpec"]["workerGroupSpecs"]
    assert [group["groupName"] for group in groups] == [one["name"] for one in platform["pools"]]


def test_the_platform_has_only_what_the_launcher_keeps(platform):
    """Images, sizes and replicas follow from a run's plan."""
    spec = platform["rayClusterSpec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert not {"replicas", "minReplicas", "maxReplicas"} & group.keys()
        assert not {"image", "resources"} & group["template"]["spec"]["containers"][0].keys()
    assert not {"image", "command"} & platform["readerPod"]["spec"]["containers"][0].keys()
    assert "activeDeadlineSeconds" not in platform["readerPod"]["spec"]


def standing_of(pool: str, **values: Any) -> dict[str, Object]:
    """Resources of the standing cluster's head and of a worker that fills a node of this pool."""
    pods = pods_of(render({"rayCluster": {"enabled": True, "pool": pool}, **values}))
    return {
        place.removeprefix("standing "): pod["spec"]["containers"][0]["resources"]
        for place, pod in pods.items()
        if place.startswith("standing ")
    }


def test_sizes_of_the_standing_cluster_are_its_pools_numbers():
    gpu = {"cpu": "64", "memory": "480Gi", "nvidia.com/gpu": "8"}
    cpu = {"cpu": "2", "memory": "4Gi"}
    head = {
        "requests": {"cpu": "1", "memory": "4Gi"},
        "limits": {"cpu": "2", "memory": "4Gi"},
    }
    assert standing_of("gpu") == {"gpu": {"requests": gpu, "limits": gpu}, "head": head}
    assert standing_of("cpu") == {"cpu": {"requests": cpu, "limits": cpu}, "head": head}


def test_a_pool_of_ones_own_is_published_and_placed():
    mine = {
        "gpusPerNode": 4,
        "gpuResource": "amd.com/gpu",
        "cpus": 32,
        "cpuRequest": 0.5,
        "memoryGib": 200,
        "nodeSelector": {"machine": "mi300"},
        "tolerations": [{"key": "amd.com/gpu", "operator": "Exists"}],
    }
    values = {"pools": {"gpu": None, "on": mine}, "defaultPools": {"gpus": "on"}}
    objects = render(values)
    platform = platform_of(objects)
    assert [one["name"] for one in platform["pools"]] == ["cpu", "on"]
    placement = {key: mine.pop(key) for key in ("nodeSelector", "tolerations")}
    assert platform["pools"][1] == {"name": "on", **mine}
    pod = pods_of(objects)["platform on"]["spec"]
    assert placement == {key: pod[key] for key in placement}
    mine |= placement
    assert standing_of("on", **values)["on"] == {
        "requests": {"cpu": "0.5", "memory": "200Gi", "amd.com/gpu": "4"},
        "limits": {"cpu": "32", "memory": "200Gi", "amd.com/gpu": "4"},
    }


def test_the_operator_the_queue_and_a_pools_disk_and_network_are_published():
    efa = {"preset": "efa", "interface": "eth0", "devicesPerNode": 32, "debug": True}
    objects = render(
        {
            "operator": {"version": "1.7"},
            "queue": {"system": "volcano", "name": "vision"},
            "pools": {"gpu": {"ephemeralStorageGib": 500, "gpuMemoryGib": 80, "network": efa}},
            "elastic": {"enabled": False},
        }
    )
    text = only(objects, "ConfigMap")["data"]["platform.yaml"]
    platform = parse_platform(text, "test")
    assert platform.kuberay == "1.7"
    assert (platform.queue.system, platform.queue.name) == ("volcano", "vision")
    pool = platform.pool("gpu")
    assert (pool.ephemeral_storage_gib, pool.gpu_memory_gib) == (500, 80)
    assert platform.pool("cpu").gpu_memory_gib is None
    assert pool.network.model_dump(by_alias=True, exclude_none=True) == efa
    assert platform.autoscaler is None
    resources = standing_of("gpu", pools={"gpu": {"ephemeralStorageGib": 500}})["gpu"]
    assert [resources[key]["ephemeral-storage"] for key in ("requests", "limits")] == ["500Gi"] * 2


def test_the_receiver_of_messages_is_published():
    secret = {"name": "chat", "key": "url"}
    told = platform_of(render({"notify": {"secret": secret, "outcomes": ["failed"]}}))
    assert told["notify"] == {"secret": secret, "outcomes": ["failed"]}
    hook = "https://hooks.example.com/runs"
    published = parse_platform(yaml.safe_dump(platform_of(render({"notify": {"url": hook}}))), "it")
    assert published.notify is not None
    assert (published.notify.url, len(published.notify.outcomes)) == (hook, 3)


def test_a_pool_may_count_slices_of_gpus():
    slices = {"gpusPerNode": 56, "gpuResource": "nvidia.com/mig-1g.5gb"}
    pools = {"gpu": slices}
    assert (
        platform_of(render({"pools": pools}))["pools"][1]["gpuResource"] == "nvidia.com/mig-1g.5gb"
    )
    limits = standing_of("gpu", pools=pools)["gpu"]["limits"]
    assert limits["nvidia.com/mig-1g.5gb"] == "56"


def test_attempts_are_kept_apart_on_request_and_nothing_else_is():
    objects = render({"job": {"separateAttempts": True}, "rayCluster": {"enabled": True}})
    apart = {name for name, pod in pods_of(objects).items() if "affinity" in pod["spec"]}
    assert apart == {"platform head", "platform cpu", "platform gpu"}
    assert pods_of(objects)["platform gpu"]["spec"]["affinity"] == {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {
                    "topologyKey": "kubernetes.io/hostname",
                    "labelSelector": {"matchLabels": {"ray.io/is-ray-node": "yes"}},
                    "matchLabelKeys": ["trainyard.io/run"],
                    "mismatchLabelKeys": ["ray.io/cluster"],
                }
            ]
        }
    }


def test_reader_lies_where_heads_may_lie():
    place = {"nodeSelector": {"role": "head"}, "tolerations": [{"key": "a", "operator": "Exists"}]}
    pods = pods_of(render({"head": place}))
    for name in ("platform head", "reader"):
        assert place == {key: pods[name]["spec"][key] for key in place}


def test_head_drives_and_never_trains(platform):
    head = platform["rayClusterSpec"]["headGroupSpec"]
    container = head["template"]["spec"]["containers"][0]
    assert container["name"] == "ray-head"
    assert head["rayStartParams"] == {"num-cpus": "0"}
    assert {"name": "dashboard", "containerPort": 8265} in container["ports"]
    assert environment(head["template"])["TRAINYARD_LOG"] == "/proc/1/fd/1"


def test_drains_end_before_the_pods_do(objects):
    for place, pod in pods_of(objects).items():
        if not place.startswith(("platform", "standing")):
            continue
        grace_s = pod["spec"]["terminationGracePeriodSeconds"]
        drain_s = int(environment(pod)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        assert (drain_s, grace_s) == ((0, 60) if place.endswith("head") else (60, 90)), place


def test_pods_of_ray_are_asked_each_second_whether_they_are_ready(objects):
    for place, pod in pods_of(objects).items():
        if not place.startswith(("platform", "standing")):
            continue
        probe = pod["spec"]["containers"][0]["readinessProbe"]
        assert probe["httpGet"] == {"path": "/api/healthz", "port": 52365}, place
        assert (probe["initialDelaySeconds"], probe["periodSeconds"]) == (1, 1), place
        # The operator's own probe permits 50 s of silence.
        assert probe["periodSeconds"] * probe["failureThreshold"] == 50, place


def test_the_reader_pod_is_small_and_never_restarted(platform):
    reader = platform["readerPod"]
    assert "name" not in reader["metadata"]
    assert reader["spec"]["restartPolicy"] == "Never"
    (container,) = reader["spec"]["containers"]
    assert container["name"] == "reader"
    assert container["resources"] == {
        "requests": {"cpu": "100m", "memory": "256Mi"},
        "limits": {"cpu": "1", "memory": "1Gi"},
    }


def test_all_pods_share_the_claim(on_claim):
    claim = only(on_claim, "PersistentVolumeClaim")
    for place, pod in pods_of(on_claim).items():
        (volume,) = [one for one in pod["spec"]["volumes"] if one["name"] == "storage"]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"], place
        mounts = pod["spec"]["containers"][0]["volumeMounts"]
        assert {"name": "storage", "mountPath": "/mnt/trainyard"} in mounts, place
        assert "AWS_REGION" not in environment(pod), place


def test_claim_outlives_the_chart(on_claim):
    claim = only(on_claim, "PersistentVolumeClaim")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert claim["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "100Gi"}},
    }


def test_claim_takes_the_values_given():
    claim = {"storageClassName": "nfs", "size": "2Ti", "name": "shared", "mountPath": "/data"}
    objects = render({"storage": {"claim": claim}})
    made = only(objects, "PersistentVolumeClaim")
    assert made["metadata"]["name"] == "shared"
    assert made["spec"]["storageClassName"] == "nfs"
    assert made["spec"]["resources"] == {"requests": {"storage": "2Ti"}}
    assert platform_of(objects)["storage"] == {"path": "/data"}


def test_a_claim_goes_with_the_chart_only_if_told_so():
    claim = only(render({"storage": {"claim": {"keep": False}}}), "PersistentVolumeClaim")
    assert "annotations" not in claim["metadata"]


def test_existing_claim_is_used_and_not_made():
    objects = render({"storage": {"claim": {"create": False, "name": "theirs"}}})
    assert "PersistentVolumeClaim" not in [one["kind"] for one in objects]
    assert "'claimName': 'theirs'" in str(pods_of(objects)["reader"])


def test_s3_needs_no_claim_and_keys_come_from_the_secret(on_s3):
    assert "PersistentVolumeClaim" not in [one["kind"] for one in on_s3]
    assert platform_of(on_s3)["storage"] == {
        "path": "s3://models/vision",
        "endpoint": "http://minio:9000",
    }
    for place, pod in pods_of(on_s3).items():
        variables = environment(pod)
        assert variables["AWS_REGION"] == "us-east-1", place
        assert variables["AWS_RESPONSE_CHECKSUM_VALIDATION"] == "when_required", place
        for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            assert variables[key] == {"secretKeyRef": {"name": "bucket", "key": key}}, place
        assert "persistentVolumeClaim" not in str(pod), place


def test_s3_without_a_secret_leaves_rights_to_the_nodes():
    s3 = {"path": "s3://models", "region": "eu-central-1"}
    objects = render({"storage": {"claim": None, "s3": s3}})
    assert platform_of(objects)["storage"] == {"path": "s3://models"}
    variables = environment(pods_of(objects)["platform head"])
    assert variables["AWS_REGION"] == "eu-central-1"
    assert "AWS_RESPONSE_CHECKSUM_VALIDATION" not in variables
    assert "AWS_ACCESS_KEY_ID" not in variables


def test_standing_cluster_has_the_platforms_shape(objects):
    standing = copy.deepcopy(only(objects, "RayCluster")["spec"])
    shape = platform_of(objects)["rayClusterSpec"]
    assert standing.pop("upgradeStrategy") == {"type": "Recreate"}
    shape["workerGroupSpecs"] = [
        group for group in shape["workerGroupSpecs"] if group["groupName"] == "cpu"
    ]
    for group in standing["workerGroupSpecs"]:
        assert [group.pop(key) for key in ("replicas", "minReplicas", "maxReplicas")] == [1, 1, 1]
        assert group.pop("resources") == {WORKER_RESOURCE: "1"}
    for group in (standing["headGroupSpec"], *standing["workerGroupSpecs"]):
        container = group["template"]["spec"]["containers"][0]
        assert container.pop("image") == platform_of(objects)["image"]
        assert container.pop("resources").keys() == {"requests", "limits"}
        container["env"].remove({"name": "TRAINYARD_LOCAL_RAY", "value": "forked"})
    assert standing == shape


def test_standing_cluster_takes_pool_and_replicas():
    objects = render({"rayCluster": {"enabled": True, "pool": "gpu", "replicas": 3}})
    (group,) = only(objects, "RayCluster")["spec"]["workerGroupSpecs"]
    assert (group["groupName"], group["replicas"], group["maxReplicas"]) == ("gpu", 3, 3)


def test_an_idle_standing_cluster_gives_its_workers_back():
    standing = {"enabled": True, "replicas": 2, "idleMinutes": 15}
    objects = render({"rayCluster": standing})
    spec = only(objects, "RayCluster")["spec"]
    (group,) = spec["workerGroupSpecs"]
    assert spec["enableInTreeAutoscaling"] is True
    assert spec["autoscalerOptions"]["idleTimeoutSeconds"] == 900
    assert [group[key] for key in ("minReplicas", "replicas", "maxReplicas")] == [0, 2, 2]
    volumes = {each["name"] for each in spec["headGroupSpec"]["template"]["spec"]["volumes"]}
    mounts = {each["name"] for each in spec["autoscalerOptions"]["volumeMounts"]}
    assert mounts <= volumes
    assert platform_of(objects)["standingCluster"] == {
        "name": "trainyard",
        "pool": "cpu",
        "nodes": 2,
        "idleMinutes": 15,
    }


def test_standing_cluster_is_made_only_on_request():
    assert "RayCluster" not in [one["kind"] for one in render({})]


UPGRADE = {
    "image": "registry.example:5000/vision/trainyard:0.2.0",
    "imagePullPolicy": "Always",
    "imagePullSecrets": [{"name": "registry"}],
    "rayVersion": "2.61.0",
    "serviceAccount": {"name": "vision"},
    "pools": {"cpu": {"memoryGib": 6, "nodeSelector": {"disk": "fast"}}},
}


def test_an_upgrade_reaches_the_standing_cluster_and_later_runs():
    objects = render({**UPGRADE, "rayCluster": {"enabled": True}})
    platform = platform_of(objects)
    assert (platform["image"], platform["rayVersion"]) == (UPGRADE["image"], "2.61.0")
    assert only(objects, "ServiceAccount")["metadata"]["name"] == "vision"
    for spec in (platform["rayClusterSpec"], only(objects, "RayCluster")["spec"]):
        assert spec["rayVersion"] == "2.61.0"
    pods = pods_of(objects)
    for place, pod in pods.items():
        container = pod["spec"]["containers"][0]
        if place.startswith("standing") or "probe" in place:
            assert container["image"] == UPGRADE["image"], place
        assert container["imagePullPolicy"] == "Always", place
        assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}], place
        assert pod["spec"]["serviceAccountName"] == "vision", place
    (pool,) = [one for one in platform["pools"] if one["name"] == "cpu"]
    limits = pods["standing cpu"]["spec"]["containers"][0]["resources"]["limits"]
    assert (pool["memoryGib"], limits["memory"]) == (6, "6Gi")
    for place in ("platform cpu", "standing cpu"):
        assert pods[place]["spec"]["nodeSelector"] == {"disk": "fast"}, place


def test_existing_service_account_is_used_and_not_made():
    objects = render({"serviceAccount": {"create": False, "name": "theirs"}})
    assert "ServiceAccount" not in [one["kind"] for one in objects]
    assert pods_of(objects)["reader"]["spec"]["serviceAccountName"] == "theirs"
