"""Small runs of the recipe causal_lm: a tiny model, chats, and their config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.settings import set_all
from trainyard_trainer.config.trainer_config import BuiltInConfig

LORA = {"kind": "lora", "rank": 4, "alpha": 8, "dropout": 0.1}
CONTEXT_LENGTH = 48


def write_chats(path: Path, count: int = 60) -> Path:
    """Write chats of one question and one answer, as JSON lines."""
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"What is {number % 7} plus {number % 5}?"},
                {
                    "role": "assistant",
                    "content": f"It is {number % 7 + number % 5}. " * (number % 3 + 1),
                },
            ]
        }
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def causal_config(storage: Path, model: Path, chats: Path, **changes: Any) -> BuiltInConfig:
    """A run of a second; `train__epochs=3` changes one value."""
    config: dict[str, Any] = {
        "name": "chat",
        "storage": {"path": str(storage)},
        "data": {"source": str(chats)},
        "train": {
            "recipe": "causal_lm",
            "model": {"path": str(model)},
            "context_length": CONTEXT_LENGTH,
            "epochs": 2,
            "global_batch_size": 4,
            "optimizer": {"name": "adamw", "learning_rate": 1e-3},
        },
        "scaling": {"num_workers": 1, "use_gpu": False, "cpus_per_worker": 1},
    }
    return BuiltInConfig.model_validate(set_all(config, changes))
