"""How long `trainyard train` takes to its first step, by phase, beside what torch and Ray take alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from tests.bench import data, runs
from tests.bench.processes import CpuSeconds, descendants, started_at
from tests.bench.rounds import BUILD, ROOT, Options, Row, Section, main, say
from trainyard_trainer.on_ray.local_ray.mode import LocalRayMode
from trainyard_trainer.run_files.local_ray import LOCAL_RAY_VARIABLE

TRAINYARD = str(ROOT / ".venv/bin/trainyard")

MOST_S = 3.0
"""Above torch's import and Ray's start."""

MOST_COLD_S = 10.0

MOST_WARM_S = 4.0

LOOK_S = 0.02

CPU_LOOK_S = 0.2
"""Seconds between two looks at the CPU time of all processes of a run."""

CPU = "cpu"
"""The key of the CPU seconds up to the first step, beside the phases."""

MEMORY = "memory"
"""The key of the memory of the warm Ray before the run, in GiB."""

PHASES = {
    "launcher": "`trainyard` until its program runs",
    "import": "Python and its imports",
    "lease": "checks, lease",
    "prepare": "data",
    "ray": "Ray starts",
    "workers": "worker group starts",
    "model": "place in the run, model, process group",
    "first_batch": "first batch",
    "first_step": "first step",
}

RAY = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_API_SERVER_ADDRESS": "http://127.0.0.1:9",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_worker_niceness": "0",
}
"""What the trainer says to Ray, too: the same Ray is to be started."""

BARE = """
import json, sys, time
marks = [time.time()]
def mark(): marks.append(time.time())
import torch; mark()
import ray; mark()
ray.init(address="local", num_cpus=3, include_dashboard=False, logging_level="ERROR",
         log_to_driver=False, _temp_dir=sys.argv[1]); mark()
import ray.train.torch; mark()
result = ray.train.torch.TorchTrainer(
    lambda: {"at": time.time()},
    scaling_config=ray.train.ScalingConfig(num_workers=2),
    run_config=ray.train.RunConfig(storage_path=sys.argv[1] + "/train",
                                   logging_config=ray.train.LoggingConfig(log_level="ERROR")),
).fit()
marks.append(result.return_value["at"])
names = ("torch", "ray", "init", "train", "workers")
print(json.dumps({n: b - a for n, a, b in zip(names, marks, marks[1:])}))
ray.shutdown()
"""


def start_bare() -> dict[str, float]:
    """Seconds of a script that imports torch, starts Ray, and has two workers do nothing."""
    with tempfile.TemporaryDirectory(prefix="ty-bare-", dir="/tmp") as scratch:
        done = subprocess.run(
            [sys.executable, "-c", BARE, scratch],
            check=True,
            capture_output=True,
            text=True,
            env=os.environ | RAY,
        )
    found = json.loads(done.stdout.splitlines()[-1])
    say("  bare: " + told(found))
    return found


def start_ours(path: Path, mode: LocalRayMode) -> dict[str, float]:
    """Seconds of each phase of a run with two workers, and CPU seconds up to the first step."""
    found, _ = start(path, {LOCAL_RAY_VARIABLE: mode, "XDG_RUNTIME_DIR": "/nonexistent"})
    say(f"  {mode}: " + told(found))
    return found


@contextmanager
def warm_ray() -> Iterator[dict[str, str]]:
    """Yield the variables with which commands use a warm Ray of this bench alone."""
    with tempfile.TemporaryDirectory(prefix="ty-warm-", dir="/tmp") as folder:
        variables = {"XDG_RUNTIME_DIR": folder}
        try:
            yield variables
        finally:
            warm("down", variables)


def warm(command: str, variables: dict[str, str]) -> str:
    """The output of a command of `trainyard warm`."""
    environment = os.environ | variables
    return subprocess.check_output(
        [TRAINYARD, "warm", *command.split()], env=environment, text=True
    )


def start_warm(path: Path, variables: dict[str, str]) -> dict[str, float]:
    """The same for a run that uses the warm Ray once that is ready, and the memory of the warm Ray."""
    warm("up", variables)
    state = json.loads(warm("status --json", variables))
    found, log = start(path, variables, CpuSeconds(state["pid"]))
    if "this run uses the warm Ray" not in log:
        raise RuntimeError(f"the warm Ray was not used:\n{log[-2000:]}")
    found[MEMORY] = state["memory_bytes"] / 2**30
    say("  warm: " + told(found))
    return found


def start(
    path: Path, variables: dict[str, str], warm_cpu: CpuSeconds | None = None
) -> tuple[dict[str, float], str]:
    """Train, and return the phases with the CPU seconds, and the output.

    `warm_cpu` are the CPU seconds of the warm process, if the run is to use it.
    """
    run_file = write_run(path)
    shutil.rmtree(BUILD / "runs" / "startup", ignore_errors=True)
    command = [TRAINYARD, "train", str(run_file), "--storage", str(BUILD / "runs")]
    before_s = warm_cpu.look() if warm_cpu else 0.0
    began, program_began = time.time(), None
    cpu: list[tuple[float, float]] = []
    with tempfile.TemporaryFile() as log:
        environment = os.environ | variables
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        used = CpuSeconds(process.pid)
        while process.poll() is None:
            if program_began is None and not warm_cpu:
                program_began = program_start(process.pid)
                time.sleep(LOOK_S)
            else:
                cpu_s = used.look() + (warm_cpu.look() - before_s if warm_cpu else 0.0)
                cpu.append((time.time(), cpu_s))
                time.sleep(CPU_LOOK_S)
        log.seek(0)
        output = log.read().decode()
    if process.returncode:
        raise RuntimeError(f"`trainyard train` failed:\n{output[-2000:]}")
    told_by_run = json.loads((BUILD / "runs" / "startup" / "summary.json").read_text())["startup"]
    program_s = told_by_run.pop("began")
    # The warm process has imported everything: its program begins with the attempt.
    program_began = program_s if warm_cpu else program_began
    assert program_began is not None
    found = {"launcher": program_began - began, "import": program_s - program_began} | told_by_run
    first_step = program_s + sum(told_by_run.values())
    found[CPU] = next((seconds for at, seconds in cpu if at >= first_step), cpu[-1][1])
    return found, output


def write_run(path: Path) -> Path:
    """A run file for images that are prepared."""
    file = BUILD / "startup.yaml"
    run = {
        "name": "startup",
        "resources": {"workers": 2},
        "data": {"source": str(path)},
        "train": {"model": runs.RESNET18, "epochs": 1, "global_batch_size": 64},
    }
    file.write_text(yaml.safe_dump(run))
    return file


def program_start(pid: int) -> float | None:
    """When the launcher's training program started; None while it has not."""
    programs = [
        process for process in descendants(pid) if "start.py trainyard_trainer" in process.command
    ]
    return started_at(programs[0].pid) if programs else None


def told(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())


def measure(options: Options) -> list[Section]:
    path = data.grey_images(400)
    with warm_ray() as variables:
        found = [
            (
                start_ours(path, "forked"),
                start_warm(path, variables),
                start_ours(path, "full"),
                start_bare(),
            )
            for _ in range(options.rounds_or(5))
        ]

    def row(what: str, seconds: Callable[..., float], at_most: float | None = None) -> Row:
        values = tuple(seconds(*each) for each in found)
        return Row(what=what, unit="s", values=values, at_most=at_most)

    def bare(*names: str) -> Callable[..., float]:
        return lambda ours, warm, full, bare: sum(bare[name] for name in names)

    def wall(ours: dict[str, float]) -> float:
        return sum(ours[phase] for phase in PHASES)

    rows = (
        row("to the end of the first step", lambda ours, warm, full, bare: wall(ours), MOST_COLD_S),
        row("- CPU seconds of all processes", lambda ours, warm, full, bare: ours[CPU]),
        row("with a warm Ray", lambda ours, warm, full, bare: wall(warm), MOST_WARM_S),
        row("- CPU seconds of all processes of that run", lambda ours, warm, full, bare: warm[CPU]),
        row("- until its driver begins", lambda ours, warm, full, bare: warm["launcher"]),
        row("- its worker group starts", lambda ours, warm, full, bare: warm["workers"]),
        row("with TRAINYARD_LOCAL_RAY=full", lambda ours, warm, full, bare: wall(full)),
        row("- CPU seconds of all its processes", lambda ours, warm, full, bare: full[CPU]),
        *(
            row(f"- {words}", lambda ours, warm, full, bare, phase=phase: ours[phase])
            for phase, words in PHASES.items()
        ),
        row("bare: `import torch`", bare("torch")),
        row("bare: `import ray`", bare("ray")),
        row("bare: `ray.init`", bare("init")),
        row(
            "bare: `import ray.train.torch`, two workers that do nothing", bare("train", "workers")
        ),
        row(
            "above bare `import torch`, `import ray` and `ray.init`",
            lambda ours, warm, full, bare: wall(ours) - bare["torch"] - bare["ray"] - bare["init"],
            MOST_S,
        ),
        row(
            "above all of bare",
            lambda ours, warm, full, bare: wall(ours) - sum(bare.values()),
        ),
    )
    notes = (
        "2 CPU workers, ResNet-18, images of 28x28 that are prepared. "
        "Each round: ours with forked workers, ours with a warm Ray, ours with `full`, bare.",
    )
    gib = tuple(warm[MEMORY] for _, warm, _, _ in found)
    memory = Row(what="memory of a warm Ray that waits", unit="GiB", values=gib)
    return [Section(title="Start of a run on this machine", rows=(*rows, memory), notes=notes)]


if __name__ == "__main__":
    main(measure)
