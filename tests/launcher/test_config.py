"""A run file is read strictly, and all its problems come at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainyard.errors import ConfigError
from trainyard.run_file.load import load_name, load_run

DIGITS = Path(__file__).resolve().parents[2] / "examples/digits.yaml"

Write = Callable[[dict[str, Any]], Path]


def refusal(path: Path, *settings: str, **options: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load_run(path, settings, **options)
    return str(raised.value)


def test_the_digits_example_loads() -> None:
    run = load_run(DIGITS)
    assert (run.name, run.resources.workers, run.train.model.name) == ("digits", 2, "resnet18")


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("train.epoch=3", "train.epoch: unknown key; did you mean epochs?"),
        ("dta.source=digits", "dta: unknown key; did you mean data?"),
        ("train.model.chanels=1", "train.model.chanels: unknown key; did you mean in_channels?"),
        ("data.loader=tensorflow", "data.loader = 'tensorflow': must be 'torch' or 'ray'"),
        ("train.epochs='8'", "train.epochs = '8': must be a valid integer"),
        ("train.epochs=yes", "train.epochs = True: must be a valid integer"),
        ("train.epochs=0", "train.epochs = 0: must be greater than 0"),
        ("resources.workers=-1", "resources.workers = -1: must be greater than 0"),
        ("resources=3", "resources = 3: must be a mapping"),
        ("resources.gpus=2", "resources: must have exactly one of gpus and workers"),
        ("train.optimizer={name: adamw, momentum: 0.5}", "train.optimizer.momentum: unknown key"),
        ("train.optimizer={name: sgd, momentun: 0.5}", "did you mean momentum?"),
        ("train.optimizer={name: adam}", "train.optimizer.name = 'adam': must be one of 'sgd'"),
        ("train.optimizer={momentum: 0.5}", "train.optimizer.name: is required"),
        ("train.optimizer=sgd", "train.optimizer = 'sgd': must be a mapping"),
        ("train=", "train = nothing: must be a mapping"),
        ("train.seed=99999999999999999999", "must be less than 4294967296"),
        ("train.seed=2001-99-99", "the value is not valid YAML"),
        ("train.model={name: a, name: b}", "duplicate key name"),
        ("image=registry:5000/trainyard", "must have a tag"),
        ("image=trainyard:latest", "must have a tag other than latest"),
        ("image=registry/TrainYard:1", "with NAME in lower case"),
        ("image=trainyard@sha256:abc", "NAME@sha256:<64 digits>"),
    ],
)
def test_a_wrong_value_names_its_path_and_the_rule(setting: str, problem: str) -> None:
    assert problem in refusal(DIGITS, setting)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["resources.data={nodes: 2}"], "resources.data is only for the Ray loader"),
        (
            ["resources.data={nodes: 2}", "data.loader=ray", "data.ray_nodes={a: b}"],
            "remove data.ray_nodes",
        ),
        (["resources.data={nodes: 0}"], "resources.data.nodes = 0"),
        (["resources={gpus: {min: 8, max: 8}}"], "resources.gpus: min must be below max"),
        (
            ["resources={gpus: {min: 8, max: 16}}", "train.strategy=deepspeed"],
            "make resources.gpus one number, or use strategy fsdp2",
        ),
        (["resources={gpus: {min: 8, mx: 9}}"], "resources.gpus.mx: unknown key; did you mean max"),
    ],
)
def test_ranges_and_data_nodes_that_make_no_sense_are_refused(
    settings: list[str], problem: str
) -> None:
    assert problem in refusal(DIGITS, *settings)


def test_a_range_is_typed_with_a_colon() -> None:
    assert load_run(DIGITS, gpus="8:16").resources.bounds == (8, 16)


@pytest.mark.parametrize(
    "image", ["b:1", "a/b:1", "Host:5000/b:1", f"b@sha256:{64 * 'a'}", f"b:1@sha256:{64 * 'a'}"]
)
def test_an_image_with_a_tag_or_a_digest_is_taken(image: str) -> None:
    assert load_run(DIGITS, [f"image={image}"]).image == image


@pytest.mark.parametrize("name", ["Digits", "a" * 39, "1st", "a-", "a_b", "", "a.b"])
def test_a_bad_name_is_refused_with_the_whole_rule(name: str) -> None:
    assert f"name = {name!r}: must be at most 38 characters" in refusal(DIGITS, name=name)


def test_the_longest_name_is_taken() -> None:
    assert load_run(DIGITS, name="a" * 38).name == "a" * 38


def test_all_problems_of_a_file_are_reported_at_once(write_run: Write) -> None:
    path = write_run({"name": "Digits", "imag": "x", "resources": {"gpus": 0}})
    message = refusal(path)
    assert "3 problems" in message
    assert "name = 'Digits'" in message
    assert "imag: unknown key; did you mean image?" in message
    assert "resources.gpus = 0" in message


def test_a_missing_section_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("name: digits\nresources: {workers: 2}\n")
    assert "data: is required" in refusal(path)


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("name: digits\nname: other\n")
    assert "duplicate key name" in refusal(path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not nothing"),
        ("- a\n", "not list"),
        ("a: [", "is not valid YAML"),
        ("a: 2001-99-99", "is not valid YAML"),
        (f"a: {5000 * '9'}", "is not valid YAML"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert problem in refusal(path)


def test_a_key_that_is_no_word_is_an_unknown_key(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("1: 2\n")
    assert "1: unknown key; known keys: checkpoint" in refusal(path)


def test_a_long_value_is_not_shown_in_full(write_run: Write) -> None:
    assert len(refusal(write_run({"train": "x" * 10_000}))) < 1_000


def test_the_name_of_a_file_is_read_without_its_other_problems(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("name: digits\nresources: {}\n")
    assert load_name(path) == "digits"
    path.write_text("name: Digits\n")
    with pytest.raises(ConfigError, match="name = 'Digits': must be at most 38 characters"):
        load_name(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "cannot read" in refusal(tmp_path / "none.yaml")


@pytest.mark.parametrize("setting", ["epochs", "=3", "a..b=3", "name.first=x"])
def test_a_setting_that_cannot_be_set_is_refused(setting: str) -> None:
    assert "set" in refusal(DIGITS, setting)


def test_settings_then_resources_change_the_file() -> None:
    run = load_run(DIGITS, ["train.epochs=3", "train.optimizer.name=adamw"], gpus="16")
    assert (run.train.epochs, run.train.optimizer.name) == (3, "adamw")
    assert (run.resources.gpus, run.resources.workers) == (16, None)


def test_an_empty_section_can_be_filled_on_the_command_line(write_run: Write) -> None:
    assert load_run(write_run({"resources": None}), workers="2").resources.workers == 2


@pytest.mark.parametrize(
    "gpus", ["many", "1.5", "0", "-1", "true", "", "[", "3:2", "2:2", "0:2", "2:", "1:8193", "8193"]
)
def test_gpus_that_are_no_count_are_refused(gpus: str) -> None:
    assert "resources.gpus" in refusal(DIGITS, gpus=gpus)


def test_gpus_and_workers_exclude_each_other() -> None:
    assert "exclude each other" in refusal(DIGITS, gpus="1", workers="1")
