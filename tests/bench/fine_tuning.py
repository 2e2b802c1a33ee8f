"""Rows per second of fine-tuning: a run of causal_lm beside TRL's SFTTrainer on the same model and rows.

One CPU worker with two threads. Both train in float32, without gradient checkpointing.
"""

from __future__ import annotations

import json
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tests.bench import runs
from tests.bench.rounds import BUILD, Options, Row, Section, alternate, main, ratios, say
from tests.support.tiny_models import make_folder
from trainyard_trainer.config.trainer_config import TrainerConfig

LORA = {"kind": "lora", "rank": 16, "alpha": 32}
WAYS: dict[str, dict[str, Any]] = {
    "all weights, packed": {},
    "all weights, padded": {"train__packing": False},
    "LoRA, packed": {"train__model__adapter": LORA},
    "LoRA, padded": {"train__model__adapter": LORA, "train__packing": False},
}
"""The settings of `train` that each comparison changes."""

LINE = "what is the sum of these two numbers and how did you find it so quickly"


def write_chats(path: Path, count: int) -> None:
    """Write chats of two questions and two answers of random length."""
    draw = random.Random(0)

    def text() -> str:
        return " ".join(draw.choices(LINE.split(), k=draw.randint(5, 60)))

    with path.open("w") as file:
        for _ in range(count):
            turns = [{"role": role, "content": text()} for role in ("user", "assistant") * 2]
            file.write(json.dumps({"messages": turns}) + "\n")


def files_of(options: Options) -> tuple[Path, Path]:
    """Return the paths of the folder of a model and of the file of chats."""
    folder = BUILD / "data" / options.choose("fine-tuning", "fine-tuning-quick")
    return folder / "model", folder / "chats.jsonl"


def made(options: Options) -> tuple[Path, Path]:
    """Return the folder of a model and the file of chats, which are made once."""
    model, chats = files_of(options)
    if not chats.exists():
        model.parent.mkdir(parents=True, exist_ok=True)
        layers, width = options.choose((6, 256), (1, 32))
        make_folder(model, layers=layers, width=width)
        write_chats(chats, options.choose(4000, 100))
    return model, chats


def config_of(name: str, options: Options) -> TrainerConfig:
    """A run that never ends by itself."""
    model, chats = made(options)
    return runs.config(
        name.replace(", ", "-").replace(" ", "-").lower(),
        chats,
        train={
            "recipe": "causal_lm",
            "model": {"path": str(model)},
            "context_length": 256,
            "epochs": 1000,
            "global_batch_size": 8,
            "precision": "fp32",
            "optimizer": {"name": "adamw", "learning_rate": 1e-4},
            "schedule": {"name": "constant"},
        },
        scaling={"num_workers": 1, "use_gpu": False, "cpus_per_worker": 2},
        **WAYS[name],
    )


def rows_per_s_of_trl(config: TrainerConfig, *, seconds: float, skip_s: float) -> float:
    """The speed of TRL in a process of its own."""
    command = [sys.executable, "-m", "tests.bench.trl_speed"]
    speed = runs.printed_speed([*command, f"--seconds={seconds}", f"--skip={skip_s}"], config)
    say(f"  {config.name}, TRL: {speed:.1f} rows/s")
    return speed


def measure(options: Options) -> list[Section]:
    seconds, skip_s = options.choose((20.0, 4.0), (0.5, 0.0))
    rows: list[Row] = []
    for name in WAYS:
        config = config_of(name, options)
        ways = {
            "ours": partial(runs.samples_per_s, config, "ray", seconds=seconds, skip_s=skip_s),
            "TRL": partial(rows_per_s_of_trl, config, seconds=seconds, skip_s=skip_s),
        }
        speeds = alternate(ways, options.rounds_or(5))
        rows += [
            Row(what=name, unit="x", values=ratios(speeds["ours"], speeds["TRL"]), at_least=1.0),
            *(Row(what=f"`{way}`", unit="rows/s", values=each) for way, each in speeds.items()),
        ]
    return [
        Section(
            title="causal_lm over TRL's SFTTrainer",
            rows=tuple(rows),
            notes=(
                "Llama of 6 layers and width 256, vocabulary of 2,048; 8 rows of 256 tokens per step, AdamW, "
                "float32, 1 CPU worker with 2 threads.",
            ),
        )
    ]


if __name__ == "__main__":
    main(measure)
