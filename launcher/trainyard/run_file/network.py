"""How the workers of a run talk: a preset becomes variables and devices of the worker pods.

Nothing here needs a right that Pod Security `restricted` refuses: locked memory, which RDMA wants,
is a limit of the nodes' container runtime, and host networking is not used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import PositiveInt, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from trainyard_trainer.config.section import Section

Interface = Annotated[str, StringConstraints(pattern=r"^\^?=?[A-Za-z0-9][A-Za-z0-9.,_-]*$")]
Resource = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9][A-Za-z0-9._-]*$")
]

EFA_RESOURCE = "vpc.amazonaws.com/efa"
EFA_HUGE_PAGES = {"hugepages-2Mi": "5120Mi"}
"""What the EFA driver maps; nodes with EFA keep that many pages ready."""


class Network(Section):
    """How workers on several nodes talk to each other."""

    preset: Literal["tcp", "infiniband", "roce", "efa"]
    """`tcp`; or RDMA over InfiniBand or Ethernet (RoCE), or AWS's EFA, each with devices of its own. RDMA
    needs unlimited locked memory in the nodes' container runtime."""

    interface: Interface | None = None
    """The interface that connects the nodes, such as `eth0`, or what to leave out: `^lo,docker0`; without it
    NCCL and gloo choose."""

    resource: Resource | None = None
    """The resource that counts a node's devices, such as `rdma/hca_shared_devices_a`. EFA has its own:
    `vpc.amazonaws.com/efa`; `tcp` has none."""

    devices_per_node: PositiveInt = 1
    """Devices that a worker pod takes; on EFA as many as the node has."""

    debug: bool = False
    """Have NCCL tell what it finds and chooses."""

    @model_validator(mode="after")
    def _devices_fit_the_preset(self) -> Network:
        if self.preset == "tcp" and self.resource is not None:
            raise PydanticCustomError(
                "one_of",
                "the preset tcp takes no devices: leave out resource, or name an RDMA preset",
            )
        if self.preset in ("infiniband", "roce") and self.resource is None:
            raise PydanticCustomError(
                "one_of",
                f"the preset {self.preset} needs resource: the name under which nodes offer their "
                "devices, such as rdma/hca_shared_devices_a",
            )
        return self

    @property
    def device(self) -> str | None:
        """The resource that counts the devices."""
        return self.resource or (EFA_RESOURCE if self.preset == "efa" else None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fabric:
    """What a network adds to each worker's container."""

    environment: dict[str, str] = field(default_factory=dict)
    """Variables."""
    resources: dict[str, str] = field(default_factory=dict)
    """Devices, and what they need; requests and limits alike."""


def fabric_of(network: Network | None, nodes: int) -> Fabric:
    """A network's variables and devices; devices only where there is a second node to talk to."""
    if network is None:
        return Fabric()
    environment = {"NCCL_DEBUG": "INFO" if network.debug else "WARN"}
    if network.debug:
        environment["NCCL_DEBUG_SUBSYS"] = "INIT,NET"
    if network.interface is not None:
        environment["NCCL_SOCKET_IFNAME"] = network.interface
        # gloo knows neither prefixes nor exclusions: it takes names alone.
        if not network.interface.startswith(("^", "=")):
            environment["GLOO_SOCKET_IFNAME"] = network.interface
    if network.preset == "tcp":
        environment["NCCL_IB_DISABLE"] = "1"
        return Fabric(environment=environment)
    if nodes == 1:
        return Fabric(environment=environment)
    resources = {str(network.device): f"{network.devices_per_node}"}
    if network.preset == "efa":
        environment |= {
            "FI_PROVIDER": "efa",
            "FI_EFA_USE_DEVICE_RDMA": "1",
            "FI_EFA_FORK_SAFE": "1",
        }
        resources |= EFA_HUGE_PAGES
    else:
        # Named, so that NCCL ends with an error where it would else go on slowly over TCP.
        environment["NCCL_NET"] = "IB"
    if network.preset == "roce":
        environment["NCCL_IB_ROCE_VERSION_NUM"] = "2"
    return Fabric(environment=environment, resources=resources)
