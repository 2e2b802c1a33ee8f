"""The memory that a training step of `causal_lm` needs, counted from PyTorch's allocations."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from trainyard_trainer.config.training.batch_share import share_batch
from trainyard_trainer.config.training.train import CausalLm
from trainyard_trainer.data.prepared import LEARNT, STARTS_DOCUMENT
from trainyard_trainer.engine.learning.optimizers import build_optimizer
from trainyard_trainer.parallel.strategy import strategy_of
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.recipes.causal_lm.documents import documents_of
from trainyard_trainer.recipes.causal_lm.weights import build_network

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
"""The config of Llama 3 8B."""


def measured_peak(folder: Path, config: Mapping[str, Any], train: CausalLm, worker: Worker) -> int:
    """Return the largest memory of weights, gradients, optimizer and activations at once, in bytes.

    Trains a model with random weights on random tokens, distributed by `train.strategy` if there are several
    workers. `folder` is that of `train.model.path`.
    """
    device, share = worker.device, share_batch(train, worker.world_size)
    (folder / "config.json").write_text(json.dumps(config))
    network = build_network(train.model, seed=0, is_sharded=False).to(device)
    strategy = strategy_of(train, None, lambda network: [], accumulates=share.accumulation > 1)

    def steps() -> None:
        model = strategy.wrap_model(network, worker)
        trained = [each for each in network.parameters() if each.requires_grad]
        optimizer = build_optimizer(trained, train, device)
        # The first step makes the optimizer's state. In the second one, DDP arranges its buckets anew.
        for _ in range(2 if worker.world_size == 1 else 3):
            strategy.clear_gradients(model, optimizer)
            for left in reversed(range(share.accumulation)):
                rows = random_rows(share.micro_batch_size, train, config["vocab_size"])
                tokens, flags = (each.to(device) for each in rows)
                with strategy.without_exchange(model) if left else nullcontext():
                    with torch.autocast(
                        device.type, torch.bfloat16, enabled=train.precision == "bf16"
                    ):
                        loss = model(tokens, documents_of(tokens, flags))
                    (loss / 1000).backward()
            optimizer.step()

    weights = sum(each.nbytes for each in network.parameters())
    return weights + (peak_on_gpu(steps) if device.type == "cuda" else peak_on_cpu(steps))


def peak_on_gpu(steps: Callable[[], None]) -> int:
    """Return the largest number of bytes that the steps allocate at once on a GPU."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    steps()
    return torch.cuda.max_memory_allocated() - before


def peak_on_cpu(steps: Callable[[], None]) -> int:
    """Return the largest number of bytes that the steps allocate at once on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        steps()
    return highest_sum(profiler)


def random_rows(rows: int, train: CausalLm, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random tokens, all of them learnt, in rows of two documents if they are packed, else of one."""
    length = train.context_length
    tokens = torch.randint(0, vocab_size, (rows, length), dtype=torch.int32)
    flags = torch.full((rows, length), LEARNT, dtype=torch.uint8)
    flags[:, 0] |= STARTS_DOCUMENT
    if train.packing:
        flags[:, length // 3] |= STARTS_DOCUMENT
    return tokens, flags


def highest_sum(profiler: profile) -> int:
    """Return the largest number of bytes that was allocated at once while a profiler watched."""
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = [
        (event.start_ns(), event.nbytes())
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    in_use = highest = 0
    for _, change in sorted(events, key=lambda event: event[0]):
        in_use += change
        highest = max(highest, in_use)
    return highest
