"""A GPU whose memory is too small for the run: the error names the numbers and the remedies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training import small_config, train_here

from trainyard_trainer.engine import out_of_memory
from trainyard_trainer.engine.out_of_memory import explain, largest_divisor
from trainyard_trainer.errors import OutOfMemory
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.recipes.image_classification import recipe

CPU = torch.device("cpu")
TORCH_ERROR = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB"
)


class TooLarge(nn.Module):
    """A network whose forward pass fails as one that does not fit into a GPU's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        raise TORCH_ERROR


def test_a_run_that_exceeds_the_memory_ends_with_the_numbers_and_the_remedies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe.models, "build_model", lambda model: TooLarge())
    with pytest.raises(OutOfMemory) as raised:
        train_here(small_config(tmp_path))
    first, *rest = str(raised.value).splitlines()
    assert first.startswith("CUDA out of memory: ")
    assert "Worker 0 computes 128 of its 128 samples per step at once" in first
    assert "train.precision = auto and train.strategy = ddp" in first
    assert rest[0].endswith(f"PyTorch reports: {TORCH_ERROR}")
    assert "train.micro_batch_size: 64" in rest[2]
    assert raised.value.__cause__ is TORCH_ERROR


def test_a_model_that_exceeds_the_memory_by_itself_is_explained_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(model: Any) -> nn.Module:
        raise TORCH_ERROR

    monkeypatch.setattr(recipe.models, "build_model", build)
    with pytest.raises(OutOfMemory, match="CUDA out of memory"):
        train_here(small_config(tmp_path))


def test_the_numbers_are_those_of_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, gib = torch.cuda, 2**30
    monkeypatch.setattr(gpu, "mem_get_info", lambda device: (1 * gib, 80 * gib))
    monkeypatch.setattr(gpu, "memory_reserved", lambda device: 76 * gib)
    monkeypatch.setattr(gpu, "max_memory_allocated", lambda device: 75.5 * gib)
    monkeypatch.setattr(gpu, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert out_of_memory.memory_use(torch.device("cuda", 1)) == (
        "this worker used up to 75.5 GiB of the 80.0 GiB of GPU 1 (NVIDIA H100 80GB HBM3); "
        "CUDA itself and other processes hold 3.0 GiB"
    )


@pytest.mark.parametrize(
    ("changes", "world_size", "said", "unsaid"),
    [
        ({}, 1, ["micro_batch_size: 64", "cpu_offload: true"], ["bf16"]),
        ({"train__precision": "fp32"}, 1, ["train.precision: bf16"], []),
        ({"train__micro_batch_size": 1}, 1, [], ["micro_batch_size"]),
        ({"train__micro_batch_size": 64}, 2, ["micro_batch_size: 32", "among the 2 workers"], []),
        # 36 samples, 12 at once: 6 divides 36, 5 does not.
        (
            {"train__global_batch_size": 36, "train__micro_batch_size": 12},
            1,
            ["micro_batch_size: 6"],
            [],
        ),
        ({"train__strategy": "fsdp2"}, 2, ["train.fsdp2.cpu_offload: true"], ["strategy: fsdp2,"]),
        (
            {"train__strategy": "fsdp2", "train__fsdp2": {"cpu_offload": True}},
            2,
            ["a GPU with more memory"],
            ["cpu_offload"],
        ),
        ({"train__strategy": "deepspeed"}, 2, ["offload: all"], []),
        (
            {"train__strategy": "deepspeed", "train__deepspeed": {"offload": "all"}},
            2,
            ["a GPU with more memory"],
            ["train.deepspeed"],
        ),
    ],
)
def test_remedies_are_those_that_the_run_has_not_used_yet(
    tmp_path: Path, changes: dict[str, Any], world_size: int, said: list[str], unsaid: list[str]
) -> None:
    config = small_config(tmp_path, scaling__num_workers=world_size, **changes)
    text = explain(config, Worker(world_size=world_size, device=CPU), TORCH_ERROR)
    remedies = text.partition("Use one or more of:")[2]
    assert all(each in remedies for each in said)
    assert not any(each in remedies for each in unsaid)


@pytest.mark.parametrize(("number", "limit", "found"), [(128, 64, 64), (36, 5, 4), (7, 3, 1)])
def test_a_smaller_part_divides_the_whole(number: int, limit: int, found: int) -> None:
    assert largest_divisor(number, limit) == found
