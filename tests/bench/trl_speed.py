"""Fine-tune by TRL's SFTTrainer on the rows of a run of causal_lm; print the number of rows per second.

    TRAINYARD_CONFIG=... python -m tests.bench.trl_speed --seconds 30 --skip 5

Model, rows, batch size, optimizer and threads are those of the run. It saves and validates nothing.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.trl_trainer import ENVIRONMENT, trl_trainer

os.environ |= ENVIRONMENT

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from trainyard_trainer.attempt.attempt import open_data
from trainyard_trainer.config.trainer_config import TrainerConfig, read_config
from trainyard_trainer.config.training.train import CausalLm
from trainyard_trainer.data.loading.local_copy import LocalCopy
from trainyard_trainer.run_folder.folder import RunFolder


class Clock(TrainerCallback):
    """Counts the steps of some seconds, and ends the training after them."""

    def __init__(self, seconds: float, skip_s: float) -> None:
        self.seconds, self.skip_s = seconds, skip_s
        self.began: float | None = None
        self.warm_since: float | None = None
        self.steps = 0

    def on_step_end(self, *arguments: Any, **_: Any) -> None:
        _, _, control = arguments
        now = time.perf_counter()
        self.began = self.began or now
        if self.warm_since is None:
            self.warm_since = now if now - self.began >= self.skip_s else None
            return
        self.steps += 1
        self.now = now
        control.should_training_stop = now - self.warm_since >= self.seconds

    @property
    def steps_per_s(self) -> float:
        assert self.warm_since is not None
        return self.steps / (self.now - self.warm_since)


def rows_per_s(config: TrainerConfig, seconds: float, skip_s: float) -> float:
    """Train for some seconds after the first `skip_s`."""
    train = config.train
    assert isinstance(train, CausalLm)
    data = open_data(config, RunFolder.open(config.storage.path, config.name))
    rows = LocalCopy(data, data.train, is_pinned=False)[np.arange(data.num_train)]
    model: Any = AutoModelForCausalLM.from_pretrained(train.model.path, dtype=torch.float32)
    if lora := train.model.adapter:
        model = get_peft_model(
            model,
            LoraConfig(
                r=lora.rank,
                lora_alpha=lora.alpha,
                lora_dropout=lora.dropout,
                target_modules=lora.targets,
                task_type="CAUSAL_LM",
            ),
        )
    clock = Clock(seconds, skip_s)
    with tempfile.TemporaryDirectory() as out:
        trl_trainer(
            model,
            rows,
            AutoTokenizer.from_pretrained(train.model.path),
            Path(out),
            packing=train.packing,
            callback=clock,
            per_device_train_batch_size=train.global_batch_size,
            learning_rate=train.optimizer.learning_rate,
            max_grad_norm=0.0,
            num_train_epochs=train.epochs,
            logging_steps=10,
        ).train()
    return clock.steps_per_s * train.global_batch_size


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--skip", type=float, required=True)
    wanted = parser.parse_args()
    config = read_config()
    torch.set_num_threads(config.scaling.cpus_per_worker)
    print(rows_per_s(config, wanted.seconds, wanted.skip), flush=True)


if __name__ == "__main__":
    main()
