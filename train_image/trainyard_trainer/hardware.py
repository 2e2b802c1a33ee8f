"""The hardware of this process: its CPUs, its GPU, and the version of the NVIDIA driver of its machine."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DRIVER_FILE = Path("/proc/driver/nvidia/version")
"""The kernel module writes its version there."""

DRIVER_VERSION = re.compile(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", re.MULTILINE)


CPU_LIMITS = ("cpu.max", "cpu/cpu.cfs_quota_us cpu/cpu.cfs_period_us")
"""The files in which a container finds its limit of CPU time, in microseconds, and the period for which it
holds: one file with version 2 of cgroups, two with version 1."""


PEAK_FLOPS = {
    "NVIDIA A10": 125e12,
    "NVIDIA A100": 312e12,
    "NVIDIA A40": 149.7e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
}
"""FLOPs per second in bf16 without sparsity, as NVIDIA's data sheets have them, by the first words of a GPU's
name; the longest that fits counts."""


def usable_cpus(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many CPUs this process can use at once, by its affinity and by the limit of its container.

    https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu-interface-files
    """
    cpus = len(os.sched_getaffinity(0))
    for names in CPU_LIMITS:
        files = [cgroup / name for name in names.split()]
        if not all(file.is_file() for file in files):
            continue
        quota, period = " ".join(file.read_text() for file in files).split()
        if quota not in ("max", "-1"):
            return max(1, min(cpus, int(quota) // int(period)))
    return cpus


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


def peak_flops(device: torch.device) -> float | None:
    """Return a GPU's FLOPs per second in bf16; None if unknown, as of a CPU or a part of a GPU (MIG)."""
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    if " MIG " in name:
        return None
    known = [words for words in PEAK_FLOPS if _begins_with(name, words)]
    return PEAK_FLOPS[max(known, key=len)] if known else None


def _begins_with(name: str, words: str) -> bool:
    """`NVIDIA A100-SXM4-80GB` begins with `NVIDIA A100`, `NVIDIA A10G` not with `NVIDIA A10`."""
    return name == words or name.startswith((f"{words} ", f"{words}-"))
