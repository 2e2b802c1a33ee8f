"""The launcher refuses before a submission just what the driver refuses at the run's folder."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainyard.planning.comparison.run_diff import diff_jobs
from trainyard.planning.merge import merge
from trainyard.planning.plan import Plan, plan_run
from trainyard.planning.render import render_job
from trainyard.platform import load_platform
from trainyard.run_file.load import load_run
from trainyard_trainer.checkpointing import resume
from trainyard_trainer.config.trainer_config import RecipeConfig
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.run_folder.folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
PLATFORM = load_platform(None)
PLAN, TEXT_PLAN, TREES_PLAN = (
    plan_run(load_run(ROOT / f"examples/{name}.yaml", workers="2"), PLATFORM, "team")
    for name in ("digits", "language_model", "gradient_boosting")
)

OTHERS: dict[str, Any] = {
    "data.source": "s3://bucket/other",
    "data.valid_source": "s3://bucket/valid",
    "data.valid_share": 0.5,
    "data.endpoint": "http://elsewhere:9000",
    "data.image_column": "picture",
    "data.label_column": "class",
    "data.loader": "ray",
    "data.decode_workers": 3,
    "data.ray_nodes": {"zone": "a"},
    "data.shuffle": False,
    "data.augment.flip": True,
    "data.augment.crop": 2,
    "data.drop_last": False,
    "data.max_bad_samples": 5,
    "train.model.name": "resnet34",
    "train.model.in_channels": 3,
    "train.model.num_classes": 11,
    "train.model.image_size": 64,
    "train.init": {"path": "s3://bucket/weights.pt"},
    "train.seed": 7,
    "train.epochs": 99,
    "train.global_batch_size": 128,
    "train.micro_batch_size": 16,
    "train.optimizer": {"name": "adamw"},
    "train.optimizer.learning_rate": 0.5,
    "train.schedule": {"name": "constant"},
    "train.schedule.warmup_samples": 10,
    "train.clip_norm": 1.0,
    "train.label_smoothing": 0.1,
    "train.ema_decay": 0.9,
    "train.precision": "fp32",
    "train.channels_last": True,
    "train.compile": True,
    "train.early_stopping": {"patience_epochs": 3},
    "checkpoint.every_epochs": 2,
    "checkpoint.keep": 9,
    "faults.retries": 9,
    "env.OMP_NUM_THREADS": "2",
    "limits.max_run_s": 3600,
    "secrets.TOKEN": {"name": "hub", "key": "token"},
    "notify": {"url": "https://hooks.example.com/runs"},
    "scaling.num_workers": 4,
    "scaling.cpus_per_worker": 4,
}
TEXT_OTHERS: dict[str, Any] = {
    "data.source": "s3://bucket/text",
    "data.text_files": "*.md",
    "data.valid_share": 0.5,
    "train.model.layers": 7,
    "train.model.heads": 8,
    "train.model.width": 64,
    "train.model.context_length": 64,
    "train.model.dropout": 0.1,
    "train.model.tokenizer": "/mnt/tokenizer",
    "train.model.vocab_size": 50304,
    "train.strategy": "fsdp2",
    "train.optimizer.learning_rate": 0.5,
    "train.micro_batch_size": 16,
    "train.compile": True,
}
TREES_OTHERS: dict[str, Any] = {
    "data.source": "s3://bucket/table",
    "data.valid_source": "s3://bucket/valid",
    "data.valid_share": 0.5,
    "data.endpoint": "http://elsewhere:9000",
    "data.label_column": "class",
    "data.feature_columns": ["a", "b"],
    "train.library": "lightgbm",
    "train.objective": "multiclass",
    "train.seed": 7,
    "train.rounds": 99,
    "train.learning_rate": 0.5,
    "train.max_depth": 3,
    "train.max_leaves": 5,
    "train.min_child_weight": 2.0,
    "train.min_split_gain": 0.5,
    "train.reg_alpha": 0.5,
    "train.reg_lambda": 0.5,
    "train.subsample": 0.5,
    "train.colsample_bytree": 0.5,
    "train.max_bin": 63,
    "checkpoint.every_rounds": 3,
}
FREE = {
    "train.micro_batch_size",
    "train.compile",
    "train.rounds",
    "data.endpoint",
    "checkpoint.every_rounds",
}
"""What another one of is the same run."""
LOWER = {"train.epochs": 1}
TOGETHER = {
    "data.memory_gib",
    "data.stream",
    "data.stream_groups",
    "train.recipe",
    "train.fsdp2",
    "train.deepspeed",
}
"""Fields that another one must change with."""


def changed(changes: dict[str, Any], plan: Plan = PLAN) -> RecipeConfig:
    document = plan.trainer.model_dump(mode="json")
    for path, value in changes.items():
        *parents, last = path.split(".")
        section = document
        for part in parents:
            section = section[part]
        section[last] = copy.deepcopy(value)
    return type(plan.trainer).model_validate(document)


def refused_by_the_launcher(config: RecipeConfig, plan: Plan = PLAN) -> set[str]:
    """The sections' fields, as `train.optimizer`."""
    plans = (plan, replace(plan, trainer=config))
    before, after = (merge(render_job(plan), PLATFORM, plan) for plan in plans)
    changes = diff_jobs(before, after, live=False)
    return {_field(one.path.removeprefix("config.")) for one in changes if one.effect == "refused"}


def refused_by_the_driver(config: RecipeConfig, plan: Plan = PLAN) -> set[str]:
    with tempfile.TemporaryDirectory() as path:
        folder = RunFolder.open(path, "digits")
        folder.write(folder.run, plan.trainer.model_dump_json())
        try:
            resume.check_identity(folder, config)
        except ConfigError as error:
            lines = str(error).splitlines()[1:-1]
            return {_field(line.strip().split(":")[0]) for line in lines}
    return set()


def _field(path: str) -> str:
    return ".".join(path.split(".")[:2])


@pytest.mark.parametrize(
    ("path", "value"), [*OTHERS.items(), *LOWER.items()], ids=lambda one: str(one)
)
def test_they_agree_about_each_field(path: str, value: Any) -> None:
    config = changed({path: value})
    assert config != PLAN.trainer
    assert refused_by_the_launcher(config) == refused_by_the_driver(config)


@pytest.mark.parametrize(
    ("plan", "path", "value"),
    [
        *((TEXT_PLAN, *one) for one in TEXT_OTHERS.items()),
        *((TREES_PLAN, *one) for one in (*TREES_OTHERS.items(), ("train.rounds", 1))),
    ],
    ids=lambda one: one.trainer.name if isinstance(one, Plan) else str(one),
)
def test_they_agree_about_each_field_of_other_recipes(plan: Plan, path: str, value: Any) -> None:
    config = changed({path: value}, plan)
    assert config != plan.trainer
    refused = refused_by_the_launcher(config, plan)
    assert refused == refused_by_the_driver(config, plan)
    is_less = (path, value) == ("train.rounds", 1)
    assert bool(refused) is (path not in FREE or is_less)


@pytest.mark.parametrize(
    ("strategy", "refused"),
    [
        ("deepspeed", {"scaling.num_workers"}),
        ("fsdp2", set()),
    ],
)
def test_they_agree_about_another_number_of_workers(strategy: str, refused: set[str]) -> None:
    before = changed({"train.strategy": strategy})
    plan = replace(PLAN, trainer=before)
    config = changed({"scaling.num_workers": 4}, plan)
    assert refused_by_the_launcher(config, plan) == refused_by_the_driver(config, plan) == refused


@given(st.sets(st.sampled_from(sorted(OTHERS)), max_size=6), st.booleans())
def test_they_agree_about_any_change(paths: set[str], lower: bool) -> None:
    config = changed({path: OTHERS[path] for path in sorted(paths)} | (LOWER if lower else {}))
    assert refused_by_the_launcher(config) == refused_by_the_driver(config)


@pytest.mark.parametrize("section", ["data", "train"])
def test_every_field_of_the_identitys_sections_is_tried(section: str) -> None:
    plans = (PLAN, TEXT_PLAN, TREES_PLAN)
    models = [type(getattr(plan.trainer, section)) for plan in plans]
    tried = {_field(path) for path in (*OTHERS, *TEXT_OTHERS, *TREES_OTHERS)} | TOGETHER
    assert {f"{section}.{name}" for model in models for name in model.model_fields} <= tried
