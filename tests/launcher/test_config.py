"""A run file is read strictly, and all its problems come at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainyard.errors import ConfigError
from trainyard.planning.trainer_input import trainer_config
from trainyard.run_file.load import load_name, load_run
from trainyard_trainer.config.scaling import Scaling
from trainyard_trainer.config.storage import Storage
from trainyard_trainer.config.trainer_config import CONFIG_VARIABLE, FunctionConfig, read_config

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
        (
            "env.DEBUG=1",
            'env.DEBUG = 1: must be text, and YAML reads it as a number: quote it, "1"',
        ),
        ("env={A-B: x}", "env.A-B = 'A-B': string should match pattern"),
        ("env={1ST: x}", "env.1ST = '1ST': string should match pattern"),
        ("env={RAY_ADDRESS: x}", "env.RAY_ADDRESS = 'RAY_ADDRESS': must be another name"),
        ("env={TRAINYARD_X: x}", "env.TRAINYARD_X = 'TRAINYARD_X': must be another name"),
        ("env={PYTHONPATH: x}", "env.PYTHONPATH = 'PYTHONPATH': must be another name"),
        (
            "env={A: a$HOME}",
            "env.A = 'a$HOME': must not refer to another variable as $NAME or ${NAME}",
        ),
        ("env={A: '${HOME}/x'}", "env.A = '${HOME}/x': must not refer to another variable"),
        ("secrets={A: {name: Hub, key: a}}", "secrets.A.name = 'Hub': string should match pattern"),
        ("secrets={A: {name: hub, key: ..}}", "secrets.A.key = '..': string should match pattern"),
        ("secrets={A: {name: hub}}", "secrets.A.key: is required"),
        ("secrets={A: {name: hub, keys: a}}", "secrets.A.keys: unknown key; did you mean key?"),
        ("secrets={RANK: {name: hub, key: a}}", "secrets.RANK = 'RANK': must be another name"),
        ("labels={a/b/c: x}", "labels.a/b/c = 'a/b/c': must be NAME or DOMAIN/NAME"),
        ("labels={Example.com/a: x}", "must be NAME or DOMAIN/NAME"),
        ("labels={ray.io/a: x}", "labels.ray.io/a = 'ray.io/a': must be another key"),
        ("labels={team: a b}", "labels.team = 'a b': string should match pattern"),
        ("labels={team: 1}", "labels.team = 1: must be text, and YAML reads it as a number: quote"),
        (
            f"annotations={{a: {'x' * 40000}}}",
            "must have at most 32768 bytes together, and have 40001",
        ),
        ('env={A: "\\0"}', "env.A = '\\x00': must not contain a NUL character"),
        ("image=trainyard:latest", "must have a tag other than latest"),
        ("image=registry/TrainYard:1", "with NAME in lower case"),
        ("image=trainyard@sha256:abc", "NAME@sha256:<64 digits>"),
    ],
)
def test_a_wrong_value_names_its_path_and_the_rule(setting: str, problem: str) -> None:
    assert problem in refusal(DIGITS, setting)


def test_a_variable_is_set_by_a_value_or_by_a_secret() -> None:
    settings = ("env={A: x, B: x}", "secrets={A: {name: hub, key: a}}")
    assert "env.A and secrets.A set the same variable" in refusal(DIGITS, *settings)


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1: 2", "1: the key must be text, and YAML reads it as a number"),
        ("train_loop_config: {on: 3}", 'quote it, such as "on":'),
        ("train_loop_config: {when: 2024-01-01}", "when: is a date, which JSON cannot represent"),
        ("train_loop_config: {x: !!binary aGk=}", "x: is a bytes"),
        ("train_loop_config: {x: [1, .nan]}", "train_loop_config.x.1: is not a number"),
        ("train_loop_config: {x: 1e400}", "1e400 is too large"),
        ("train_loop_config: {x: 1e-400}", "1e-400 is too small"),
        ("train_loop_config: &a {x: *a}", "an alias leads to one that contains it"),
        (f"train_loop_config: {{x: {'[' * 200}{']' * 200}}}", "nested more than 100 levels deep"),
        ("train_loop_config: {x: 010}", "010 begins with 0"),
    ],
)
def test_what_cannot_travel_is_refused_by_its_path(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"{text}\n")
    assert message in refusal(path)


FUNCTION = "name: a\nresources: {workers: 1}\nfunction: m:train\n"
COMMAND = "name: a\nresources: {workers: 1}\n"


def test_numbers_reach_the_function_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        FUNCTION
        + "train_loop_config: {lr: 1e-4, a: .inf, b: -.inf, c: 123456789012345678901234567890, "
        "d: 1.0, e: 12:30, f: 0x10, g: '1e-4'}\n"
    )
    given = {"lr": 1e-4, "a": math.inf, "b": -math.inf, "c": 123456789012345678901234567890}
    given |= {"d": 1.0, "e": "12:30", "f": 16, "g": "1e-4"}
    for run in (load_run(path), load_run({**yaml.safe_load(FUNCTION), "train_loop_config": given})):
        scaling = Scaling(num_workers=1, use_gpu=False, cpus_per_worker=1)
        config = trainer_config(run, scaling, Storage(path="/a"))
        arrived = read_config({CONFIG_VARIABLE: config.model_dump_json()})
        assert isinstance(arrived, FunctionConfig)
        assert list(map(repr, arrived.train_loop_config.values())) == list(
            map(repr, given.values())
        )


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("python t.py --epochs 3", 'must be a list: write [python, t.py, --epochs, "3"]'),
        (
            "[python, 3]",
            'command.1 = 3: must be text, and YAML reads it as a number: quote it, "3"',
        ),
        ("[python, yes]", 'truth value: quote it, such as "yes"'),
        ("[python, 1e-3]", 'quote it, "0.001"'),
        ("[]", "command = []: must have at least 1 item"),
    ],
)
def test_a_command_says_what_to_quote(tmp_path: Path, command: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"{COMMAND}command: {command}\n")
    assert message in refusal(path)


@pytest.mark.parametrize(
    "scheme", ["gs://", "hf://", "https://", "abfs://", "file:///", "s3a://", "S3://"]
)
@pytest.mark.parametrize("key", ["source", "valid_source"])
def test_a_source_that_no_reader_knows_is_refused(write_run: Write, scheme: str, key: str) -> None:
    source = {"source": "digits", key: f"{scheme}bucket/photos"}
    message = refusal(write_run({"data": source}))
    assert f"data.{key}" in message
    assert "is neither a folder nor s3://bucket/prefix" in message


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
