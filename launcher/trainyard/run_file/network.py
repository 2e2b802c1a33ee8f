"""The `network` section: how the workers of a run communicate.

A preset becomes environment variables and devices of the worker pods. The run file and the pool
each have such a section; `merge_networks` combines them field by field.

No preset needs a privilege that Pod Security `restricted` refuses. The locked memory that RDMA
needs is a limit of the nodes' container runtime, and host networking is not used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import PositiveInt, StringConstraints, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import assert_never

from trainyard.errors import ConfigError
from trainyard_trainer.config.section import Section

NetworkPreset = Literal["tcp", "infiniband", "roce", "efa"]
NetworkInterface = Annotated[str, StringConstraints(pattern=r"^\^?=?[A-Za-z0-9][A-Za-z0-9.,_-]*$")]
DeviceResource = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9][A-Za-z0-9._-]*$")
]

EFA_RESOURCE = "vpc.amazonaws.com/efa"
"""The resource name under which the AWS device plugin offers EFA devices."""

EFA_HUGE_PAGES = {"hugepages-2Mi": "5120Mi"}
"""Huge pages that the EFA driver maps in each pod. Nodes with EFA must keep that many pages
available."""

RDMA_PRESETS = ("infiniband", "roce")
"""Presets whose devices have a resource name that the cluster's administrator chooses."""


class Network(Section):
    """How the workers of a run on several nodes communicate. Each key that is left out is taken
    from the `network` of the run's pool. `network: {debug: true}` alone is valid."""

    preset: NetworkPreset | None = None
    """`tcp`, or RDMA: `infiniband`, `roce` (RDMA over Ethernet) or `efa` (AWS). The default is the
    pool's preset; if the pool has none either, NCCL and gloo choose. A preset that differs from the
    pool's keeps the pool's `interface` and `debug`. It keeps the pool's `resource` and
    `devices_per_node` only between `infiniband` and `roce`. RDMA needs unlimited locked memory in
    the nodes' container runtime."""

    interface: NetworkInterface | None = None
    """The network interface that connects the nodes, such as `eth0`, or a list of interfaces to
    exclude, such as `^lo,docker0`. The default is the pool's; if the pool has none either, NCCL and
    gloo choose."""

    resource: DeviceResource | None = None
    """The resource name under which nodes offer their RDMA devices, such as
    `rdma/hca_shared_devices_a`. The presets `infiniband` and `roce` need it. The default is the
    pool's; `efa` uses `vpc.amazonaws.com/efa`, and `tcp` uses no devices."""

    devices_per_node: PositiveInt | None = None
    """How many devices a worker pod requests. With EFA, request all devices of the node. The
    default is the pool's number, else 1."""

    debug: bool | None = None
    """Whether NCCL logs the interfaces and devices that it finds and uses. The default is the
    pool's, else false."""

    @model_validator(mode="after")
    def _tcp_uses_no_devices(self) -> Network:
        if self.preset == "tcp" and self.requests_devices:
            raise PydanticCustomError(
                "one_of",
                "the preset tcp uses no devices. Remove resource and devices_per_node, "
                "or use infiniband, roce or efa",
            )
        return self

    @property
    def requests_devices(self) -> bool:
        """Whether the section sets a key of devices: `resource` or `devices_per_node`."""
        return self.resource is not None or self.devices_per_node is not None

    @property
    def device_resource(self) -> str | None:
        """The resource name of the devices that worker pods request; None if the preset uses no
        devices."""
        match self.preset:
            case None | "tcp":
                return None
            case "efa":
                return self.resource or EFA_RESOURCE
            case "infiniband" | "roce":
                return self.resource
            case _:
                assert_never(self.preset)


def merge_networks(run: Network | None, pool: Network | None) -> Network | None:
    """Combine the `network` of a run file with that of its pool; None if neither exists.

    Each field that the run sets replaces the pool's field. A run's preset that differs from the
    pool's also discards the pool's devices, except between `infiniband` and `roce`, which request
    them by the same resource name. Raises ConfigError if the result requests devices without a
    preset that uses them, or lacks the name of the devices that its preset needs.
    """
    if run is None and pool is None:
        return None
    fields = {} if pool is None else pool.model_dump(exclude_none=True)
    changes = {} if run is None else run.model_dump(exclude_none=True)
    presets = (fields.get("preset"), changes.get("preset", fields.get("preset")))
    if presets[0] != presets[1] and not all(preset in RDMA_PRESETS for preset in presets):
        fields.pop("resource", None)
        fields.pop("devices_per_node", None)
    # Not validated here: both sections have been, and errors of their combination name keys of the run file.
    merged = Network.model_construct(**(fields | changes))
    if merged.preset in RDMA_PRESETS and merged.resource is None:
        raise ConfigError(
            f"network.preset = {merged.preset} needs network.resource: the resource name under which nodes "
            "offer their devices",
            "Set network.resource, for example to rdma/hca_shared_devices_a, or use the pool's preset.",
        )
    if merged.preset in (None, "tcp") and merged.requests_devices:
        raise ConfigError(
            "network.resource or network.devices_per_node is set, but network.preset is "
            f"{merged.preset or 'not set'}",
            "Remove them, or set network.preset to infiniband, roce or efa.",
        )
    return merged


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkRequirements:
    """What a network adds to the container of each worker."""

    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables by name."""
    resources: dict[str, str] = field(default_factory=dict)
    """Quantities of devices and huge pages by resource name; requests and limits are equal."""


def network_requirements(network: Network | None, nodes: int) -> NetworkRequirements:
    """Compute the environment variables and devices of a network for a run on this number of nodes.

    A run on a single node requests no devices, because no traffic leaves the node.
    """
    if network is None:
        return NetworkRequirements()
    environment = {"NCCL_DEBUG": "INFO" if network.debug else "WARN"}
    if network.debug:
        environment["NCCL_DEBUG_SUBSYS"] = "INIT,NET"
    if network.interface is not None:
        environment["NCCL_SOCKET_IFNAME"] = network.interface
        # gloo supports neither prefixes nor exclusions, only names.
        if not network.interface.startswith(("^", "=")):
            environment["GLOO_SOCKET_IFNAME"] = network.interface
    if network.preset == "tcp":
        environment["NCCL_IB_DISABLE"] = "1"
    if network.device_resource is None or nodes == 1:
        return NetworkRequirements(environment=environment)
    resources = {network.device_resource: f"{network.devices_per_node or 1}"}
    if network.preset == "efa":
        environment |= {
            "FI_PROVIDER": "efa",
            "FI_EFA_USE_DEVICE_RDMA": "1",
            "FI_EFA_FORK_SAFE": "1",
        }
        resources |= EFA_HUGE_PAGES
    else:
        # With an explicit transport NCCL fails if it is missing, instead of continuing slowly over TCP.
        environment["NCCL_NET"] = "IB"
    if network.preset == "roce":
        environment["NCCL_IB_ROCE_VERSION_NUM"] = "2"
    return NetworkRequirements(environment=environment, resources=resources)
