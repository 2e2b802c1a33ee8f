"""Each step of causal_lm has the loss of the same step of TRL's SFTTrainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("trl")

from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from tests.support.tiny_models import Kind, make_folder
from tests.support.trl_trainer import ENVIRONMENT, trl_trainer
from tests.trainer.causal_runs import causal_config, write_chats
from tests.trainer.training import open_folder
from trainyard_trainer.attempt.attempt import open_data
from trainyard_trainer.attempt.checks import check_data
from trainyard_trainer.config.trainer_config import BuiltInConfig
from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.data.loading.local_copy import LocalCopy
from trainyard_trainer.data.prepared import Prepared
from trainyard_trainer.engine.learning.learner import Learner
from trainyard_trainer.parallel.worker import Worker

STEPS, BATCH, PASS = 50, 8, 4
PEAK, DECAY, CLIP = 1e-3, 0.01, 1.0
TOLERANCE = 1e-3


def our_losses(
    config: BuiltInConfig, data: Prepared, rows: Batch
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on the rows in their order; return the losses, and the trained weights before the first step."""
    learner = Learner(config, data, check_data(config, data), Worker(device=torch.device("cpu")))
    start = {
        name: each.detach().clone()
        for name, each in learner.network.named_parameters()
        if each.requires_grad
    }
    losses = []
    for step in range(STEPS):
        sums = learner.new_sums()
        batch = rows.rows(step * BATCH, (step + 1) * BATCH)
        learner.step(batch, sums, epoch=0, step_in_epoch=step)
        losses.append(sums.since_last()[0])
    return losses, start


class Losses(TrainerCallback):
    """The losses that a trainer logs."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
        if logs and "loss" in logs:
            self.found.append(logs["loss"])


def losses_of_trl(
    model: Any, rows: Batch, tokenizer: Any, out: Path, *, packing: bool
) -> list[float]:
    losses = Losses()
    trl_trainer(
        model,
        rows,
        tokenizer,
        out,
        packing=packing,
        callback=losses,
        per_device_train_batch_size=PASS,
        gradient_accumulation_steps=BATCH // PASS,
        learning_rate=PEAK,
        weight_decay=DECAY,
        max_grad_norm=CLIP,
        max_steps=STEPS,
        logging_steps=1,
    ).train()
    return losses.found


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kind", "packing", "has_adapter"),
    [
        ("llama", True, False),
        ("llama", False, True),
        ("gpt2", False, False),
        ("qwen3", True, True),
    ],
)
def test_fifty_steps_have_the_losses_of_trl(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: Kind,
    packing: bool,
    has_adapter: bool,
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    folder = make_folder(tmp_path / "model", kind)
    config = causal_config(
        tmp_path,
        folder,
        write_chats(tmp_path / "chats.jsonl", count=1500 if packing else 520),
        train__context_length=96,
        train__packing=packing,
        train__global_batch_size=BATCH,
        train__micro_batch_size=PASS,
        train__epochs=1,
        train__clip_norm=CLIP,
        train__precision="fp32",
        train__optimizer={"name": "adamw", "learning_rate": PEAK, "weight_decay": DECAY},
        train__schedule={"name": "constant"},
        train__model__adapter={"kind": "lora", "rank": 8, "alpha": 16} if has_adapter else None,
    )
    data = open_data(config, open_folder(config))
    rows = LocalCopy(data, data.train, is_pinned=False)[np.arange(STEPS * BATCH)]
    ours, start = our_losses(config, data, rows)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if has_adapter:
        wanted = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, wanted)
        named = dict(model.named_parameters())
        with torch.no_grad():
            for name, value in start.items():
                named[f"base_model.model.{name.removeprefix('model.')}"].copy_(value)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    theirs = losses_of_trl(model, rows, tokenizer, tmp_path / "trl", packing=packing)
    assert len(theirs) == STEPS
    assert ours[0] > ours[-1] + 0.1
    assert ours == pytest.approx(theirs, rel=TOLERANCE)
