"""What a new attempt finds, keeps and refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from training import open_folder, small_config

from trainer import resume
from trainer.errors import ConfigError
from trainer.progress import read_lines


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    folder = open_folder(small_config(tmp_path))
    lines = "".join(f'{{"step": {step}, "samples": {step * 10}}}\n' for step in range(1, 6))
    folder.append(folder.metrics, lines + '{"step": 6, "sam')
    resume.cut_metrics(folder, 30)
    assert [record["step"] for record in read_lines(folder, folder.metrics)] == [1, 2, 3]
    resume.cut_metrics(folder, 0)
    assert folder.read(folder.metrics) == b""


def test_a_run_that_learns_something_else_is_refused_field_by_field(tmp_path: Path) -> None:
    before = small_config(tmp_path, train__epochs=5)
    folder = open_folder(before)
    resume.check_identity(folder, before)
    folder.write(folder.run, before.model_dump_json())
    other = small_config(
        tmp_path, train__seed=7, train__model__name="resnet34", data__loader="ray", train__epochs=4
    )
    with pytest.raises(ConfigError) as refusal:
        resume.check_identity(folder, other)
    for line in (
        "data.loader: torch -> ray",
        "train.model.name: shufflenet_v2_x0_5 -> resnet34",
        "train.seed: 0 -> 7",
        "train.epochs: 5 -> 4 (it may only be raised)",
    ):
        assert line in str(refusal.value)


def test_more_epochs_workers_and_checkpoints_are_the_same_run(tmp_path: Path) -> None:
    before = small_config(tmp_path)
    folder = open_folder(before)
    folder.write(folder.run, before.model_dump_json())
    resume.check_identity(
        folder,
        small_config(
            tmp_path, train__epochs=9, scaling__num_workers=4, checkpoint__keep=5, faults__retries=0
        ),
    )
