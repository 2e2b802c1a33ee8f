"""TRL's SFTTrainer on the rows that causal_lm trains on, in their order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.data.prepared import LEARNT, PADDING, STARTS_DOCUMENT

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "ACCELERATE_USE_CPU": "1"}
"""What keeps TRL from the network, and Accelerate from looking for GPUs."""


class InOrder(SFTTrainer):
    """TRL's trainer, which takes its rows in their order."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trl_trainer(
    model: Any,
    rows: Batch,
    tokenizer: Any,
    out: Path,
    *,
    packing: bool,
    callback: TrainerCallback,
    **settings: Any,
) -> InOrder:
    """Return a trainer in float32 on the CPU; `settings` are those of SFTConfig."""
    arguments = SFTConfig(
        output_dir=str(out),
        lr_scheduler_type="constant",
        padding_free=packing,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    return InOrder(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list([*map(row_of_trl, rows["tokens"], rows["flags"])]),
        processing_class=tokenizer,
        callbacks=[callback],
    )


def row_of_trl(tokens: torch.Tensor, flags: torch.Tensor) -> dict[str, list[int]]:
    """Return a prepared row as TRL has it: without padding, and with the lengths of its documents."""
    kept = (flags & PADDING) == 0
    tokens, flags = tokens[kept], flags[kept]
    starts = torch.nonzero(flags & STARTS_DOCUMENT)[:, 0].tolist()
    return {
        "input_ids": tokens.tolist(),
        "labels": torch.where((flags & LEARNT).bool(), tokens, -100).tolist(),
        "seq_lengths": np.diff([*starts, len(tokens)]).tolist(),
    }
