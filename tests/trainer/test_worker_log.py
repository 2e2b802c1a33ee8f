"""The logs of workers in the run's folder: bounded, up to date, and there after the worker is gone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from attempts import Attempts, read_json, wait_for

from trainyard.run_file.code.code_archive import pack
from trainyard_trainer.config.trainer_config import CODE_VARIABLE, FunctionConfig
from trainyard_trainer.errors import StorageError
from trainyard_trainer.run_files.names import WorkerLogName
from trainyard_trainer.run_folder import worker_log
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.worker_log import LEFT_OUT, WorkerLog, begin_group

NAME = WorkerLogName(attempt=1, group=1, rank=3)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.open(str(tmp_path), "small")


@pytest.fixture
def streams(tmp_path: Path) -> list[Path]:
    files = [tmp_path / "worker.out", tmp_path / "worker.err"]
    for file in files:
        file.touch()
    return files


def log_of(folder: RunFolder, streams: list[Path], **changes: Any) -> WorkerLog:
    settings: dict[str, Any] = {"interval_s": 0.01, "first_s": 0.01, "limit": 1000} | changes
    return WorkerLog(folder, str(NAME), streams, **settings)


def kept(folder: RunFolder) -> str:
    path = f"{folder.root}/{NAME}"
    return folder.read(path).decode() if folder.exists(path) else ""


def say(file: Path, text: str) -> None:
    with file.open("a") as stream:
        stream.write(text)


def test_both_streams_are_copied_while_the_worker_runs(
    folder: RunFolder, streams: list[Path]
) -> None:
    log = log_of(folder, streams)
    say(streams[0], "step 1\n")
    assert wait_for(lambda: kept(folder) == "step 1\n", 10)
    say(streams[1], "a warning\n")
    assert wait_for(lambda: kept(folder) == "step 1\na warning\n", 10)
    log.end()


def test_the_end_of_a_worker_is_in_its_log_with_the_error(
    folder: RunFolder, streams: list[Path]
) -> None:
    log = log_of(folder, streams, first_s=3600)
    say(streams[0], "the last step\n")
    log.end("Traceback (most recent call last):\nValueError: no luck\n")
    assert kept(folder).splitlines()[-1] == "ValueError: no luck"
    assert kept(folder).startswith("the last step\n")


@pytest.mark.parametrize("pieces", [1, 7])
def test_a_long_log_is_cut_at_its_beginning_to_whole_lines(
    folder: RunFolder, streams: list[Path], pieces: int
) -> None:
    log = log_of(folder, streams, first_s=3600)
    lines = [f"line {number:03}\n" for number in range(210)]
    for first in range(0, len(lines), len(lines) // pieces):
        say(streams[0], "".join(lines[first : first + len(lines) // pieces]))
        log._read()
    log.end()
    beginning, *rest = kept(folder).splitlines(keepends=True)
    assert beginning.encode() == LEFT_OUT
    assert rest == lines[-len(rest) :] or rest[1:] == lines[1 - len(rest) :]
    assert 900 < sum(map(len, rest)) <= 1000


def test_a_file_that_ray_has_begun_again_is_read_from_its_beginning(
    folder: RunFolder, streams: list[Path]
) -> None:
    log = log_of(folder, streams)
    say(streams[0], "a long line before\n")
    assert wait_for(lambda: kept(folder), 10)
    streams[0].write_text("new\n")
    assert wait_for(lambda: kept(folder) == "a long line before\nnew\n", 10)
    log.end()


def test_the_marks_of_ray_are_left_out(folder: RunFolder, streams: list[Path]) -> None:
    log = log_of(folder, streams)
    say(
        streams[0],
        ":job_id:01000000\n:actor_name:RayTrainWorker\nstep :actor_name:\n:task_name:a\n",
    )
    log.end()
    assert kept(folder) == "step :actor_name:\n"


def test_a_quiet_worker_asks_nothing_of_the_storage(
    folder: RunFolder, streams: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    monkeypatch.setattr(RunFolder, "write", lambda self, path, *_, **__: written.append(path))
    log = log_of(folder, streams)
    say(streams[0], "once\n")
    assert wait_for(lambda: written, 10)
    log.end()
    assert written == [f"{folder.root}/{NAME}"]


def test_what_the_storage_refuses_comes_with_the_next_copy(
    folder: RunFolder, streams: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, refused = RunFolder.write, [1, 2]

    def sometimes(self: RunFolder, *arguments: Any, **options: Any) -> None:
        if refused:
            refused.pop()
            raise StorageError("the bucket is away")
        write(self, *arguments, **options)

    monkeypatch.setattr(RunFolder, "write", sometimes)
    say(streams[0], "step 1\n")
    log = log_of(folder, streams)
    assert wait_for(lambda: kept(folder) == "step 1\n", 10)
    log.end()


@pytest.mark.parametrize(
    ("workers", "interval_s", "limit"), [(2, 10, 2**20), (512, 10.24, 2**20), (4096, 81.92, 2**17)]
)
def test_thousands_of_workers_neither_flood_nor_fill_the_storage(
    workers: int, interval_s: float, limit: int
) -> None:
    assert worker_log.interval_s(workers) == interval_s
    assert worker_log.limit_bytes(workers) == limit


def test_the_logs_of_the_last_worker_groups_are_kept(folder: RunFolder) -> None:
    numbers = []
    for attempt in (1, 1, 1, 2, 2, 3, 3):
        group = begin_group(folder, attempt)
        folder.write(f"{folder.root}/{WorkerLogName(attempt, group, 0)}", "")
        numbers.append((attempt, group))
    assert numbers == [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1), (3, 2)]
    assert folder.files() == [str(WorkerLogName(*number, 0)) for number in numbers[2:]]


def test_only_files_are_streams_of_a_worker(tmp_path: Path) -> None:
    program = "from trainyard_trainer.run_folder.worker_log import own_streams; import sys; "
    program += "open(sys.argv[1], 'w').write(' '.join(map(str, own_streams())))"
    told = tmp_path / "told"
    with (tmp_path / "out").open("w") as out:
        command = [sys.executable, "-c", program, str(told)]
        subprocess.run(command, stdout=out, stderr=subprocess.PIPE, check=True)
    assert told.read_text() == str(tmp_path / "out")


# On a real Ray.

CODE = """
import os, sys, time
import ray.train

def train(config):
    rank = ray.train.get_context().get_world_rank()
    print(f"worker {rank} begins", flush=True)
    print(f"worker {rank} warns", file=sys.stderr, flush=True)
    while not os.path.exists(config["go_on"]):
        time.sleep(0.1)
    if rank == 1:
        raise ValueError("no luck")
    time.sleep(300)
"""


@pytest.mark.ci
def test_a_killed_worker_leaves_its_log_and_so_does_one_that_fails(
    attempts: Attempts, tmp_path: Path
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code/job.py").write_text(CODE)
    code, go_on = pack(tmp_path / "code"), tmp_path / "go_on"
    document = {
        "name": "own",
        "function": "job:train",
        "train_loop_config": {"go_on": str(go_on)},
        "code_sha256": code.sha256,
        "scaling": {"num_workers": 2, "use_gpu": False, "cpus_per_worker": 1},
        "storage": {"path": str(attempts.storage)},
        "faults": {"worker_failures": 1},
    }
    config = FunctionConfig.model_validate(document)

    def log(group: int, rank: int) -> str:
        return attempts.read(config, str(WorkerLogName(1, group, rank)))

    driver = attempts.start(config, {CODE_VARIABLE: code.text})
    assert wait_for(lambda: "worker 1 warns" in log(1, 1), 180)
    workers = read_json(config, "workers.json")["workers"]
    assert [worker["rank"] for worker in workers] == [0, 1]
    os.kill(workers[1]["process"], signal.SIGKILL)
    assert wait_for(lambda: "worker 0 begins" in log(1, 0), 60), "it was ended in good order"
    go_on.touch()
    output, _ = driver.communicate()
    assert driver.returncode == 1, output
    assert "worker 1 begins" in log(1, 1)
    assert "worker 1 begins" in log(2, 1)
    assert log(2, 1).splitlines()[-1] == "ValueError: no luck"
    assert "Traceback" in log(2, 1)
    assert "Traceback" not in log(2, 0)
    (attempt,) = read_json(config, "run.json")["record"]
    assert attempt["code_sha256"] == code.sha256
    assert [node["name"] for node in attempt["nodes"]] == [socket.gethostname()]
    assert attempt["cpu_hours"] > 0
