"""Each step on files of tokens has the loss of the same step of a plain loop as in nanoGPT."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from test_token_files import CONTEXT, VOCABULARY, shard_config, source_of
from torch import nn
from torch.nn import functional
from training import open_folder

from trainyard_trainer.attempt.attempt import open_data
from trainyard_trainer.attempt.checks import check_data
from trainyard_trainer.config.training.models import Gpt
from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.data.loading.shard_rows import ShardRows
from trainyard_trainer.data.sources.tokens.token_files import TokenShards
from trainyard_trainer.engine.learning.learner import Learner
from trainyard_trainer.parallel.worker import Worker

STEPS, BATCH, PASS = 50, 8, 4
PEAK, DECAY, CLIP = 3e-3, 0.1, 1.0


class PlainBlock(nn.Module):
    """A block of the model of nanoGPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.mlp_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count, length, width = x.shape
        parts = self.c_attn(self.ln_1(x)).split(width, dim=2)
        q, k, v = (
            part.view(count, length, self.heads, width // self.heads).transpose(1, 2)
            for part in parts
        )
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        mask = torch.tril(torch.ones(length, length, dtype=torch.bool))
        found = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1) @ v
        x = x + self.c_proj(found.transpose(1, 2).reshape(count, length, width))
        return x + self.mlp_proj(functional.gelu(self.c_fc(self.ln_2(x))))


class PlainGpt(nn.Module):
    """The model of nanoGPT, without dropout, with tied weights."""

    def __init__(self, config: Gpt) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, config.width)
        self.wpe = nn.Embedding(config.context_length, config.width)
        self.h = nn.ModuleList(
            [PlainBlock(config.width, config.heads) for _ in range(config.layers)]
        )
        self.ln_f = nn.LayerNorm(config.width)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for block in self.h:
            hidden = block(hidden)
        scores = functional.linear(self.ln_f(hidden), self.wte.weight)
        return functional.cross_entropy(scores.view(-1, VOCABULARY), y.reshape(-1))


NAMES = {
    "before_attention": "ln_1",
    "before_mlp": "ln_2",
    "attention.inward": "c_attn",
    "attention.out": "c_proj",
    "widen": "c_fc",
    "narrow": "mlp_proj",
    "blocks": "h",
    "bytes": "wte",
    "positions": "wpe",
    "norm": "ln_f",
}
"""Our names of weights, and those of nanoGPT."""


def plain_name(name: str) -> str:
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def losses_of_plain_loop(model: PlainGpt, rows: torch.Tensor) -> list[float]:
    """Train as nanoGPT's train.py does: gradients of several passes, clipping, and AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, weight_decay=DECAY)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for first in range(step * BATCH, (step + 1) * BATCH, PASS):
            part = rows[first : first + PASS].long()
            loss = model(part[:, :-1], part[:, 1:]) / (BATCH // PASS)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
    return losses


@pytest.mark.ci
def test_fifty_steps_have_the_losses_of_a_loop_as_in_nanogpt(tmp_path: Path) -> None:
    source = source_of(tmp_path / "source", STEPS * BATCH * CONTEXT + 1)
    config = shard_config(
        tmp_path,
        source,
        train__global_batch_size=BATCH,
        train__micro_batch_size=PASS,
        train__clip_norm=CLIP,
        train__precision="fp32",
        train__optimizer={"name": "adamw", "learning_rate": PEAK, "weight_decay": DECAY},
        train__schedule={"name": "constant"},
    )
    data = open_data(config, open_folder(config))
    assert isinstance(data, TokenShards)
    rows: Batch = ShardRows(data, "train")[np.arange(STEPS * BATCH)]
    learner = Learner(config, data, check_data(config, data), Worker(device=torch.device("cpu")))
    plain = PlainGpt(config.train.model)
    start = learner.network.state_dict()
    plain.load_state_dict({plain_name(name): each.clone() for name, each in start.items()})
    ours = []
    for step in range(STEPS):
        sums = learner.new_sums()
        batch = rows.rows(step * BATCH, (step + 1) * BATCH)
        learner.step(batch, sums, epoch=0, step_in_epoch=step)
        ours.append(sums.since_last()[0])
    theirs = losses_of_plain_loop(plain, rows["tokens"])
    assert ours[0] == pytest.approx(math.log(VOCABULARY), rel=0.05)
    assert ours[-1] < ours[0] - 1
    assert ours == pytest.approx(theirs, rel=1e-3)
