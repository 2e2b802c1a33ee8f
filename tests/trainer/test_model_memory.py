"""The estimated memory of a worker: against the measured peak of a step, and how it follows from settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.measured_memory import LLAMA_8B, measured_peak
from tests.trainer.training import gloo_worker, run_processes
from trainyard_trainer.config.memory.model_memory import (
    BUCKET_PARAMETERS,
    WorkerMemory,
    trained_parameters,
    worker_memory,
)
from trainyard_trainer.config.memory.model_shape import UnknownShape, model_shape
from trainyard_trainer.config.training.train import CausalLm
from trainyard_trainer.parallel import zero
from trainyard_trainer.parallel.worker import Worker

TOLERANCE = 0.15
SLOW = pytest.mark.slow
GUIDE = Path(__file__).parents[2] / "docs/guides/lora-and-memory.md"

SIZES: dict[str, Any] = {
    "vocab_size": 8000,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
LLAMA: dict[str, Any] = {"model_type": "llama", **SIZES}
SMALL = {**LLAMA, "vocab_size": 2000, "hidden_size": 256, "intermediate_size": 688}
"""The config of a model that takes seconds also where a processor computes bf16 by software."""
HALF = {**LLAMA, "dtype": "bfloat16"}
TIED = {**LLAMA, "vocab_size": 64000, "num_hidden_layers": 4, "tie_word_embeddings": True}
QWEN3 = {"model_type": "qwen3", **SIZES, "head_dim": 64}
GPT2 = {"model_type": "gpt2", "vocab_size": 8000, "n_embd": 512, "n_layer": 8, "n_head": 8}
GPT2 |= {"n_positions": 2048, "bos_token_id": 0, "eos_token_id": 0}
LORA = {"adapter": {"kind": "lora", "rank": 8}}
DROPOUT = {"adapter": {"kind": "lora", "rank": 8, "dropout": 0.1}}
CHECKPOINTED = {"gradient_checkpointing": True}


def train_section(model: dict[str, Any] | None = None, **changes: Any) -> CausalLm:
    """Return a section `train` with rows of 512 tokens, and with these settings of the model."""
    section = {
        "recipe": "causal_lm",
        "model": {"path": "/model", **(model or {})},
        "context_length": 512,
        "epochs": 1,
        "global_batch_size": 4,
        "precision": "fp32",
    }
    return CausalLm.model_validate(section | changes)


@pytest.mark.ci
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("config", "model", "changes"),
    [
        pytest.param(LLAMA, {}, {"global_batch_size": 1}, id="one row"),
        pytest.param(LLAMA, {}, {}, id="four rows", marks=SLOW),
        pytest.param(LLAMA, {}, {"micro_batch_size": 1}, id="four passes", marks=SLOW),
        pytest.param(LLAMA, {}, {"packing": False}, id="without packing", marks=SLOW),
        pytest.param(LLAMA, {}, {"precision": "bf16"}, id="four rows, bf16", marks=SLOW),
        pytest.param(SMALL, {}, {"precision": "bf16", "global_batch_size": 1}, id="bf16"),
        pytest.param(LLAMA, {}, {"optimizer": {"name": "sgd"}}, id="sgd", marks=SLOW),
        pytest.param(LLAMA, CHECKPOINTED, {"global_batch_size": 2}, id="checkpointing"),
        pytest.param(
            LLAMA, CHECKPOINTED, {"global_batch_size": 1}, id="checkpointing, one row", marks=SLOW
        ),
        pytest.param(
            LLAMA, CHECKPOINTED, {"precision": "bf16"}, id="checkpointing, bf16", marks=SLOW
        ),
        pytest.param(LLAMA, {"attention": "eager"}, {}, id="eager attention", marks=SLOW),
        pytest.param(LLAMA, LORA, {"global_batch_size": 2}, id="adapter"),
        pytest.param(LLAMA, LORA, {"global_batch_size": 1}, id="adapter, one row", marks=SLOW),
        pytest.param(LLAMA, LORA | CHECKPOINTED, {}, id="adapter, checkpointing", marks=SLOW),
        pytest.param(LLAMA, DROPOUT, {}, id="adapter with dropout", marks=SLOW),
        pytest.param(HALF, LORA, {}, id="adapter of a model in bf16", marks=SLOW),
        pytest.param(
            HALF, LORA, {"precision": "bf16"}, id="adapter of a model in bf16, bf16", marks=SLOW
        ),
        pytest.param(TIED, {}, {"global_batch_size": 1}, id="large vocabulary", marks=SLOW),
        pytest.param(QWEN3, {}, {}, id="qwen3", marks=SLOW),
        pytest.param(GPT2, {}, {"global_batch_size": 2}, id="gpt2"),
        pytest.param(GPT2, CHECKPOINTED, {}, id="gpt2, checkpointing", marks=SLOW),
    ],
)
def test_the_estimate_is_near_the_measured_peak(
    config: dict[str, Any], model: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    train = train_section({"path": str(tmp_path), "init": "random", **model}, **changes)
    measured = measured_peak(tmp_path, config, train, Worker(device=torch.device("cpu")))
    estimate = memory_of(config, train)
    assert estimate.total == pytest.approx(measured, rel=TOLERANCE), estimate


def memory_of(
    config: dict[str, Any], train: CausalLm, *, num_workers: int = 1, use_gpu: bool = False
) -> WorkerMemory:
    return worker_memory(model_shape(config), train, num_workers=num_workers, use_gpu=use_gpu)


def test_ddp_keeps_all_gradients_in_buckets_and_fsdp2_divides_all() -> None:
    parameters = model_shape(LLAMA).parameters
    one, two = (
        memory_of(LLAMA, train_section(CHECKPOINTED), num_workers=workers) for workers in (1, 2)
    )
    assert one.parameters == two.parameters == one.gradients == two.gradients == 4 * parameters
    assert two.optimizer == 8 * parameters
    shared = memory_of(LLAMA, train_section(CHECKPOINTED, strategy="fsdp2"), num_workers=4)
    assert (shared.gradients, shared.optimizer) == (parameters, 2 * parameters)
    assert shared.parameters < two.parameters
    off = train_section(CHECKPOINTED, strategy="fsdp2", fsdp2={"cpu_offload": True})
    assert memory_of(LLAMA, off, num_workers=4).optimizer == 0


def measure_as_rank(
    rank: int, meeting_point: str, folder: Path, changes: dict[str, Any], told: str
) -> None:
    """Measure the memory of one of two workers."""
    (own := folder / str(rank)).mkdir()
    train = train_section({"path": str(own), "init": "random"}, **changes)
    with gloo_worker(rank, 2, meeting_point) as worker:
        measured = worker.gathered(measured_peak(own, LLAMA, train, worker))
    if rank == 0:
        torch.save(measured, told)


@pytest.mark.ci
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"micro_batch_size": 2}, id="one pass", marks=SLOW),
        pytest.param({"micro_batch_size": 1, "context_length": 256}, id="two passes"),
        pytest.param(
            {"micro_batch_size": 1, "context_length": 64}, id="few activations", marks=SLOW
        ),
    ],
)
def test_the_estimate_is_near_the_measured_peak_of_two_workers(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    told = str(tmp_path / "told")
    run_processes(measure_as_rank, (str(tmp_path / "meet"), tmp_path, changes, told), 2)
    estimate = memory_of(LLAMA, train_section(**changes), num_workers=2)
    measured = torch.load(told, weights_only=True)
    assert measured == [pytest.approx(estimate.total, rel=TOLERANCE)] * 2, estimate


def test_passes_without_an_exchange_add_to_the_buckets_of_ddp() -> None:
    one, two = (
        memory_of(LLAMA, train_section(micro_batch_size=1), num_workers=workers)
        for workers in (1, 2)
    )
    assert one == two
    assert one.gradients == one.parameters


def test_each_stage_of_deepspeed_needs_less() -> None:
    large = {**LLAMA, "num_hidden_layers": 32}
    totals = [
        memory_of(
            large, train_section(strategy="deepspeed", deepspeed={"stage": stage}), num_workers=4
        ).total
        for stage in (1, 2, 3)
    ]
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) == 3
    assert BUCKET_PARAMETERS == zero.BUCKET_PARAMETERS


def test_an_adapter_trains_its_own_weights_alone() -> None:
    shape = model_shape(LLAMA)
    lora = train_section({"adapter": {"kind": "lora", "rank": 4, "targets": ["q_proj", "v_proj"]}})
    trained = 8 * 4 * ((512 + 512) + (512 + 256))
    assert trained_parameters(shape, lora.model.adapter) == trained
    found = memory_of(HALF, lora)
    assert found.parameters == 4 * trained + 2 * shape.parameters
    assert (found.gradients, found.optimizer) == (4 * trained, 8 * trained)


@pytest.mark.parametrize(
    ("adapter", "reason"),
    [
        ({"dora": True}, "DoRA"),
        ({"targets": ["lm_head"]}, "lm_head, which is not in each block"),
    ],
)
def test_adapters_whose_memory_is_not_known(adapter: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnknownShape, match=reason):
        memory_of(LLAMA, train_section({"adapter": {"kind": "lora", **adapter}}))


def test_less_memory_by_checkpointing_smaller_micro_batches_and_fused_attention() -> None:
    plain = memory_of(LLAMA, train_section(), use_gpu=True).activations
    assert memory_of(LLAMA, train_section(CHECKPOINTED), use_gpu=True).activations < plain / 3
    assert memory_of(LLAMA, train_section(micro_batch_size=1), use_gpu=True).activations < plain / 2
    eager = train_section({"attention": "eager"})
    assert memory_of(LLAMA, eager, use_gpu=True).activations > plain
    flash = train_section({"attention": "flash"})
    assert memory_of(LLAMA, flash, use_gpu=True).activations < plain


RANK_16 = {"adapter": {"kind": "lora", "rank": 16}}
FSDP2 = {"strategy": "fsdp2"}


@pytest.mark.parametrize(
    ("run", "model", "changes"),
    [
        ("all weights, `ddp`", CHECKPOINTED, {}),
        ("all weights, `fsdp2`", CHECKPOINTED, FSDP2),
        ("all weights, `fsdp2`, without gradient checkpointing", {}, FSDP2),
        ("LoRA, `ddp`", RANK_16 | CHECKPOINTED, {}),
        ("LoRA, `ddp`, without gradient checkpointing", RANK_16, {}),
        ("LoRA, `ddp`, `micro_batch_size: 8`", RANK_16 | CHECKPOINTED, {"micro_batch_size": 8}),
        ("LoRA, `fsdp2`", RANK_16 | CHECKPOINTED, FSDP2),
    ],
)
def test_the_table_of_the_guide_is_computed(
    run: str, model: dict[str, Any], changes: dict[str, Any]
) -> None:
    settings = {"context_length": 4096, "global_batch_size": 64, "micro_batch_size": 1}
    train = train_section(model, **settings | {"precision": "auto"} | changes)
    found = memory_of(LLAMA_8B, train, num_workers=8, use_gpu=True)
    parts = found.parameters, found.gradients, found.optimizer, found.activations, found.total
    row = " | ".join([run, *(f"{each / 2**30:.1f}" for each in parts)])
    assert f"| {row} |\n" in GUIDE.read_text()
