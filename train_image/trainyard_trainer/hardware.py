"""The hardware of this process: its GPU, and the version of the NVIDIA driver of its machine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DRIVER_FILE = Path("/proc/driver/nvidia/version")
"""The kernel module writes its version there."""

DRIVER_VERSION = re.compile(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFacts:
    """The model and the id of a GPU."""

    model: str
    """The name of the model, such as `NVIDIA H100 80GB HBM3`."""

    id: str | None
    """The UUID as `nvidia-smi` prints it, such as `GPU-1a2b...`; None if it is not known."""


def gpu_facts(device: torch.device) -> GpuFacts | None:
    """Return the model and the UUID of the GPU that a process uses; None for a CPU."""
    if device.type != "cuda":
        return None
    import torch

    properties = torch.cuda.get_device_properties(device)
    return GpuFacts(model=properties.name, id=f"GPU-{properties.uuid}")


def driver_version(file: Path = DRIVER_FILE) -> str | None:
    """Return the version of this machine's NVIDIA driver; None without one."""
    try:
        found = DRIVER_VERSION.search(file.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return found[1] if found else None
