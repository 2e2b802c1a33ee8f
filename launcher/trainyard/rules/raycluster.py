"""Rules of the operator for a RayCluster, also within a RayJob: groups, autoscaler, tokens, Redis."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainyard.rules.field_path import FieldPath, Violation
from trainyard.rules.subject import AUTOSCALER_V2, Subject

START_RESOURCES = ("num-cpus", "num-gpus", "memory", "resources")
LABEL_NAME = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
LABEL_PREFIX = r"(?=.{1,253}/)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/"


def has_containers(subject: Subject) -> Iterator[Violation]:
    for group in subject.groups:
        if group.place.at("template").is_set and not group.containers:
            yield group.pod.at("containers").breaks(
                "container",
                f"{group.name} must have a container",
                "Add one: the first container runs Ray.",
            )


def says_resources_once(subject: Subject) -> Iterator[Violation]:
    for group in subject.groups:
        if not group.place.at("resources").value:
            continue
        for key in START_RESOURCES:
            param = group.place.at("rayStartParams", key)
            if param.text:
                yield param.breaks(
                    "group-resources",
                    f"cannot be combined with resources of {group.name}",
                    "Set Ray's logical resources in one of the two places.",
                )


def has_labels_in_their_place(subject: Subject) -> Iterator[Violation]:
    for group in subject.groups:
        param = group.place.at("rayStartParams", "labels")
        if param.is_set:
            yield param.breaks(
                "group-labels", "is not supported", f"Use the field `labels` of {group.name}."
            )
        for key, value in group.place.at("labels").entries():
            if not re.fullmatch(f"({LABEL_PREFIX})?{LABEL_NAME}", key) or not re.fullmatch(
                f"({LABEL_NAME})?", value.text
            ):
                yield value.breaks(
                    "group-labels", "is not a valid label", "Use letters, digits, `-`, `_` and `.`."
                )


def has_a_range_of_replicas(subject: Subject) -> Iterator[Violation]:
    """Compare minReplicas and maxReplicas. Their defaults in the CRD are 0 and the largest 32-bit number."""
    for group in subject.workers:
        least, most = group.place.at("minReplicas"), group.place.at("maxReplicas")
        for bound in (least, most):
            if bound.number is not None and bound.number < 0:
                yield bound.breaks("replicas", "must be at least 0", "Use 0 or more.")
        if (least.number or 0) > (2**31 - 1 if most.number is None else most.number):
            yield least.breaks(
                "replicas", f"is above maxReplicas {most.number}", "Lower it, or raise maxReplicas."
            )


def idles_with_autoscaler_v2(subject: Subject) -> Iterator[Violation]:
    whole = subject.cluster.at("autoscalerOptions", "idleTimeoutSeconds")
    if whole.number is not None and whole.number < 0:
        yield whole.breaks("idle-timeout", "must be at least 0", "Use 0 or more.")
    for group in subject.workers:
        own = group.place.at("idleTimeoutSeconds")
        if own.number is None:
            continue
        if own.number < 0:
            yield own.breaks("idle-timeout", "must be at least 0", "Use 0 or more.")
        elif not subject.has_autoscaler_v2:
            yield own.breaks(
                "idle-timeout",
                "needs autoscalerOptions.version: v2",
                "Set that, or remove this field.",
            )


def ranks_groups_with_autoscaler_v2(subject: Subject) -> Iterator[Violation]:
    """Require Ray 2.56 for the priority of worker groups, which KubeRay has since 1.7."""
    ray = subject.cluster.at("rayVersion").version
    for group in subject.workers:
        own = group.place.at("priority")
        if subject.kuberay == "1.6" or not own.number:
            continue
        if ray is None or ray < (2, 56):
            yield own.breaks(
                "group-priority",
                "needs rayVersion 2.56.0 or newer",
                "Remove it, or use a newer Ray.",
            )
        if not subject.has_autoscaler_v2:
            yield own.breaks(
                "group-priority",
                "needs autoscalerOptions.version: v2",
                "Set that, or remove this field.",
            )


def keeps_redis_in_its_options(subject: Subject) -> Iterator[Violation]:
    annotations, head = subject.metadata.at("annotations"), subject.head
    options = subject.cluster.at("gcsFaultToleranceOptions")
    enabled = annotations.at("ray.io/ft-enabled")
    rule = "gcs-fault-tolerance"
    if enabled.text and options.is_set:
        yield enabled.breaks(
            rule, "cannot be combined with gcsFaultToleranceOptions", "Remove this annotation."
        )
    address = head.variable("RAY_REDIS_ADDRESS")
    if address is not None and not options.is_set and enabled.text.lower() != "true":
        yield address.breaks(
            rule,
            "needs GCS fault tolerance",
            "Use gcsFaultToleranceOptions.redisAddress.",
        )
    if options.is_set:
        own = [head.place.at("rayStartParams", "redis-password")]
        own += [annotations.at("ray.io/external-storage-namespace")]
        variables = [head.variable(name) for name in ("REDIS_PASSWORD", "RAY_REDIS_ADDRESS")]
        for place in [*(one for one in own if one.text), *(one for one in variables if one)]:
            yield place.breaks(
                rule,
                "cannot be combined with gcsFaultToleranceOptions",
                "Use its redisPassword, redisAddress and externalStorageNamespace.",
            )
    user = head.place.at("rayStartParams", "redis-username")
    named = head.variable("REDIS_USERNAME")
    for place in [*([user] if user.text else []), *([named] if named else [])]:
        yield place.breaks(
            rule, "cannot set the user of Redis", "Use gcsFaultToleranceOptions.redisUsername."
        )


def stores_gcs_in_one_way(subject: Subject) -> Iterator[Violation]:
    """Check where the GCS stores its state. Since KubeRay 1.7 that may be a volume instead of Redis."""
    options = subject.cluster.at("gcsFaultToleranceOptions")
    if subject.kuberay == "1.6" or not options.is_set:
        return
    rule, storage = "gcs-storage", options.at("storage")
    if options.at("backend").text != "rocksdb":
        if storage.is_set:
            yield storage.breaks(rule, "needs backend: rocksdb", "Remove it, or set the backend.")
        return
    keys = ("redisAddress", "redisUsername", "redisPassword", "externalStorageNamespace")
    for key in keys:
        if options.at(key).value:
            yield options.at(key).breaks(
                rule, "needs backend: redis", "Remove it, or set the backend."
            )
    for key in ("size", "storageClassName", "accessModes"):
        if storage.at("claimName").text and storage.at(key).value:
            yield storage.at(key).breaks(
                rule,
                "cannot be combined with claimName",
                "Remove it: it describes a claim that KubeRay creates.",
            )
    container = subject.head.container
    managed = [subject.head.variable("RAY_gcs_storage", "RAY_gcs_storage_path")]
    for mount in container.at("volumeMounts").items():
        is_managed = mount.at("name").text == "gcs-storage"
        managed.append(mount if is_managed or mount.at("mountPath").text == "/data/gcs" else None)
    for volume in subject.head.pod.at("volumes").items():
        managed.append(volume if volume.at("name").text == "gcs-storage" else None)
    for place in filter(None, managed):
        yield place.breaks(rule, "is set by KubeRay for backend rocksdb", "Remove it.")


def has_one_autoscaler(subject: Subject) -> Iterator[Violation]:
    asked = subject.head.variable(AUTOSCALER_V2)
    if not subject.autoscales:
        if asked is not None and asked.at("value").text in ("1", "true"):
            yield asked.breaks(
                "autoscaler",
                "needs enableInTreeAutoscaling: true",
                "Set that, or remove this variable.",
            )
        return
    for group in subject.workers:
        if group.place.at("suspend").is_true:
            yield group.place.at("suspend").breaks(
                "autoscaler", "cannot be combined with enableInTreeAutoscaling", "Remove it."
            )
    if asked is not None and subject.cluster.at("autoscalerOptions", "version").is_set:
        yield asked.breaks(
            "autoscaler",
            "cannot be combined with autoscalerOptions.version",
            "Remove this variable.",
        )
    for group in subject.groups:
        policy = group.pod.at("restartPolicy")
        if subject.names_autoscaler_v2 and policy.text not in ("", "Never"):
            yield policy.breaks(
                "autoscaler", "must be Never or unset for autoscaler version v2", "Remove it."
            )


def leaves_the_autoscaler_its_command(subject: Subject) -> Iterator[Violation]:
    """Refuse the variable that KubeRay 1.7 sets itself for the autoscaler's command."""
    name = "KUBERAY_GEN_AUTOSCALER_START_CMD"
    for one in subject.cluster.at("autoscalerOptions", "env").items():
        if subject.kuberay == "1.7" and one.at("name").text == name:
            yield one.breaks("autoscaler-command", "is set by KubeRay itself", "Remove it.")


def has_a_ray_that_knows_tokens(subject: Subject) -> Iterator[Violation]:
    if subject.cluster.at("authOptions", "mode").text != "token":
        return
    ray = subject.cluster.at("rayVersion")
    if ray.version is None or ray.version < (2, 52):
        yield ray.breaks(
            "token",
            "authOptions.mode: token needs rayVersion 2.52.0 or newer",
            "Set the Ray version of the image.",
        )


def is_not_upgraded_in_a_job(subject: Subject) -> Iterator[Violation]:
    """Refuse an upgrade strategy in a RayJob. It would stay Initializing, with an event only of its
    RayCluster."""
    strategy = subject.cluster.at("upgradeStrategy", "type")
    if subject.is_job and strategy.is_set:
        yield strategy.breaks("upgrade-strategy", "is not supported in a RayJob", "Remove it.")


def allows_traffic_that_is_denied(subject: Subject) -> Iterator[Violation]:
    """Check `networkPolicy`, which KubeRay has since 1.7. It refuses rules for a direction that the mode
    leaves open."""
    policy = subject.cluster.at("networkPolicy")
    if subject.kuberay == "1.6" or not policy.is_set:
        return
    mode = policy.at("mode").text or "DenyAll"
    names = [group.place.at("groupName") for group in subject.workers]
    for name in names:
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name.text):
            yield name.breaks(
                "network-policy",
                "becomes part of the name of a NetworkPolicy",
                "Use lower case letters, digits and dashes.",
            )
    sides = [policy.at("head"), policy.at("worker"), *policy.at("workerGroups").items()]
    for side in sides:
        for open_mode, key in (
            ("DenyAllEgress", "ingressRules"),
            ("DenyAllIngress", "egressRules"),
        ):
            if mode == open_mode and side.at(key).value:
                yield side.at(key).breaks(
                    "network-policy",
                    f"has no effect: mode {mode} leaves this direction open",
                    "Remove it.",
                )
    workers = [policy.at("worker"), *policy.at("workerGroups").items()]
    if mode != "DenyAllIngress" and not any(_lets_dns_out(side) for side in workers):
        yield policy.at("worker", "egressRules").breaks(
            "network-policy",
            f"mode {mode} blocks DNS, which the workers need to find the head",
            "Allow port 53.",
        )
    for side in policy.at("workerGroups").items():
        if side.at("groupName").text not in {name.text for name in names}:
            yield side.at("groupName").breaks(
                "network-policy", "is not a worker group", "Use a groupName of workerGroupSpecs."
            )


def _lets_dns_out(side: FieldPath) -> bool:
    rules = list(side.at("egressRules").items())
    ports = [port.at("port").value for rule in rules for port in rule.at("ports").items()]
    return any(not rule.at("ports").value for rule in rules) or 53 in ports


def leaves_tls_to_kuberay(subject: Subject) -> Iterator[Violation]:
    """Refuse TLS settings that KubeRay sets itself since 1.7."""
    if subject.kuberay == "1.6" or not subject.cluster.at("tlsOptions", "enabled").is_true:
        return
    options = subject.cluster.at("autoscalerOptions")
    lists = [
        (group.container.at("env"), group.container.at("volumeMounts")) for group in subject.groups
    ]
    lists.append((options.at("env"), options.at("volumeMounts")))
    for env, mounts in lists:
        for one in env.items():
            name = one.at("name").text
            if name == "RAY_USE_TLS" or name.startswith("RAY_TLS_"):
                yield one.breaks("tls", "is set by KubeRay for tlsOptions", "Remove it.")
        for mount in mounts.items():
            if mount.at("name").text == "ray-tls" or mount.at("mountPath").text == "/etc/ray/tls":
                yield mount.breaks("tls", "is set by KubeRay for tlsOptions", "Remove it.")


RULES = (
    has_containers,
    says_resources_once,
    has_labels_in_their_place,
    has_a_range_of_replicas,
    idles_with_autoscaler_v2,
    ranks_groups_with_autoscaler_v2,
    keeps_redis_in_its_options,
    stores_gcs_in_one_way,
    has_one_autoscaler,
    leaves_the_autoscaler_its_command,
    has_a_ray_that_knows_tokens,
    is_not_upgraded_in_a_job,
    allows_traffic_that_is_denied,
    leaves_tls_to_kuberay,
)
