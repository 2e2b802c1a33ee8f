"""Objects that break one rule each, and what mends them."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.launcher.rayjobs import ABSENT, Object, raycluster, rayjob
from trainyard.rules.field_path import Kuberay

C = "spec.rayClusterSpec"
H = f"{C}.headGroupSpec"
W = f"{C}.workerGroupSpecs.0"
HEAD, WORKER = f"{H}.template.spec", f"{W}.template.spec"
RAY = f"{HEAD}.containers.0"
QUEUE = {"kueue.x-k8s.io/queue-name": "team"}
DELETION = "spec.deletionStrategy.deletionRules"
AUTOSCALED = {f"{C}.enableInTreeAutoscaling": True, f"{C}.autoscalerOptions": {"version": "v2"}}
SELECTED = {"spec.clusterSelector": {"ray.io/cluster": "standing"}, C: ABSENT}
REDIS = {f"{C}.gcsFaultToleranceOptions": {"redisAddress": "redis:6379"}}
ROCKS = {f"{C}.gcsFaultToleranceOptions": {"backend": "rocksdb"}}
OPEN_GATE = ("feature-gate",)
DNS = {"worker": {"egressRules": [{"ports": [{"port": 53}]}]}}


def rule(policy: str, ttl: int = 0, **condition: str) -> Object:
    return {
        "policy": policy,
        "condition": {**(condition or {"jobStatus": "FAILED"}), "ttlSeconds": ttl},
    }


REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def to_nodes(**expression: str) -> Object:
    """An affinity to nodes with one expression."""
    return {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}}}


def env(name: str, value: str = "1") -> list[Object]:
    return [{"name": name, "value": value}]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What breaks a rule, and around it what is in order."""

    rule: str
    at: str
    broken: Object
    given: Object = field(default_factory=dict)
    kuberay: tuple[Kuberay, ...] = ("1.6", "1.7")
    of: str = "RayJob"
    operator: bool = False
    """KubeRay's own validation refuses it too."""
    beside: tuple[str, ...] = ()
    """Warnings that belong to what is given."""

    def __str__(self) -> str:
        return f"{self.rule} {self.at}"

    def build(self, changes: Object) -> Object:
        """The object with what is given, and changed."""
        return self.made_of(self.given | changes)

    def made_of(self, changes: Object) -> Object:
        """The object of its kind with nothing but these changes."""
        return (rayjob if self.of == "RayJob" else raycluster)(changes)


API_SERVER = [
    Case(rule="required", at=f"{H}.template", broken={f"{H}.template": ABSENT}),
    Case(rule="required", at=f"{W}.groupName", broken={f"{W}.groupName": ABSENT}),
    Case(rule="required", at=f"{W}.template", broken={f"{W}.template": ABSENT}),
    Case(
        rule="required",
        at=f"{C}.gcsFaultToleranceOptions.redisAddress",
        given=REDIS,
        broken={f"{C}.gcsFaultToleranceOptions": {}},
        kuberay=("1.6",),
    ),
    Case(
        rule="choice",
        at=f"{C}.autoscalerOptions.version",
        broken={f"{C}.autoscalerOptions": {"version": "v3"}},
    ),
    Case(
        rule="choice",
        at=f"{C}.autoscalerOptions.upscalingMode",
        broken={f"{C}.autoscalerOptions": {"upscalingMode": "Fast"}},
    ),
    Case(rule="choice", at=f"{C}.authOptions.mode", broken={f"{C}.authOptions.mode": "tokens"}),
    Case(
        rule="choice",
        at="spec.upgradeStrategy.type",
        of="RayCluster",
        given={"spec.upgradeStrategy": {"type": "Recreate"}},
        broken={"spec.upgradeStrategy": {"type": "Rolling"}},
    ),
    Case(rule="choice", at=f"{DELETION}[0].policy", broken={DELETION: [rule("DeletePods")]}),
    Case(
        rule="choice",
        at=f"{DELETION}[0].condition.jobStatus",
        broken={DELETION: [rule("DeleteCluster", jobStatus="STOPPED")]},
    ),
    Case(
        rule="choice",
        at=f"{DELETION}[0].condition.jobDeploymentStatus",
        broken={DELETION: [rule("DeleteCluster", jobDeploymentStatus="Complete")]},
    ),
    Case(
        rule="choice",
        at=f"{C}.networkPolicy.mode",
        given={f"{C}.networkPolicy": DNS},
        broken={f"{C}.networkPolicy": DNS | {"mode": "Deny"}},
        kuberay=("1.7",),
        beside=OPEN_GATE,
    ),
    Case(
        rule="choice",
        at=f"{C}.gcsFaultToleranceOptions.backend",
        given=REDIS,
        broken={f"{C}.gcsFaultToleranceOptions": {"redisAddress": "redis:6379", "backend": "etcd"}},
        kuberay=("1.7",),
    ),
    Case(
        rule="range",
        at="spec.preRunningDeadlineSeconds",
        broken={"spec.preRunningDeadlineSeconds": 0},
    ),
    Case(rule="range", at=DELETION, broken={DELETION: []}),
    Case(
        rule="range",
        at=f"{DELETION}[0].condition.ttlSeconds",
        broken={DELETION: [rule("DeleteCluster", -1)]},
    ),
    Case(
        rule="deletion-form",
        at="spec.deletionStrategy",
        broken={"spec.deletionStrategy.onSuccess": {"policy": "DeleteCluster"}},
        operator=True,
    ),
    Case(
        rule="deletion-form",
        at="spec.deletionStrategy",
        broken={"spec.deletionStrategy": {"onSuccess": {"policy": "DeleteCluster"}}},
        operator=True,
    ),
    Case(
        rule="deletion-condition",
        at=f"{DELETION}[0].condition",
        broken={DELETION: [rule("DeleteSelf", jobStatus="FAILED", jobDeploymentStatus="Failed")]},
        operator=True,
    ),
    Case(
        rule="managed-by",
        at="spec.managedBy",
        given={"spec.managedBy": "kueue.x-k8s.io/multikueue"},
        broken={"spec.managedBy": "me"},
    ),
    *(
        Case(
            rule="new-in-1.7",
            at=f"{C}.{path}",
            given=given,
            broken={f"{C}.{path}": value},
            kuberay=("1.6",),
        )
        for path, value, given in [
            ("networkPolicy", {"mode": "DenyAll"}, {}),
            ("tlsOptions", {"enabled": True}, {}),
            ("historyServerOptions", {}, {}),
            ("headGroupSpec.ingressOptions", {}, {}),
            ("workerGroupSpecs[0].priority", 1, {}),
            ("autoscalerOptions.command", ["sh"], AUTOSCALED),
            ("autoscalerOptions.args", ["x"], AUTOSCALED),
            ("gcsFaultToleranceOptions.backend", "redis", REDIS),
            ("gcsFaultToleranceOptions.storage", {}, REDIS),
        ]
    ),
]

SCHEMA = [
    Case(rule="schema", at="apiVersion", broken={"apiVersion": "ray.io/v2"}),
    Case(
        rule="type",
        at=f"{C}.rayVersion",
        broken={f"{C}.rayVersion": 2.6},
        beside=("probes", "token"),
    ),
    Case(rule="type", at=f"{W}.replicas", broken={f"{W}.replicas": "2"}),
    Case(rule="type", at="metadata.labels.a", broken={"metadata.labels": {"a": 1}}),
    Case(
        rule="type", at=f"{RAY}.resources.limits.cpu", broken={f"{RAY}.resources.limits.cpu": 0.5}
    ),
    Case(rule="overflow", at=f"{W}.maxReplicas", broken={f"{W}.maxReplicas": 2**31}),
    Case(rule="unknown-field", at=f"{C}.workerGroupSpec", broken={f"{C}.workerGroupSpec": []}),
    Case(
        rule="unknown-field",
        at=f"{H}.template.metadata.creationTimestamp",
        broken={f"{H}.template.metadata": {"creationTimestamp": None}},
    ),
    Case(
        rule="quantity",
        at=f"{RAY}.resources.limits.memory",
        broken={f"{RAY}.resources.limits.memory": "4GB"},
    ),
    Case(rule="repeated-item", at=f"{RAY}.env", broken={f"{RAY}.env": [*env("A"), *env("A")]}),
]

GPU = "nvidia.com/gpu"
POD = [
    *(
        Case(
            rule="resources",
            at=f"{RAY}.resources.{kind}{name}",
            broken={
                f"{RAY}.resources": {"limits": {"memory": "2Gi", **limits}, "requests": requests}
            },
        )
        for kind, name, limits, requests in [
            ("requests.", "cpu", {"cpu": "1"}, {"cpu": "1500m"}),
            ("requests.", "memory", {}, {"memory": "3Gi"}),
            ("limits", f"[{GPU}]", {GPU: "0.5"}, {}),
            ("requests", f"[{GPU}]", {}, {GPU: "1"}),
            ("requests", f"[{GPU}]", {GPU: "2"}, {GPU: "1"}),
            ("limits.", "gpu", {"gpu": "1"}, {}),
            ("limits.", "cpu", {"cpu": "-1"}, {}),
        ]
    ),
    Case(rule="container-fields", at=f"{RAY}.name", broken={f"{RAY}.name": "Ray"}),
    Case(rule="container-fields", at=f"{RAY}.image", broken={f"{RAY}.image": ABSENT}),
    Case(
        rule="variable",
        at=f"{RAY}.env[0]",
        broken={
            f"{RAY}.env": [
                {
                    "name": "A",
                    "value": "a",
                    "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}},
                }
            ]
        },
    ),
    Case(
        rule="choice", at=f"{RAY}.imagePullPolicy", broken={f"{RAY}.imagePullPolicy": "Sometimes"}
    ),
    Case(
        rule="toleration",
        at=f"{HEAD}.tolerations[0].value",
        broken={f"{HEAD}.tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]},
    ),
    Case(rule="label", at="metadata.labels.team", broken={"metadata.labels": {"team": "a b"}}),
    Case(
        rule="volume",
        at=f"{RAY}.volumeMounts[0].name",
        given={
            f"{HEAD}.volumes": [{"name": "data", "emptyDir": {}}],
            f"{RAY}.volumeMounts": [{"name": "data", "mountPath": "/data"}],
        },
        broken={f"{HEAD}.volumes": ABSENT},
    ),
    Case(
        rule="port",
        at=f"{RAY}.ports[0].containerPort",
        given={f"{RAY}.ports": [{"name": "dashboard", "containerPort": 8265}]},
        broken={f"{RAY}.ports": [{"name": "dashboard", "containerPort": 65536}]},
    ),
    Case(
        rule="probe",
        at=f"{RAY}.livenessProbe",
        broken={f"{RAY}.livenessProbe": {"periodSeconds": 5}},
    ),
    Case(
        rule="quantity",
        at=f"{RAY}.resources.limits.memory",
        broken={f"{RAY}.resources.limits.memory": "1e3.5"},
    ),
    Case(
        rule="choice",
        at=f"{HEAD}.topologySpreadConstraints[0].whenUnsatisfiable",
        broken={
            f"{HEAD}.topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "Never"}
            ]
        },
    ),
    Case(
        rule="pod-name",
        at=f"{HEAD}.serviceAccountName",
        broken={f"{HEAD}.serviceAccountName": "Trainer_1"},
    ),
    Case(
        rule="pod-name",
        at=f"{RAY}.env[0].valueFrom.fieldRef.fieldPath",
        broken={
            f"{RAY}.env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.phase"}}}]
        },
    ),
    Case(
        rule="pod-range",
        at=f"{HEAD}.securityContext.runAsUser",
        given={f"{HEAD}.securityContext.runAsUser": 1000},
        broken={f"{HEAD}.securityContext.runAsUser": -1},
    ),
    Case(
        rule="pod-required",
        at=f"{RAY}.envFrom[0].secretRef.name",
        broken={f"{RAY}.envFrom": [{"secretRef": {"optional": True}}]},
    ),
    Case(
        rule="pod-required",
        at=f"{HEAD}.securityContext.seccompProfile.type",
        broken={f"{HEAD}.securityContext": {"seccompProfile": {}}},
    ),
    Case(
        rule="pod-required",
        at=f"{RAY}.lifecycle.preStop",
        broken={f"{RAY}.lifecycle": {"preStop": {}}},
    ),
    Case(
        rule="node-label",
        at=f"{HEAD}.affinity.nodeAffinity.{REQUIRED}.nodeSelectorTerms[0].matchExpressions[0].key",
        broken={f"{HEAD}.affinity": to_nodes(key="-pool", operator="Exists")},
    ),
    Case(
        rule="pod-required",
        at=f"{HEAD}.affinity.nodeAffinity.{REQUIRED}.nodeSelectorTerms[0].matchExpressions[0].values",
        broken={f"{HEAD}.affinity": to_nodes(key="pool", operator="In")},
    ),
    Case(
        rule="resources",
        at=f"{RAY}.resources.requests.cpu",
        broken={f"{RAY}.resources.requests": {"cpu": 2.0}},
    ),
    Case(
        rule="pod-path",
        at=f"{HEAD}.volumes[0].configMap.items[0].path",
        broken={
            f"{HEAD}.volumes": [
                {"name": "a", "configMap": {"name": "a", "items": [{"key": "k", "path": "/k"}]}}
            ]
        },
    ),
    Case(
        rule="toleration",
        at=f"{HEAD}.tolerations[0].tolerationSeconds",
        broken={
            f"{HEAD}.tolerations": [
                {"key": "a", "operator": "Exists", "effect": "NoSchedule", "tolerationSeconds": 5}
            ]
        },
    ),
]

RAYJOB = [
    Case(rule="name", at="metadata.name", broken={"metadata.name": "a" * 48}, operator=True),
    Case(rule="name", at="metadata.name", broken={"metadata.name": "1st"}, operator=True),
    Case(rule="name", at="metadata.name", broken={"metadata.name": "Digits"}, operator=True),
    Case(
        rule="name",
        at="metadata.name",
        of="RayCluster",
        broken={"metadata.name": "a" * 54},
        operator=True,
    ),
    Case(
        rule="name",
        at="metadata.generateName",
        given={"metadata.name": ABSENT, "metadata.generateName": "a" * 42},
        broken={"metadata.generateName": "a" * 43},
    ),
    Case(rule="suspend", at="spec.suspend", broken={"spec.suspend": True}, operator=True),
    Case(
        rule="suspend",
        at="spec.suspend",
        given=SELECTED | {"spec.shutdownAfterJobFinishes": True, "spec.deletionStrategy": ABSENT},
        broken={"spec.suspend": True},
        operator=True,
    ),
    Case(
        rule="ttl",
        at="spec.ttlSecondsAfterFinished",
        broken={"spec.ttlSecondsAfterFinished": 60},
        operator=True,
    ),
    Case(
        rule="ttl",
        at="spec.ttlSecondsAfterFinished",
        broken={"spec.ttlSecondsAfterFinished": -1},
        operator=True,
    ),
    Case(rule="cluster", at=C, broken={C: ABSENT}, operator=True),
    Case(
        rule="cluster",
        at="spec.clusterSelector[ray.io/cluster]",
        given=SELECTED | {"spec.deletionStrategy": ABSENT},
        broken={"spec.clusterSelector": {"app": "standing"}},
        operator=True,
    ),
    Case(
        rule="cluster",
        at="spec.submissionMode",
        given=SELECTED | {"spec.deletionStrategy": ABSENT},
        broken={"spec.submissionMode": "SidecarMode"},
        operator=True,
    ),
    Case(
        rule="cluster",
        at="spec.backoffLimit",
        given=SELECTED | {"spec.deletionStrategy": ABSENT},
        broken={"spec.backoffLimit": 1},
        operator=True,
    ),
    Case(rule="retries", at="spec.backoffLimit", broken={"spec.backoffLimit": -1}, operator=True),
    Case(
        rule="retries",
        at="spec.backoffLimit",
        given={"spec.submissionMode": "InteractiveMode"},
        broken={"spec.backoffLimit": 2},
        operator=True,
    ),
    *(
        Case(
            rule="sidecar",
            at=at,
            given={"spec.submissionMode": "SidecarMode"},
            broken={at: value},
            operator=True,
        )
        for at, value in [
            (
                "spec.submitterPodTemplate",
                {"spec": {"containers": [{"name": "a", "image": "busybox:1"}]}},
            ),
            ("spec.submitterConfig", {"backoffLimit": 1}),
            (f"{HEAD}.restartPolicy", "Always"),
        ]
    ),
    Case(
        rule="kubernetes-token",
        at=f"{C}.authOptions.enableK8sTokenAuth",
        broken={f"{C}.authOptions.enableK8sTokenAuth": True},
        operator=True,
    ),
    *(
        Case(
            rule="kubernetes-token",
            at=at,
            of="RayCluster",
            given={"spec.authOptions.enableK8sTokenAuth": True},
            broken=broken,
            operator=True,
        )
        for at, broken in [
            ("spec.authOptions.enableK8sTokenAuth", {"spec.authOptions.mode": "disabled"}),
            ("spec.rayVersion", {"spec.rayVersion": "2.54.0"}),
            ("spec.authOptions.secretName", {"spec.authOptions.secretName": "token"}),
        ]
    ),
    *(
        Case(
            rule="runtime-env",
            at="spec.runtimeEnvYAML",
            given={"spec.runtimeEnvYAML": "env_vars: {A: b}"},
            broken={"spec.runtimeEnvYAML": text},
            operator=True,
        )
        for text in ("pip: [", "- a list", "words")
    ),
    *(
        Case(
            rule="runtime-env-values",
            at=f"spec.runtimeEnvYAML.{at}",
            given={"spec.runtimeEnvYAML": "env_vars: {A: b}"},
            broken={"spec.runtimeEnvYAML": text},
        )
        for at, text in [
            ("env_vars.LR", "env_vars: {LR: 1e-5}"),
            ("env_vars.EPOCHS", "env_vars: {EPOCHS: 3}"),
            ("env_vars.AMP", "env_vars: {AMP: yes}"),
            ("env_vars", "env_vars: {1: a}"),
            ("env_vars", "env_vars: [A=b]"),
            ("pip", "pip: 3"),
            ("pip", "{pip: [a], conda: b}"),
            ("excludes", "excludes: [1]"),
            ("enviroment", "enviroment: {A: b}"),
        ]
    ),
    Case(
        rule="deadline",
        at="spec.activeDeadlineSeconds",
        given={"spec.activeDeadlineSeconds": 1},
        broken={"spec.activeDeadlineSeconds": 0},
        operator=True,
    ),
    Case(
        rule="metadata",
        at=f"{C}.rayVersion",
        given={
            "spec.submissionMode": "K8sJobMode",
            f"{C}.authOptions": ABSENT,
            "spec.metadata": {"a": "b"},
        },
        broken={f"{C}.rayVersion": "2.5.0"},
        kuberay=("1.6",),
        beside=("probes",),
    ),
    Case(
        rule="metadata",
        at="spec.metadata",
        given=SELECTED | {"spec.submissionMode": "K8sJobMode", "spec.deletionStrategy": ABSENT},
        broken={"spec.metadata": {"a": "b"}},
        kuberay=("1.6",),
    ),
]

DELETIONS = [
    Case(
        rule="clean-up",
        at="spec.shutdownAfterJobFinishes",
        broken={"spec.shutdownAfterJobFinishes": True},
        operator=True,
    ),
    Case(
        rule="clean-up",
        at="spec.deletionStrategy.onFailure.policy",
        given={
            "spec.shutdownAfterJobFinishes": True,
            "spec.deletionStrategy": {
                "onSuccess": {"policy": "DeleteCluster"},
                "onFailure": {"policy": "DeleteSelf"},
            },
        },
        broken={"spec.deletionStrategy.onFailure": {"policy": "DeleteNone"}},
        operator=True,
    ),
    *(
        Case(
            rule="foreign-cluster",
            at=f"{DELETION}[0].policy",
            given=SELECTED | {DELETION: [rule("DeleteSelf")]},
            broken={DELETION: [rule(policy)]},
            operator=True,
        )
        for policy in ("DeleteCluster", "DeleteWorkers")
    ),
    Case(
        rule="autoscaled-workers",
        at=f"{DELETION}[0].policy",
        given=AUTOSCALED,
        broken={DELETION: [rule("DeleteWorkers")]},
        operator=True,
    ),
    Case(
        rule="autoscaled-workers",
        at="spec.deletionStrategy.onFailure.policy",
        given=AUTOSCALED
        | {
            "spec.deletionStrategy": {
                "onSuccess": {"policy": "DeleteCluster"},
                "onFailure": {"policy": "DeleteSelf"},
            }
        },
        broken={"spec.deletionStrategy.onFailure": {"policy": "DeleteWorkers"}},
        operator=True,
    ),
    Case(
        rule="repeated-rule",
        at=f"{DELETION}[1].policy",
        broken={DELETION: [rule("DeleteCluster", 1), rule("DeleteCluster", 2)]},
        operator=True,
    ),
    Case(
        rule="deletion-order",
        at=f"{DELETION}[1].condition.ttlSeconds",
        given={DELETION: [rule("DeleteWorkers", 10), rule("DeleteCluster", 10)]},
        broken={DELETION: [rule("DeleteWorkers", 10), rule("DeleteCluster", 9)]},
        operator=True,
    ),
    Case(
        rule="deletion-order",
        at=f"{DELETION}[0].condition.ttlSeconds",
        broken={DELETION: [rule("DeleteSelf", 9), rule("DeleteCluster", 10)]},
        operator=True,
    ),
]

RAYCLUSTER = [
    *(
        Case(rule="container", at=f"{pod}.containers", broken={f"{pod}.containers": []}, operator=True)
        for pod in (HEAD, WORKER)
    ),
    *(
        Case(
            rule="group-resources",
            at=f"{W}.rayStartParams.{key}",
            given={f"{W}.resources": {"CPU": "1"}},
            broken={f"{W}.rayStartParams": {key: "1"}},
            operator=True,
        )
        for key in ("num-cpus", "num-gpus", "memory", "resources")
    ),
    Case(
        rule="group-labels",
        at=f"{W}.rayStartParams.labels",
        broken={f"{W}.rayStartParams": {"labels": "a=b"}},
        operator=True,
    ),
    *(
        Case(
            rule="group-labels",
            at=f"{W}.labels{'' if '/' in key else '.'}{f'[{key}]' if '/' in key else key}",
            given={f"{W}.labels": {"example.com/kind": "data", "zone": ""}},
            broken={f"{W}.labels": {key: value}},
            operator=True,
        )
        for key, value in [("two words", "a"), ("A_b/c", "a"), ("zone", "a b"), ("zone", "x" * 64)]
    ),
    *(
        Case(rule="replicas", at=f"{W}.{key}", broken=broken, operator=True, beside=("replicas-range",))
        for key, broken in [
            ("minReplicas", {f"{W}.minReplicas": -1}),
            ("minReplicas", {f"{W}.minReplicas": 3, f"{W}.replicas": 3}),
        ]
    ),
    Case(
        rule="idle-timeout",
        at=f"{W}.idleTimeoutSeconds",
        given=AUTOSCALED | {f"{W}.idleTimeoutSeconds": 5},
        broken={f"{C}.autoscalerOptions": {"version": "v1"}},
        operator=True,
    ),
    Case(
        rule="idle-timeout",
        at=f"{W}.idleTimeoutSeconds",
        given=AUTOSCALED,
        broken={f"{W}.idleTimeoutSeconds": -1},
        operator=True,
    ),
    Case(
        rule="idle-timeout",
        at=f"{C}.autoscalerOptions.idleTimeoutSeconds",
        given=AUTOSCALED,
        broken={f"{C}.autoscalerOptions": {"version": "v2", "idleTimeoutSeconds": -1}},
        operator=True,
    ),
    Case(
        rule="group-priority",
        at=f"{W}.priority",
        given=AUTOSCALED | {f"{W}.priority": 1},
        broken={f"{C}.rayVersion": "2.55.0"},
        kuberay=("1.7",),
    ),
    Case(
        rule="group-priority",
        at=f"{W}.priority",
        given={f"{W}.priority": 0},
        broken={f"{W}.priority": 1},
        kuberay=("1.7",),
    ),
    Case(
        rule="gcs-fault-tolerance",
        at="metadata.annotations[ray.io/ft-enabled]",
        given=REDIS,
        broken={"metadata.annotations": {"ray.io/ft-enabled": "false"}},
        operator=True,
    ),
    Case(
        rule="gcs-fault-tolerance",
        at=f"{RAY}.env[0]",
        given={"metadata.annotations": {"ray.io/ft-enabled": "true"}, f"{RAY}.env": env("RAY_REDIS_ADDRESS")},
        broken={"metadata.annotations": {}},
        operator=True,
    ),
    *(
        Case(
            rule="gcs-fault-tolerance", at=at, given=REDIS, broken={at.split("[")[0]: value}, operator=True
        )
        for at, value in [
            (f"{H}.rayStartParams.redis-password", "p"),
            (f"{RAY}.env[0]", env("REDIS_PASSWORD")),
            (f"{RAY}.env[0]", env("RAY_REDIS_ADDRESS")),
            (
                "metadata.annotations[ray.io/external-storage-namespace]",
                {"ray.io/external-storage-namespace": "a"},
            ),
        ]
    ),
    *(
        Case(rule="gcs-fault-tolerance", at=at, broken={at.split("[")[0]: value}, operator=True)
        for at, value in [
            (f"{H}.rayStartParams.redis-username", "u"),
            (f"{RAY}.env[0]", env("REDIS_USERNAME")),
        ]
    ),
    Case(
        rule="gcs-storage",
        at=f"{C}.gcsFaultToleranceOptions.storage",
        given=REDIS,
        broken={f"{C}.gcsFaultToleranceOptions": {"redisAddress": "a", "storage": {"size": "1Gi"}}},
        kuberay=("1.7",),
    ),
    *(
        Case(
            rule="gcs-storage",
            at=at,
            given=ROCKS,
            broken={at.split("[")[0]: value},
            kuberay=("1.7",),
            beside=OPEN_GATE,
        )
        for at, value in [
            (f"{C}.gcsFaultToleranceOptions.redisAddress", "redis:6379"),
            (f"{RAY}.env[0]", env("RAY_gcs_storage")),
            (f"{RAY}.volumeMounts[0]", [{"name": "gcs", "mountPath": "/data/gcs"}]),
            (f"{HEAD}.volumes[0]", [{"name": "gcs-storage", "emptyDir": {}}]),
        ]
    ),
    Case(
        rule="gcs-storage",
        at=f"{C}.gcsFaultToleranceOptions.storage.size",
        given=ROCKS,
        broken={f"{C}.gcsFaultToleranceOptions.storage": {"claimName": "a", "size": "1Gi"}},
        kuberay=("1.7",),
        beside=OPEN_GATE,
    ),
    Case(
        rule="autoscaler",
        at=f"{RAY}.env[0]",
        given={f"{RAY}.env": env("RAY_enable_autoscaler_v2", "0")},
        broken={f"{RAY}.env": env("RAY_enable_autoscaler_v2", "true")},
        operator=True,
    ),
    *(
        Case(
            rule="autoscaler",
            at=at,
            given=AUTOSCALED,
            broken={at.removesuffix("[0]"): value},
            operator=True,
        )
        for at, value in [
            (f"{W}.suspend", True),
            (f"{RAY}.env[0]", env("RAY_enable_autoscaler_v2")),
            (f"{HEAD}.restartPolicy", "Always"),
            (f"{WORKER}.restartPolicy", "OnFailure"),
        ]
    ),
    Case(
        rule="autoscaler-command",
        at=f"{C}.autoscalerOptions.env[0]",
        given=AUTOSCALED,
        broken={f"{C}.autoscalerOptions.env": env("KUBERAY_GEN_AUTOSCALER_START_CMD")},
        kuberay=("1.7",),
    ),
    *(
        Case(
            rule="token", at=f"{C}.rayVersion", broken={f"{C}.rayVersion": version}, operator=True,
            beside=("probes",),
        )
        for version in (ABSENT, "2.51.2", "nightly")
    ),
    Case(
        rule="upgrade-strategy",
        at=f"{C}.upgradeStrategy.type",
        broken={f"{C}.upgradeStrategy": {"type": "Recreate"}},
        operator=True,
    ),
    *(
        Case(
            rule="network-policy",
            at=at,
            given={f"{C}.networkPolicy": DNS},
            broken=broken,
            kuberay=("1.7",),
            beside=("feature-gate", "group-name"),
        )
        for at, broken in [
            (f"{W}.groupName", {f"{W}.groupName": "GPU"}),
            (
                f"{C}.networkPolicy.head.ingressRules",
                {f"{C}.networkPolicy": DNS | {"mode": "DenyAllEgress", "head": {"ingressRules": [{}]}}},
            ),
            (
                f"{C}.networkPolicy.worker.egressRules",
                {f"{C}.networkPolicy": DNS | {"mode": "DenyAllIngress"}},
            ),
            (f"{C}.networkPolicy.worker.egressRules", {f"{C}.networkPolicy": {"mode": "DenyAll"}}),
            (
                f"{C}.networkPolicy.workerGroups[0].groupName",
                {f"{C}.networkPolicy": DNS | {"workerGroups": [{"groupName": "other"}]}},
            ),
        ]
    ),
    *(
        Case(
            rule="tls",
            at=at,
            given={f"{C}.tlsOptions": {"enabled": True}},
            broken={at.split("[")[0]: value},
            kuberay=("1.7",),
            beside=OPEN_GATE,
        )
        for at, value in [
            (f"{RAY}.env[0]", env("RAY_USE_TLS")),
            (f"{WORKER}.containers.0.env[0]", env("RAY_TLS_CA_CERT")),
            (f"{RAY}.volumeMounts[0]", [{"name": "ray-tls", "mountPath": "/a"}]),
            (f"{RAY}.volumeMounts[0]", [{"name": "certs", "mountPath": "/etc/ray/tls"}]),
        ]
    ),
]  # fmt: skip

PRACTICE = [
    Case(
        rule="submission-mode", at="spec.submissionMode", broken={"spec.submissionMode": "HttpMode"}
    ),
    Case(
        rule="dashboard-port",
        at=f"{RAY}.ports",
        given={f"{RAY}.ports": [{"name": "dashboard", "containerPort": 8265}]},
        broken={f"{RAY}.ports": [{"name": "gcs", "containerPort": 6379}]},
    ),
    Case(
        rule="ray-version",
        at=f"{C}.rayVersion",
        given={f"{RAY}.image": "docker.io/rayproject/ray:2.60.0-py311"},
        broken={f"{RAY}.image": "docker.io/rayproject/ray:2.55.0-py311"},
    ),
    Case(
        rule="probes",
        at=f"{C}.rayVersion",
        given={f"{C}.authOptions": ABSENT, f"{C}.rayVersion": "2.53.0"},
        broken={f"{C}.rayVersion": "2.52.1"},
    ),
    *(
        Case(
            rule="submitter",
            at=f"spec.submitterPodTemplate.spec.{key}",
            given={
                "spec.submissionMode": "K8sJobMode",
                "spec.submitterPodTemplate": {
                    "spec": {
                        "restartPolicy": "Never",
                        "containers": [{"name": "a", "image": "busybox:1"}],
                    }
                },
            },
            broken={f"spec.submitterPodTemplate.spec.{key}": value},
        )
        for key, value in [
            ("restartPolicy", "Always"),
            ("restartPolicy", ABSENT),
            ("containers", []),
        ]
    ),
    Case(
        rule="entrypoint",
        at="spec.entrypoint",
        given={"spec.submissionMode": "K8sJobMode"},
        broken={"spec.entrypoint": "cd /app && python train.py"},
    ),
    *(
        Case(rule="image-tag", at=f"{RAY}.image", broken={f"{RAY}.image": image})
        for image in ("registry:5000/team/ray", "rayproject/ray:latest")
    ),
    Case(
        rule="memory-limit",
        at=f"{RAY}.resources.limits.memory",
        broken={f"{RAY}.resources.limits": {"cpu": "1"}},
    ),
    *(
        Case(
            rule="group-name",
            at=f"{C}.workerGroupSpecs[1].groupName",
            given={
                f"{C}.workerGroupSpecs.1": ("copy", W),
                f"{C}.workerGroupSpecs.1.groupName": "other",
            },
            broken=broken,
        )
        for broken in [
            {f"{C}.workerGroupSpecs.1.groupName": "gpu"},
            {f"{C}.workerGroupSpecs.1.groupName": "Other"},
            {"metadata.name": "a" * 45},
        ]
    ),
    *(
        Case(rule="replicas-range", at=f"{W}.replicas", broken={f"{W}.replicas": number})
        for number in (1, 3)
    ),
    *(
        Case(rule="feature-gate", at=f"{C}.{at}", broken={f"{C}.{at}": value}, kuberay=("1.7",))
        for at, value in [("networkPolicy", DNS), ("tlsOptions", {}), ("historyServerOptions", {})]
    ),
    Case(
        rule="start-parameter",
        at=f"{W}.rayStartParams.include-log-monitor",
        broken={f"{W}.rayStartParams": {"include-log-monitor": "false"}},
        kuberay=("1.6",),
    ),
]

KUEUE = {
    "metadata.labels": QUEUE,
    "spec.shutdownAfterJobFinishes": True,
    "spec.deletionStrategy": ABSENT,
}
QUEUEING = [
    Case(
        rule="kueue",
        at="spec.shutdownAfterJobFinishes",
        broken={"metadata.labels": QUEUE},
    ),
    Case(rule="kueue", at="spec.clusterSelector", given=KUEUE, broken=SELECTED),
    Case(
        rule="kueue",
        at=f"{C}.enableInTreeAutoscaling",
        given=KUEUE | AUTOSCALED | {"metadata.annotations": {"kueue.x-k8s.io/elastic-job": "true"}},
        broken={"metadata.annotations": {}},
    ),
    Case(
        rule="kueue",
        at=f"{C}.workerGroupSpecs",
        given=KUEUE | {f"{C}.workerGroupSpecs": ("groups", 17)},
        broken={f"{C}.workerGroupSpecs": ("groups", 18)},
        beside=("kueue-version",),
    ),
    Case(
        rule="kueue-version",
        at=f"{C}.workerGroupSpecs",
        given=KUEUE | {f"{C}.workerGroupSpecs": ("groups", 7)},
        broken={f"{C}.workerGroupSpecs": ("groups", 8)},
    ),
    Case(rule="kueue", at=f"{W}.groupName", given=KUEUE, broken={f"{W}.groupName": "head"}),
    Case(
        rule="volcano",
        at="spec.clusterSelector",
        given={"metadata.labels": {"volcano.sh/queue-name": "a"}, "spec.deletionStrategy": ABSENT},
        broken=SELECTED,
    ),
    Case(
        rule="volcano",
        at="metadata.labels[volcano.sh/network-topology-highest-tier-allowed]",
        given={"metadata.labels": {"volcano.sh/network-topology-highest-tier-allowed": "2"}},
        broken={"metadata.labels": {"volcano.sh/network-topology-highest-tier-allowed": "two"}},
    ),
    Case(
        rule="gang",
        at="metadata.labels[ray.io/gang-scheduling-enabled]",
        broken={"metadata.labels": {"ray.io/gang-scheduling-enabled": "true"}},
    ),
    Case(
        rule="gang",
        at=f"{W}.minReplicas",
        given={
            "metadata.labels": {
                "ray.io/gang-scheduling-enabled": "true",
                "yunikorn.apache.org/app-id": "digits",
            }
        },
        broken={f"{W}.minReplicas": 0},
    ),
    Case(
        rule="kai",
        at="spec.submissionMode",
        given={"metadata.labels": {"kai.scheduler/queue": "a"}},
        broken={"spec.submissionMode": "K8sJobMode"},
    ),
]

SECURITY = f"{HEAD}.securityContext"
OWN = f"{RAY}.securityContext"
CONFINED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
APPARMOR = "container.apparmor.security.beta.kubernetes.io/ray-head"
POD_SECURITY = [
    *(
        Case(rule="pod-security-baseline", at=at, broken=broken)
        for at, broken in [
            (f"{HEAD}.hostNetwork", {f"{HEAD}.hostNetwork": True}),
            (f"{HEAD}.hostPID", {f"{HEAD}.hostPID": True}),
            (f"{HEAD}.hostIPC", {f"{HEAD}.hostIPC": True}),
            (
                f"{HEAD}.volumes.0.hostPath",
                {f"{HEAD}.volumes": [{"name": "disk", "hostPath": {"path": "/mnt"}}]},
            ),
            (f"{SECURITY}.sysctls.0.name", {f"{SECURITY}.sysctls": [{"name": "kernel.msgmax"}]}),
            (
                f"{SECURITY}.windowsOptions.hostProcess",
                {f"{SECURITY}.windowsOptions": {"hostProcess": True}},
            ),
            (f"{OWN}.seLinuxOptions.type", {f"{OWN}.seLinuxOptions": {"type": "spc_t"}}),
            (f"{OWN}.seLinuxOptions.user", {f"{OWN}.seLinuxOptions": {"user": "root"}}),
            (f"{OWN}.appArmorProfile.type", {f"{OWN}.appArmorProfile": {"type": "Unconfined"}}),
            (f"{OWN}.seccompProfile.type", {f"{OWN}.seccompProfile": {"type": "Unconfined"}}),
            (
                f"{H}.template.metadata.annotations[{APPARMOR}]",
                {f"{H}.template.metadata": {"annotations": {APPARMOR: "unconfined"}}},
            ),
            (f"{OWN}.privileged", {f"{OWN}.privileged": True}),
            (f"{OWN}.capabilities.add.0", {f"{OWN}.capabilities.add": ["SYS_PTRACE"]}),
            (f"{OWN}.procMount", {f"{OWN}.procMount": "Unmasked"}),
            (
                f"{RAY}.ports.0.hostPort",
                {f"{RAY}.ports": [{"name": "dashboard", "containerPort": 8265, "hostPort": 8265}]},
            ),
            (
                f"{RAY}.lifecycle.preStop.httpGet.host",
                {f"{RAY}.lifecycle": {"preStop": {"httpGet": {"host": "a", "port": 1}}}},
            ),
        ]
    ),
    *(
        Case(rule="pod-security-restricted", at=at, broken=broken)
        for at, broken in [
            (
                f"{HEAD}.volumes.0.nfs",
                {f"{HEAD}.volumes": [{"name": "nfs", "nfs": {"server": "a", "path": "/"}}]},
            ),
            (f"{OWN}.allowPrivilegeEscalation", {f"{OWN}.allowPrivilegeEscalation": ABSENT}),
            (f"{OWN}.capabilities.drop", {f"{OWN}.capabilities.drop": ["KILL"]}),
            (f"{OWN}.capabilities.add.0", {f"{OWN}.capabilities.add": ["CHOWN"]}),
            (f"{SECURITY}.runAsUser", {f"{SECURITY}.runAsUser": 0}),
            (f"{OWN}.runAsUser", {f"{OWN}.runAsUser": 0}),
            (f"{SECURITY}.runAsNonRoot", {f"{SECURITY}.runAsNonRoot": ABSENT}),
            (f"{OWN}.runAsNonRoot", {f"{OWN}.runAsNonRoot": False}),
            (f"{SECURITY}.seccompProfile", {f"{SECURITY}.seccompProfile": ABSENT}),
        ]
    ),
    Case(
        rule="pod-security-restricted",
        at=f"{C}.autoscalerOptions.securityContext.capabilities.drop",
        given=AUTOSCALED
        | {f"{C}.autoscalerOptions": {"version": "v2", "securityContext": CONFINED}},
        broken={f"{C}.autoscalerOptions.securityContext": {"allowPrivilegeEscalation": False}},
    ),
    Case(
        rule="pod-security-restricted",
        at="spec.submitterPodTemplate.spec.securityContext.runAsNonRoot",
        broken={
            "spec.submitterPodTemplate": {
                "spec": {
                    "restartPolicy": "Never",
                    "containers": [{"name": "submit", "image": "a:1"}],
                }
            }
        },
    ),
]

CASES = [
    *SCHEMA,
    *POD,
    *POD_SECURITY,
    *API_SERVER,
    *RAYJOB,
    *DELETIONS,
    *RAYCLUSTER,
    *PRACTICE,
    *QUEUEING,
]
