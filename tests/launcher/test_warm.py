"""Runs in a warm process, all real: what they get from it, and what they leave behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

EXAMPLES = Path(__file__).parents[2] / "examples/recipes"

RECIPE = """
import json, os, time
from pathlib import Path
from regression import Patients, Regression, RegressionSettings

class Settings(RegressionSettings):
    step_s: float = 0.0
    seen: str = ""

class Seeing(Regression):
    settings = Settings

    def loss(self, model, batch):
        told = {name: os.environ.get(name) for name in ("OF_THE_FILE", "OF_THE_TERMINAL")}
        # The driver tries a recipe, too, but has no rank.
        who = f"rank-{os.environ['RANK']}" if "RANK" in os.environ else "driver"
        Path(self.config.seen, f"{who}-{os.getpid()}.json").write_text(json.dumps(told))
        time.sleep(self.config.step_s)
        return super().loss(model, batch)
"""

CANARY = "canary-of-the-terminal-53170"

USED = "this run uses the warm Ray"


class Machine:
    """Starts commands that find each other's warm process, but not that of the developer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Short, since sockets lie below it.
        self.runtime = Path(tempfile.mkdtemp(prefix="tyw", dir="/tmp"))
        self.seen = folder / "seen"
        self.seen.mkdir()
        code = folder / "code"
        code.mkdir()
        shutil.copy(EXAMPLES / "regression.py", code)
        (code / "seeing.py").write_text(RECIPE)

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        variables = options.pop("variables", {})
        environment = os.environ | {"XDG_RUNTIME_DIR": str(self.runtime), **variables}
        return subprocess.Popen(
            [sys.executable, "-m", "trainyard", *arguments],
            env=environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **options,
        )

    def call(self, *arguments: str, code: int = 0, **options: Any) -> str:
        """The output of a command that ends with this exit code."""
        process = self.start(*arguments, **options)
        output, _ = process.communicate()
        assert process.returncode == code, output
        return output

    def run_file(self, name: str, *, epochs: int = 1, step_s: float = 0.0, **keys: Any) -> str:
        file = self.folder / f"{name}.yaml"
        run = {
            "name": name,
            "resources": {"workers": 1},
            "code": "code",
            "data": {"dataset": "seeing:Patients"},
            "train": {
                "recipe": "seeing:Seeing",
                "model": {"step_s": step_s, "seen": str(self.seen)},
                "epochs": epochs,
                "global_batch_size": 32,
            },
            "checkpoint": {"every_s": 1},
            **keys,
        }
        file.write_text(yaml.safe_dump(run))
        return file.name

    def state(self) -> dict[str, Any] | None:
        """What `warm status` tells; None if there is no warm process."""
        process = self.start("warm", "status", "--json")
        state: dict[str, Any] | None = json.loads(process.communicate()[0])
        return state

    def is_training(self) -> bool:
        """Whether a worker has begun a step of a run."""
        return any(self.seen.glob("rank-*"))

    def weights(self, run: str) -> dict[str, torch.Tensor]:
        return torch.load(self.folder / "runs" / run / "model.pt", weights_only=True)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    made = Machine(tmp_path_factory.mktemp("warm"))
    yield made
    made.call("warm", "down")
    shutil.rmtree(made.runtime)


@pytest.fixture
def warm(machine: Machine) -> Machine:
    """A machine with a Ray that is ready."""
    shutil.rmtree(machine.seen)
    machine.seen.mkdir()
    machine.call("warm", "up")
    return machine


def wait_until(condition: Callable[[], object], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for process in found:
        for task in Path(f"/proc/{process}/task").glob("*/children"):
            found += map(int, task.read_text().split())
    return found


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def memory_holds(pid: int, text: bytes) -> bool:
    """Whether the memory of a process, or its environment, holds a text."""
    with Path(f"/proc/{pid}/maps").open() as maps, Path(f"/proc/{pid}/mem").open("rb") as memory:
        for line in maps:
            place, rights, *_, name = line.split(maxsplit=5) + [""] * (line.count(" ") < 5)
            if not rights.startswith("rw") or "plasma" in name or "/dev/shm" in name:
                continue
            first, last = (int(each, 16) for each in place.split("-"))
            try:
                memory.seek(first)
                if text in memory.read(last - first):
                    return True
            except (OSError, ValueError):
                continue
    return False


@pytest.mark.ci
def test_a_run_in_the_warm_process_is_as_any_other_and_leaves_no_secret_there(
    warm: Machine,
) -> None:
    variables = {"OF_THE_TERMINAL": CANARY}
    keys = {
        "env": {"OF_THE_FILE": "1 $(a)"},
        "secrets": {"OF_THE_TERMINAL": {"name": "a", "key": "b"}},
    }
    output = warm.call("train", warm.run_file("warm", **keys), variables=variables)
    assert USED in output
    assert "not forked" not in output
    seen = [json.loads(file.read_text()) for file in warm.seen.iterdir()]
    assert seen == [{"OF_THE_FILE": "1 $(a)", "OF_THE_TERMINAL": CANARY}] * 2  # driver and worker
    # All that it has started, also the next prepared Ray, has memory without the secret.
    wait_until(lambda: (warm.state() or {})["is_ready"])
    state = warm.state()
    assert state is not None
    assert state["runs"] >= 1
    assert state["running"] == 0
    processes = family(state["pid"])
    assert len(processes) > 4
    assert not [pid for pid in processes if memory_holds(pid, CANARY.encode())]
    # A cold run has the same weights.
    cold = {**variables, "XDG_RUNTIME_DIR": str(warm.folder / "none")}
    output = warm.call("train", warm.run_file("cold", **keys), variables=cold)
    assert USED not in output
    found, expected = warm.weights("warm"), warm.weights("cold")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    # The record of the start counts from the command, not from the start of the warm process.
    attempt = json.loads((warm.folder / "runs/warm/attempts.jsonl").read_text())
    assert attempt["imports_s"] < 10


@pytest.mark.ci
def test_two_runs_at_once_have_a_ray_each(warm: Machine) -> None:
    first, second = (
        warm.start("train", warm.run_file(name, step_s=0.1)) for name in ("one", "two")
    )
    outputs = [process.communicate()[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], outputs
    told = sorted(line for output in outputs for line in output.splitlines() if USED in line)
    assert told == [USED, f"{USED}, which had to be started first"]


@pytest.mark.ci
def test_a_run_goes_on_when_the_warm_process_is_killed(warm: Machine) -> None:
    state = warm.state()
    assert state is not None
    process = warm.start("train", warm.run_file("orphan", epochs=3, step_s=0.1))
    wait_until(warm.is_training)
    own = family(state["pid"])
    os.kill(state["pid"], signal.SIGKILL)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert "succeeded" in output
    assert warm.state() is None
    wait_until(lambda: not any(map(is_running, own)))


@pytest.mark.ci
def test_a_prepared_ray_ends_with_the_warm_process(warm: Machine) -> None:
    state = warm.state()
    assert state is not None
    own = family(state["pid"])
    os.kill(state["pid"], signal.SIGKILL)
    wait_until(lambda: not any(map(is_running, own)))


@pytest.mark.ci
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "Ctrl-C"])
def test_a_run_ends_with_its_command_and_goes_on_where_it_was(
    warm: Machine, number: signal.Signals
) -> None:
    name = f"ended-{number.name.lower()}"
    file = warm.run_file(name, epochs=8, step_s=0.1)
    process = warm.start("train", file)
    wait_until(warm.is_training)
    state = warm.state()
    assert state is not None
    own = family(state["pid"])
    process.send_signal(number)
    output, _ = process.communicate()
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    # All but the warm process itself and what it prepares anew.
    wait_until(lambda: sum(map(is_running, own)) <= 1)
    summary = json.loads((warm.folder / "runs" / name / "summary.json").read_text())
    assert summary["outcome"] == "stopped"
    assert 0 < summary["steps"] < 8 * 12
    output = warm.call("train", file)
    assert USED in output
    assert "start: checkpoint" in output


@pytest.mark.ci
def test_a_driver_that_is_killed_is_told_as_such(warm: Machine) -> None:
    state = warm.state()
    assert state is not None
    process = warm.start("train", warm.run_file("killed", epochs=8, step_s=0.1))
    wait_until(warm.is_training)
    (server,) = family(state["pid"])[1:2]
    driver = family(server)[1]
    os.kill(driver, signal.SIGKILL)
    output, _ = process.communicate()
    assert process.returncode == 1
    assert "run killed failed (exit code -9)" in output


@pytest.mark.ci
def test_a_run_that_fails_has_its_exit_code_and_its_error(warm: Machine) -> None:
    output = warm.call("train", warm.run_file("wrong"), "--set", "train.epochs=0", code=2)
    assert "train.epochs" in output
    output = warm.call("train", warm.run_file("bad", data={"dataset": "seeing:None"}), code=2)
    assert USED in output
    assert "None" in output


def limited() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@pytest.mark.ci
def test_a_run_with_another_environment_starts_a_ray_of_its_own_and_says_why(warm: Machine) -> None:
    file = warm.run_file("other")
    output = warm.call("train", file, variables={"OMP_STACKSIZE": "3M"})
    assert (
        "the warm Ray is not used: the environment variable OMP_STACKSIZE is not the same" in output
    )
    output = warm.call("warm", "status", preexec_fn=limited, code=1)
    assert "runs do not use it: a limit of the terminal (ulimit, nice or taskset)" in output


@pytest.mark.ci
def test_the_warm_process_ends_when_it_is_not_used(machine: Machine) -> None:
    machine.call("warm", "down")
    output = machine.call("warm", "up", "--idle-minutes", "0.05")
    assert "is ready" in output
    wait_until(lambda: machine.state() is None)
    assert machine.call("warm", "status", code=1).startswith("there is no warm Ray")
    assert machine.call("warm", "down") == "there was no warm Ray\n"


@pytest.mark.ci
def test_a_folder_that_others_may_use_is_not_trusted(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    (machine.runtime / "trainyard").mkdir(mode=0o755)
    output = machine.call("warm", "up", code=1)
    assert "may be used by other users: its mode is not 700" in output
    output = machine.call("train", machine.run_file("cold"))
    assert "the warm process is not used" in output
    assert "succeeded" in output
