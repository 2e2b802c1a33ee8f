"""A plan shows the memory of a language model, and refuses one that does not fit the pool's GPUs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.measured_memory import LLAMA_8B
from trainyard.errors import ConfigError
from trainyard.planning.plan import plan_run
from trainyard.planning.reasons import explain_plan
from trainyard.platform import Platform
from trainyard.run_file.models import RecipeRun
from trainyard_trainer.errors import ConfigError as TrainerConfigError
from trainyard_trainer.recipes.causal_lm.memory import require_memory

Platforms = Callable[..., Platform]


def run_of(path: Path | str, model: dict[str, Any] | None = None, **train: Any) -> RecipeRun:
    """Return a run on 8 GPUs that fine-tunes the model of a folder."""
    return RecipeRun.model_validate(
        {
            "name": "support-bot",
            "resources": {"gpus": 8},
            "data": {"source": "/data/chats.jsonl"},
            "train": {
                "recipe": "causal_lm",
                "model": {"path": str(path), **(model or {})},
                "context_length": 4096,
                "epochs": 1,
                "global_batch_size": 64,
            }
            | train,
        }
    )


def row_of(run: RecipeRun, platform: Platform) -> tuple[str, str]:
    rows = explain_plan(plan_run(run, platform, "default"), run, platform)
    return next((row.value, row.why) for row in rows if row.name == "memory per GPU")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def test_a_model_that_does_not_fit_is_refused_with_what_would_fit(
    folder: Path, platform_with: Platforms
) -> None:
    platform = platform_with(gpu={"gpuMemoryGib": 80})
    with pytest.raises(ConfigError) as refused:
        plan_run(run_of(folder), platform, "default")
    text = str(refused.value)
    assert "of memory per GPU, and a GPU has 80.0 GiB" in text
    assert "parameters 29.9 GiB" in text
    order = ["gradient_checkpointing: true", "micro_batch_size: 1", "fsdp2 over 8", "kind: lora"]
    places = [text.index(each) for each in order]
    assert places == sorted(places)
    assert "which fits" in text


def test_a_model_that_fits_is_shown_with_its_parts(folder: Path, platform_with: Platforms) -> None:
    run = run_of(
        folder,
        {"adapter": {"kind": "lora"}, "gradient_checkpointing": True},
        micro_batch_size=1,
    )
    value, why = row_of(run, platform_with(gpu={"gpuMemoryGib": 80}))
    assert value.startswith("about ")
    assert value.endswith(" GiB of 80 GiB")
    assert why.startswith("parameters 15.1 GiB, gradients ")


def test_without_the_memory_of_the_gpus_it_is_only_shown(
    folder: Path, platform_with: Platforms
) -> None:
    value, _ = row_of(run_of(folder), platform_with())
    assert value.startswith("about ")
    assert " of " not in value


def test_a_plan_says_why_it_knows_no_memory(tmp_path: Path, platform_with: Platforms) -> None:
    platform = platform_with(gpu={"gpuMemoryGib": 80})
    missing = row_of(run_of("/models/elsewhere"), platform)
    assert missing[0] == "not known"
    assert "the run checks its memory when it starts" in missing[1]
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    assert "its kind is mixtral" in row_of(run_of(tmp_path), platform)[1]


def test_the_driver_refuses_by_the_memory_of_the_real_gpu(folder: Path) -> None:
    train: Any = run_of(folder).train
    with pytest.raises(TrainerConfigError, match=r"a GPU has 40\.0 GiB"):
        require_memory(train, str(folder), num_workers=8, gpu_bytes=40 * 2**30)
    require_memory(train, str(folder), num_workers=8, gpu_bytes=1000 * 2**30)
