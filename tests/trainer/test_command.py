"""A program of one's own, as `python -m trainyard_trainer` starts it, on a real Ray of its own."""

from __future__ import annotations

import json
import runpy
import signal
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from attempts import Attempts, lines, read_json, read_records, wait_for

from trainyard.run_file.code.code_archive import pack
from trainyard_trainer.config.storage import Storage
from trainyard_trainer.config.trainer_config import CODE_VARIABLE, CommandConfig, FunctionConfig
from trainyard_trainer.run_files.names import RAY_SNAPSHOT
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.user_code.command import with_absolute_paths

EXAMPLE = Path(__file__).parents[2] / "examples/byo"
TELL = """
import os, sys, ray
ray.init()
print("told", sys.argv[1:], os.environ["TRAINYARD_ATTEMPT"], flush=True)
print("CPUs", ray.cluster_resources()["CPU"], flush=True)
"""


def command_config(attempts: Attempts, *command: str, **changes: Any) -> CommandConfig:
    document: dict[str, Any] = {
        "name": "own",
        "command": list(command),
        "scaling": {"num_workers": 2, "use_gpu": False, "cpus_per_worker": 1},
        "storage": {"path": str(attempts.storage)},
    }
    return CommandConfig.model_validate(document | changes)


def with_code(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """What a config and an environment need for a folder of code."""
    code = pack(folder)
    return {"code_sha256": code.sha256}, {CODE_VARIABLE: code.text}


def test_a_program_is_told_its_numbers_and_finds_its_ray(attempts: Attempts) -> None:
    config = command_config(
        *(attempts, "python", "-c", TELL),
        *("{workers}", "{gpus}", "{storage}", "{run}", "{attempt}", "{{run}}"),
    )
    output = attempts.finish(config)
    told = ["2", "0", str(attempts.storage), "own", "1", "{run}"]
    assert f"told {told} 1" in output
    assert "CPUs 3.0" in output
    summary = read_json(config, "summary.json")
    assert lines(output, "summary") == [{key: summary[key] for key in summary if key != "record"}]
    assert (summary["outcome"], summary["attempts"]) == ("succeeded", 1)
    log = (attempts.storage / "own/logs/attempt-1.log").read_text()
    assert f"told {told}" in log
    (record,) = read_records(config, "attempts.jsonl")
    assert record["program"].endswith("own 1 '{run}'")
    assert wait_for(lambda: not attempts.processes(), 60)


@pytest.mark.parametrize(
    ("command", "code", "error"),
    [
        (("python", "-c", "raise SystemExit(7)"), 1, "the program ended with exit code 7"),
        pytest.param(
            *(("sh", "-c", "kill -9 $$"), 1, "the program ended with signal SIGKILL"),
            marks=pytest.mark.ci,
        ),
        pytest.param(
            *(("no-such-program",), 2, "the command cannot be started"), marks=pytest.mark.ci
        ),
    ],
)
def test_a_program_that_fails_fails_the_run(
    attempts: Attempts, command: tuple[str, ...], code: int, error: str
) -> None:
    config = command_config(attempts, *command)
    output = attempts.finish(config, code)
    assert f"error: {error}" in output
    summary = read_json(config, "summary.json")
    assert summary["outcome"] == "failed"
    assert error in summary["error"]


def test_a_folder_of_a_recipe_is_not_taken_over(attempts: Attempts) -> None:
    folder = RunFolder.open(str(attempts.storage), "own")
    folder.write(folder.run, json.dumps({"train": {}}))
    output = attempts.finish(command_config(attempts, "true"), 2)
    assert "trains a built-in recipe" in output


def test_sigterm_reaches_the_program_and_then_ends_the_attempt(fresh_attempts: Attempts) -> None:
    waits = (
        "import signal, time\n"
        "def leave(*_):\n    print('saved', flush=True); raise SystemExit(0)\n"
        "signal.signal(signal.SIGTERM, leave)\nprint('waits', flush=True)\ntime.sleep(600)\n"
    )
    config = command_config(fresh_attempts, "python", "-c", waits)
    driver = fresh_attempts.start(config)
    assert driver.stdout is not None
    assert any(line.strip() == "waits" for line in driver.stdout)
    driver.send_signal(signal.SIGTERM)
    output, _ = driver.communicate()
    assert driver.returncode == 1, output
    assert "saved" in output
    summary = read_json(config, "summary.json")
    assert summary["outcome"] == "stopped"
    assert "stopped by SIGTERM" in summary["error"]
    assert wait_for(lambda: not fresh_attempts.processes(), 60)


def trains(epochs: int) -> tuple[str, ...]:
    return ("python", "ray_train.py", "--num-workers", "{workers}", "--epochs", f"{epochs}")


@pytest.mark.slow
def test_a_script_with_ray_train_goes_on_after_a_kill_from_a_state_that_was_cut_off(
    attempts: Attempts,
) -> None:
    changes, environment = with_code(EXAMPLE)
    config = command_config(attempts, *trains(200), **changes)
    driver = attempts.start(config, environment)
    folder = attempts.storage / "own"
    assert wait_for((folder / f"{RAY_SNAPSHOT}.intact").exists, 240)
    (program,) = attempts.processes("ray_train.py")
    driver.kill()
    driver.communicate()
    assert wait_for(lambda: program not in attempts.processes(), 10)  # at once, by the kernel
    attempts.end_processes()
    reached = len(json.loads((folder / f"{RAY_SNAPSHOT}.intact").read_text())["checkpoint_results"])
    (folder / RAY_SNAPSHOT).write_text("{")

    output = attempts.finish(
        command_config(attempts, *trains(reached + 1), **changes), 0, environment
    )
    assert "its last intact copy is used" in output
    assert f"going on with epoch {reached}" in output
    assert f"after {reached + 1} epochs" in output
    assert read_json(config, "summary.json")["attempts"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "name"),
    [("mnist.py", "mnist"), ("resnet18.py", "resnet18"), ("ray_data.py", "tutorial")],
)
def test_a_tutorial_s_script_runs_as_it_is_and_goes_on_with_its_epochs(
    attempts: Attempts, script: str, name: str
) -> None:
    changes, environment = with_code(EXAMPLE)

    def trained(epochs: int) -> tuple[str, int]:
        command = ("python", script, "--num-workers", "{workers}", "--epochs", f"{epochs}")
        where = ("--storage-path", "{storage}/{run}")
        config = command_config(attempts, *command, *where, **changes)
        output = attempts.finish(config, 0, environment)
        return output, len(list((attempts.storage / "own" / name).glob("checkpoint_2*/state.pt")))

    output, checkpoints = trained(1)
    assert "'epoch': 0" in output
    assert checkpoints == 1
    again, checkpoints = trained(2)
    assert "'epoch': 0" not in again
    assert "after 2 epochs" in again
    assert checkpoints == 2


@pytest.mark.ci
def test_a_script_that_knows_nothing_of_ray_runs_as_it_is(attempts: Attempts) -> None:
    changes, environment = with_code(EXAMPLE)
    config = command_config(attempts, "python", "single.py", "3", **changes)
    assert "epoch 3: loss" in attempts.finish(config, 0, environment)


def test_a_script_reads_the_files_of_mnist_where_they_are(tmp_path: Path) -> None:
    pixels = torch.arange(2 * 28 * 28).reshape(2, 28, 28).to(torch.uint8)
    raw = tmp_path / "MNIST/raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        images = struct.pack(">4I", 2051, *pixels.shape) + pixels.numpy().tobytes()
        (raw / f"{part}-images-idx3-ubyte").write_bytes(images)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2I2B", 2049, 2, 7, 3))
    digits = runpy.run_path(str(EXAMPLE / "mnist.py"))["digits"]
    for found in (digits(tmp_path, train=True), digits(tmp_path, train=False)):
        images, labels = found.tensors
        assert torch.equal(images, pixels.unsqueeze(1) / 255)
        assert labels.tolist() == [7, 3]
    assert digits(tmp_path / "nowhere", train=True).tensors[0].shape == (1437, 1, 28, 28)


def function_config(attempts: Attempts, function: str, **changes: Any) -> FunctionConfig:
    document = command_config(attempts, "true").model_dump(
        exclude={"command", "run_with", "library_hook"}
    )
    return FunctionConfig.model_validate(document | {"function": function} | changes)


@pytest.mark.ci
def test_a_function_is_called_by_ray_train_and_its_reports_are_the_progress(
    attempts: Attempts,
) -> None:
    changes, environment = with_code(EXAMPLE)
    loop: dict[str, Any] = {"train_loop_config": {"epochs": 3, "learning_rate": 0.5}}
    config = function_config(attempts, "loop:train", **changes, **loop)
    output = attempts.finish(config, 0, environment)
    summary = read_json(config, "summary.json")
    assert (summary["program"], summary["metrics"]["epoch"]) == ("loop:train", 3)
    records = read_records(config, "metrics.jsonl")
    assert [(each["reports"], each["metrics"]["epoch"]) for each in records] == [
        *((1, 1), (2, 2), (3, 3))
    ]
    assert lines(output, "progress")[-1] == records[-1]
    assert len(list((attempts.storage / "own").glob("checkpoint_2*"))) == 2


ROWS = """
import tempfile
from pathlib import Path

import ray.train
from torch import distributed


def train(config):
    first = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            first = int((Path(folder) / "epochs").read_text())
    shard = ray.train.get_dataset_shard("train")
    for epoch in range(first + 1, config["epochs"] + 1):
        had = [id for batch in shard.iter_batches() for id in batch["id"].tolist()]
        shares = [None] * ray.train.get_context().get_world_size()
        distributed.all_gather_object(shares, had)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "epochs").write_text(f"{epoch}")
            checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"epoch": epoch, "shares": shares}, checkpoint=checkpoint)
"""


@pytest.mark.slow
def test_a_function_has_its_part_of_the_rows_and_goes_on_with_its_epochs(
    attempts: Attempts, storage: tuple[str, str | None], tmp_path: Path
) -> None:
    path, endpoint = storage
    data = RunFolder.open(path, "data", endpoint)
    for start in range(0, 20, 5):
        with data.writing(f"{data.root}/{start}.parquet") as stream:
            pq.write_table(pa.table({"id": range(start, start + 5)}), stream)
    (tmp_path / "code").mkdir()
    (tmp_path / "code/rows.py").write_text(ROWS)
    changes, environment = with_code(tmp_path / "code")
    changes["storage"] = {"path": path, "endpoint": endpoint}
    changes["datasets"] = {"train": f"{path}/data"}
    for epochs in (2, 3):
        loop = {"train_loop_config": {"epochs": epochs}}
        config = function_config(attempts, "rows:train", **changes, **loop)
        attempts.finish(config, 0, environment)
    folder = RunFolder.open(path, "own", endpoint)
    records = [json.loads(line) for line in folder.read(folder.metrics).decode().splitlines()]
    told = [(each["attempt"], each["metrics"]["epoch"]) for each in records]
    assert told == [(1, 1), (1, 2), (2, 3)]
    for each in records:
        one, other = each["metrics"]["shares"]
        assert len(one) == len(other) == 10
        assert sorted(one + other) == [*range(20)]


def test_rows_of_a_relative_path_are_those_of_where_the_run_was_started(
    attempts: Attempts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = {"train": "rows", "valid": "s3://bucket/rows"}
    config = function_config(attempts, "rows:train", datasets=datasets)
    monkeypatch.chdir(tmp_path)
    found = with_absolute_paths(config)
    assert isinstance(found, FunctionConfig)
    assert found.datasets == {"train": str(tmp_path / "rows"), "valid": "s3://bucket/rows"}


@pytest.mark.ci
def test_a_function_that_is_not_there_is_named(attempts: Attempts) -> None:
    changes, environment = with_code(EXAMPLE)
    config = function_config(attempts, "loop:trian", **changes)
    output = attempts.finish(config, 2, environment)
    assert "error: function = loop:trian: module loop has no trian" in output


@pytest.mark.ci
def test_a_function_that_fails_names_the_file_and_the_line_of_its_own_code(
    attempts: Attempts, tmp_path: Path
) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "loop.py").write_text(
        "from steps import one_step\n\ndef train(config):\n    one_step(config['label'])\n"
    )
    (folder / "steps.py").write_text(
        "def one_step(label):\n    raise ValueError(f'no class for {label}')\n"
    )
    changes, environment = with_code(folder)
    changes |= {"train_loop_config": {"label": "cat"}, "faults": {"worker_failures": 0}}
    output = attempts.finish(function_config(attempts, "loop:train", **changes), 1, environment)
    error = (
        "the program ended with exit code 1: ValueError: no class for cat (steps.py:2 in one_step)"
    )
    assert f"error: {error}" in output
    assert "trainyard_trainer/user_code/function.py" not in output


COMMON_NAMES = (
    "trainer",
    "launcher",
    "config",
    "types_",
    "utils",
    "run_files",
    "storage",
    "errors",
)
"""Modules of user code whose names are common, or are those of rooms of our own packages."""

COMMON_PACKAGES = ("data", "tests", "engine", "recipes")

IMPORTS_ALL = f"""
import importlib

NAMES = {COMMON_NAMES + COMMON_PACKAGES}


def check():
    for name in NAMES:
        assert importlib.import_module(name).OWNER == "user", name
    assert importlib.import_module("data.loading").OWNER == "user"
"""

REPORTS_TO_RAY = """
import ray.train
import torch

from imports import NAMES, check


def train(config):
    check()
    model = ray.train.torch.prepare_model(torch.nn.Linear(2, 1))
    model(torch.ones(4, 2)).sum().backward()
    ray.train.report({"modules": len(NAMES)})
"""

USES_RAY_TRAIN = """
import ray.train
import ray.train.torch
from trainyard_trainer.user_code.run_config import run_config

from imports import check
from trainer import train

check()
scaling = ray.train.ScalingConfig(num_workers=2)
ray.train.torch.TorchTrainer(train, scaling_config=scaling, run_config=run_config()).fit()
print("imported its own modules", flush=True)
"""

USES_TORCHRUN = """
import torch
from torch import distributed

from imports import check

check()
distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
model(torch.ones(4, 2)).sum().backward()
distributed.destroy_process_group()
print("imported its own modules", flush=True)
"""


@pytest.fixture
def common_names(tmp_path: Path) -> Path:
    """A folder of user code whose modules have common names."""
    folder = tmp_path / "code"
    for package in COMMON_PACKAGES:
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text('OWNER = "user"\n')
        (folder / package / "loading.py").write_text('OWNER = "user"\n')
    for module in COMMON_NAMES:
        (folder / f"{module}.py").write_text('OWNER = "user"\n')
    (folder / "imports.py").write_text(IMPORTS_ALL)
    (folder / "trainer.py").write_text('OWNER = "user"\n' + REPORTS_TO_RAY)
    (folder / "with_ray_train.py").write_text(USES_RAY_TRAIN)
    (folder / "with_torchrun.py").write_text(USES_TORCHRUN)
    return folder


@pytest.mark.slow
def test_modules_of_a_function_s_code_may_have_any_name(
    attempts: Attempts, common_names: Path
) -> None:
    changes, environment = with_code(common_names)
    config = function_config(attempts, "trainer:train", **changes)
    attempts.finish(config, 0, environment)
    assert read_json(config, "summary.json")["metrics"] == {
        "modules": len(COMMON_NAMES + COMMON_PACKAGES)
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "changes"),
    [
        (("python", "with_ray_train.py"), {}),
        (("python", "-m", "with_ray_train"), {}),
        (("with_torchrun.py",), {"run_with": "torchrun"}),
    ],
)
def test_modules_of_a_command_s_code_may_have_any_name(
    attempts: Attempts, common_names: Path, command: tuple[str, ...], changes: dict[str, str]
) -> None:
    code, environment = with_code(common_names)
    config = command_config(attempts, *command, **code, **changes)
    assert "imported its own modules" in attempts.finish(config, 0, environment)


@pytest.mark.slow
def test_torchrun_starts_a_script_once_for_each_worker_and_a_retry_goes_on(
    attempts: Attempts,
) -> None:
    changes, environment = with_code(EXAMPLE)

    def trained(epochs: int) -> str:
        command = ("ddp.py", "--epochs", f"{epochs}", "--checkpoint", "{storage}/{run}/state.pt")
        config = command_config(attempts, *command, run_with="torchrun", **changes)
        return attempts.finish(config, 0, environment)

    assert "epoch 2 of 2 workers" in trained(2)
    again = trained(3)
    assert "epoch 3 of 2 workers" in again
    assert "epoch 2 of" not in again


@pytest.mark.slow
def test_workers_of_torchrun_meet_at_an_address_for_no_pod_can_resolve_another_s_name(
    attempts: Attempts,
) -> None:
    meet = "import ipaddress, os; ipaddress.ip_address(os.environ['MASTER_ADDR'])"
    faults = {"worker_failures": 0}
    config = command_config(attempts, "-c", meet, run_with="torchrun", faults=faults)
    attempts.finish(config)


@pytest.mark.slow
def test_a_script_that_fails_under_torchrun_fails_the_run(attempts: Attempts) -> None:
    faults = {"worker_failures": 0}
    config = command_config(attempts, "no-such.py", run_with="torchrun", faults=faults)
    output = attempts.finish(config, 1)
    assert "can't open file" in output
    assert "error: the program ended with exit code 1" in output


@pytest.mark.parametrize(
    ("storage", "uri"),
    [
        (Storage(path="/mnt/runs"), "/mnt/runs"),
        (Storage(path="s3://runs/team"), "s3://runs/team"),
        (
            Storage(path="s3://runs/team", endpoint="http://minio:9000"),
            "s3://runs/team?scheme=http&endpoint_override=minio:9000",
        ),
    ],
)
def test_a_storage_is_told_as_ray_takes_it(storage: Storage, uri: str) -> None:
    assert storage.uri == uri
    assert Storage.of_uri(uri) == storage
