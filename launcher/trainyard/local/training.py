"""Train a run on this machine: start the trainer as a child process and read its output."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

from trainyard.errors import ConfigError, RunFailed
from trainyard.local.tools import require_packages, stopped_like_ctrl_c
from trainyard.planning.trainer_input import trainer_config
from trainyard.run_file.code_archive import Overlay
from trainyard.run_file.models import BoostingRun, RunConfig, UserCodeRun
from trainyard.submission.status import Phase, RunStatus, error_lines
from trainyard_trainer.config.scaling import Scaling
from trainyard_trainer.config.storage import Storage
from trainyard_trainer.config.trainer_config import (
    CODE_VARIABLE,
    CONFIG_VARIABLE,
    AnyConfig,
    AttemptConfig,
    BoostingConfig,
)
from trainyard_trainer.run_files import exit_codes
from trainyard_trainer.run_files.driver_output import PROGRESS, SUMMARY, record_of
from trainyard_trainer.run_files.submission import code_file

NEEDED = ("ray", "torch", "torchvision", "sklearn", "matplotlib", "obstore", "tensorboardX")

Starter = Literal["ray", "torchrun", "alone"]
"""What starts the workers: Ray Train, torchrun, or nothing, where one process is the only worker."""


def local_config(
    run: RunConfig,
    storage: Path,
    cpus: int,
    starter: Starter = "ray",
    code: Overlay | None = None,
) -> AnyConfig:
    """Return the trainer's config of a run for this machine.

    The run has as many workers as on a cluster, which share `cpus`; an elastic run has its minimum. Raises
    ConfigError if the run cannot be started by `starter`.
    """
    if isinstance(run, UserCodeRun) and starter != "ray":
        raise ConfigError(
            f"run {run.name} runs user code, which is started on Ray only: --without-ray and --torchrun are "
            "for built-in recipes"
        )
    if isinstance(run, BoostingRun) and starter == "torchrun":
        raise ConfigError(
            f"run {run.name} trains no network: --torchrun is for recipes that do",
            "Use Ray, or --without-ray for one process.",
        )
    workers = 1 if starter == "alone" else run.resources.bounds[0]
    scaling = Scaling(
        num_workers=workers,
        use_gpu=run.resources.gpus is not None,
        cpus_per_worker=max(1, cpus // workers),
    )
    return trainer_config(run, scaling, Storage(path=str(storage.resolve())), code)


def program(config: AttemptConfig, starter: Starter) -> list[str]:
    """Return the command line that starts an attempt."""
    if starter == "ray":
        return [sys.executable, "-m", "trainyard_trainer"]
    baseline = ["-m", "trainyard_trainer", "--without-ray"]
    if starter == "alone":
        return [sys.executable, *baseline]
    processes = f"--nproc-per-node={config.scaling.num_workers}"
    torchrun = ["-m", "torch.distributed.run", "--standalone", processes]
    return [sys.executable, *torchrun, *baseline]


def train_locally(
    config: AttemptConfig, starter: Starter = "ray", code: Overlay | None = None
) -> Generator[RunStatus | str, None, None]:
    """Train a run; yield its status on each change, and the other lines that the trainer prints.

    Raises ConfigError if packages are missing or the trainer refuses the config, RunFailed if it fails.
    """
    library = (config.train.library,) if isinstance(config, BoostingConfig) else ()
    require_packages([*NEEDED, *library], "training")
    folder = Path(config.storage.path) / config.name
    noise = folder / "ray.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stderr = noise.open("wb")
    except OSError as error:
        raise ConfigError(
            f"the storage {config.storage.path} cannot be used: {error}",
            "Name a folder that you may write to with --storage DIR.",
        ) from error
    environment = os.environ | {CONFIG_VARIABLE: config.model_dump_json()}
    if code is not None and code.is_uploaded:
        _put(config, code)
    elif code is not None:
        environment[CODE_VARIABLE] = code.text
    # Only the main thread may set signal handlers; a pipeline may train in another thread.
    is_main = threading.current_thread() is threading.main_thread()
    with stderr, stopped_like_ctrl_c() if is_main else nullcontext():
        process = subprocess.Popen(
            program(config, starter),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            errors="replace",
            # Ctrl-C must reach Ray's processes through the trainer, not from the terminal too.
            start_new_session=True,
        )
        try:
            yield RunStatus(submission=config.name, phase="starting")
            assert process.stdout is not None
            for line in process.stdout:
                yield _read_line(config.name, line.rstrip("\n"))
            exit_code = process.wait()
        finally:
            _end(process)
    if exit_code == 0:
        return
    told = error_of(noise.read_text(errors="replace"))
    if exit_code == exit_codes.WRONG_INPUT:
        raise ConfigError(f"the training program refused run {config.name}", *told)
    raise RunFailed(
        f"run {config.name} failed (exit code {exit_code})", *told, f"Ray's own output: {noise}"
    )


def set_aside_locally(config: AttemptConfig) -> str | None:
    """Rename the folder of a run; return its new name, or None if there was no folder.

    Raises RunFailed while the run is being trained.
    """
    require_packages(NEEDED, "training")
    command = [
        sys.executable,
        "-m",
        "trainyard_trainer.run_folder.set_aside",
        "--path",
        config.storage.path,
        config.name,
    ]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode != 0:
        raise RunFailed(
            f"the folder of run {config.name} could not be set aside", *error_of(ended.stderr)
        )
    return ended.stdout.strip() or None


def _put(config: AttemptConfig, code: Overlay) -> None:
    """Write code that is too large for an environment variable to the run's folder. Raises RunFailed."""
    command = [
        sys.executable,
        "-m",
        "trainyard_trainer.tools.folder",
        "--path",
        config.storage.path,
        "--put",
    ]
    command += [f"{len(code.archive)}", code.sha256, config.name, code_file(code.sha256)]
    ended = subprocess.run(command, input=code.archive, capture_output=True)
    if ended.returncode != 0:
        raise RunFailed(
            f"the code of run {config.name} could not be put into its folder",
            *error_of(ended.stderr.decode(errors="replace")),
        )


def _end(process: subprocess.Popen[str]) -> None:
    """Terminate the trainer if it is still running and wait for it; a second Ctrl-C kills it."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        # Read its remaining output: the trainer would block on a full pipe.
        process.communicate()
    except KeyboardInterrupt:
        process.kill()
        process.wait()
        raise


def error_of(output: str) -> list[str]:
    """Return the lines of the trainer's last error without the prefix; see `error_lines`."""
    return [line.removeprefix("error: ") for line in error_lines(output)]


def _read_line(run: str, line: str) -> RunStatus | str:
    """Return the status that a line of the trainer's output reports, or the line itself."""
    if (progress := record_of(line, PROGRESS)) is not None:
        return RunStatus(submission=run, phase="running", progress=progress)
    if (summary := record_of(line, SUMMARY)) is not None:
        phase: Phase = "succeeded" if summary["outcome"] == "succeeded" else "failed"
        return RunStatus(submission=run, phase=phase, summary=summary)
    return line
