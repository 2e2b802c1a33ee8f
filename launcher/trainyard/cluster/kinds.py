"""The kinds of Kubernetes objects that the launcher uses, and their paths in the API."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.errors import ClusterError


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object and its path in the API."""

    group_version: str
    plural: str
    is_namespaced: bool = True
    older_version: str = ""
    """An API version of the same fields, for clusters that do not serve `group_version` yet."""

    @property
    def group(self) -> str:
        """The API group; empty for the core group."""
        return self.group_version.rpartition("/")[0]

    def path(self, namespace: str, name: str = "") -> str:
        """Return the path of one object, or of all in a namespace; an empty namespace means all of them."""
        root = f"/apis/{self.group_version}" if self.group else f"/api/{self.group_version}"
        found = f"/namespaces/{namespace}" if self.is_namespaced and namespace else ""
        return f"{root}{found}/{self.plural}" + (f"/{name}" if name else "")


KINDS = {
    "ClusterQueue": Kind(
        "kueue.x-k8s.io/v1beta2",
        "clusterqueues",
        is_namespaced=False,
        older_version="kueue.x-k8s.io/v1beta1",
    ),
    "ConfigMap": Kind("v1", "configmaps"),
    "CustomResourceDefinition": Kind(
        "apiextensions.k8s.io/v1", "customresourcedefinitions", is_namespaced=False
    ),
    "DaemonSet": Kind("apps/v1", "daemonsets"),
    "Deployment": Kind("apps/v1", "deployments"),
    "Event": Kind("v1", "events"),
    "Lease": Kind("coordination.k8s.io/v1", "leases"),
    "LocalQueue": Kind(
        "kueue.x-k8s.io/v1beta2",
        "localqueues",
        older_version="kueue.x-k8s.io/v1beta1",
    ),
    "Namespace": Kind("v1", "namespaces", is_namespaced=False),
    "Node": Kind("v1", "nodes", is_namespaced=False),
    "PendingWorkloads": Kind("visibility.kueue.x-k8s.io/v1beta1", "localqueues"),
    "PersistentVolume": Kind("v1", "persistentvolumes", is_namespaced=False),
    "PersistentVolumeClaim": Kind("v1", "persistentvolumeclaims"),
    "Pod": Kind("v1", "pods"),
    "RayCluster": Kind("ray.io/v1", "rayclusters"),
    "RayJob": Kind("ray.io/v1", "rayjobs"),
    "ResourceQuota": Kind("v1", "resourcequotas"),
    "Secret": Kind("v1", "secrets"),
    "Service": Kind("v1", "services"),
    "StorageClass": Kind("storage.k8s.io/v1", "storageclasses", is_namespaced=False),
    "Workload": Kind(
        "kueue.x-k8s.io/v1beta2",
        "workloads",
        older_version="kueue.x-k8s.io/v1beta1",
    ),
}


def kind_of(kind: str) -> Kind:
    """Return a kind by its name. Raises ClusterError for a kind that is not in `KINDS`."""
    try:
        return KINDS[kind]
    except KeyError:
        raise ClusterError(
            f"the launcher knows no objects of kind {kind}",
            f"It knows: {', '.join(KINDS)}.",
            reason="NoSuchKind",
        ) from None
