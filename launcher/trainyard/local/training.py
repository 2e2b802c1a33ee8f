"""Train a run on this machine: start the trainer as a child process and read its output."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryFile
from typing import Literal

from typing_extensions import assert_never

from trainyard.errors import ConfigError, RunFailed, RunStopped
from trainyard.local.tools import own_environment, require_packages, stopped_like_ctrl_c
from trainyard.local.warm import program as warm_program
from trainyard.local.warm.program import WarmProgram
from trainyard.planning.trainer_input import trainer_config
from trainyard.run_file.code.code_archive import Overlay
from trainyard.run_file.code.source import GitState
from trainyard.run_file.models import BoostingRun, RunConfig, UserCodeRun
from trainyard.submission.status import RunStatus, error_lines, has_error
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
from trainyard_trainer.run_files.driver_output import (
    PROGRESS,
    STOPPING_ERRORS,
    SUMMARY,
    record_of,
)
from trainyard_trainer.run_files.names import RAY_LOG
from trainyard_trainer.run_files.programs.isolation import isolated
from trainyard_trainer.run_files.submission import SOURCE_VARIABLE, code_file

LAST_LINES = 100
"""The number of lines of the trainer's standard output in which its error is looked for."""

RESUMES = "The same command goes on from the newest checkpoint."

RAY_LOG_LINE = re.compile(r"\[\d{4}-\d\d-\d\d [\d:,]+ [EFCW] \d+ \d+\] \S+: (?P<text>[^.]*\.?).*")
"""A line that one of Ray's libraries writes, with its first sentence. If a program ends with such a line, Ray
has ended it, without an exception in Python."""

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
    ConfigError if the run cannot be started by `starter`, or if a secret is missing here.
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
    require_secrets(run)
    path = str(storage.resolve())
    if not path.isprintable():
        raise ConfigError(
            f"--storage = {path!r}: must be UTF-8, without control characters",
            "Use or create a folder with another name.",
        )
    workers = 1 if starter == "alone" else run.resources.bounds[0]
    scaling = Scaling(
        num_workers=workers,
        use_gpu=run.resources.gpus is not None,
        cpus_per_worker=max(1, cpus // workers),
    )
    return trainer_config(run, scaling, Storage(path=path), code)


def require_secrets(run: RunConfig, environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError that names the secrets of a run for which this machine has no variable.

    The trainer inherits this process's environment, and the Ray that it starts inherits the trainer's.
    """
    missing = [name for name in run.secrets if not environment.get(name)]
    if missing:
        raise ConfigError(
            f"run {run.name} needs secrets that are not set here: {', '.join(missing)}",
            "On this machine the value of a secret is that of the environment variable with its name. "
            f"Set it, for example with `read -rs {missing[0]}; export {missing[0]}`.",
        )


def program(config: AttemptConfig, starter: Starter) -> list[str]:
    """Return the command line that starts an attempt."""
    alone = isolated("trainyard_trainer", "--without-ray")
    match starter:
        case "ray":
            return isolated("trainyard_trainer")
        case "alone":
            return alone
        case "torchrun":
            processes = f"--nproc-per-node={config.scaling.num_workers}"
            # torchrun would start its workers with a Python that is not isolated.
            return isolated(
                "torch.distributed.run", "--standalone", processes, "--no-python", *alone
            )
        case _:
            assert_never(starter)


def train_locally(
    config: AttemptConfig,
    starter: Starter = "ray",
    code: Overlay | None = None,
    source: GitState | None = None,
) -> Generator[RunStatus | str, None, None]:
    """Train a run; yield its status on each change, and the other lines that the trainer prints.

    Raises ConfigError if packages are missing or the trainer refuses the config, RunFailed if it fails.
    """
    library = (config.train.library,) if isinstance(config, BoostingConfig) else ()
    require_packages([*NEEDED, *library], "training")
    noise = _made_folder(config) / RAY_LOG
    before = _change_of(noise)
    environment, lines = own_environment()
    environment |= variables_of(config, code)
    if source is not None:
        environment[SOURCE_VARIABLE] = source.model_dump_json()
    last_lines: deque[str] = deque(maxlen=LAST_LINES)
    # Only the main thread may set signal handlers; a pipeline may train in another thread.
    is_main = threading.current_thread() is threading.main_thread()
    # The program's standard error until it holds the run: the run's own file may be that of a live attempt.
    with TemporaryFile() as stderr, stopped_like_ctrl_c() if is_main else nullcontext():
        process, about_warm = _start(config, starter, environment, stderr.fileno())
        try:
            yield from lines
            if about_warm is not None:
                yield about_warm
            yield RunStatus(submission=config.name, phase="starting")
            assert process.stdout is not None
            for line in process.stdout:
                last_lines.append(line)
                yield _read_line(config.name, line.rstrip("\n"))
            exit_code = process.wait()
        finally:
            _end(process)
        stderr.seek(0)
        output = stderr.read().decode(errors="replace")
    if exit_code != 0:
        ray_log = noise if _change_of(noise) != before else None
        raise _error_of_end(config.name, exit_code, output, "".join(last_lines), ray_log)


def _start(
    config: AttemptConfig, starter: Starter, environment: Mapping[str, str], stderr: int
) -> tuple[subprocess.Popen[str] | WarmProgram, str | None]:
    """Start the trainer, in the warm process if that is possible; return it with a line about that."""
    use_warm = starter == "ray"
    warm, line = warm_program.start(config, environment, stderr) if use_warm else (None, None)
    if warm is not None:
        return warm, line
    process = subprocess.Popen(
        program(config, starter),
        env=environment,
        # A pipe that is at its end when this process is gone: the trainer then saves and ends.
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        errors="replace",
        # Ctrl-C must reach Ray's processes through the trainer, not from the terminal too.
        start_new_session=True,
    )
    return process, line


def _made_folder(config: AttemptConfig) -> Path:
    """Create the run's folder, and return its path. Raises ConfigError if the storage does not permit it."""
    folder = Path(config.storage.path) / config.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the storage {config.storage.path} cannot be used: {error}",
            "Name a folder that you may write to with --storage DIR.",
        ) from error
    return folder


def _error_of_end(
    run: str, exit_code: int, output: str, printed: str, ray_log: Path | None
) -> ConfigError | RunStopped | RunFailed:
    """Return the error that tells why the training program failed.

    `output` is its standard error, `printed` the last lines of its standard output, and `ray_log` the file
    with Ray's own output if this program has written to it.
    """
    if ray_log is not None and not has_error(output):
        output += ray_log.read_text(errors="replace")
    # On a full disk, the file with the program's standard error takes no error.
    if not has_error(output) and has_error(printed):
        output = printed
    details = error_of(output) if has_error(output) else _end_without_error(exit_code, output)
    if exit_code == exit_codes.WRONG_INPUT:
        return ConfigError(f"the training program refused run {run}", *details)
    if any(line.startswith(STOPPING_ERRORS) for line in details):
        return RunStopped(f"run {run} was stopped", *details)
    if ray_log is not None:
        details.append(f"Ray's own output: {ray_log}")
    return RunFailed(f"run {run} failed (exit code {exit_code})", *details)


def _end_without_error(exit_code: int, output: str) -> list[str]:
    """Describe the end of a training program that has written no error of its own."""
    details = error_of(output)
    if exit_code < 0:
        details = [
            f"the training program was ended by {signal.Signals(-exit_code).name}",
            "SIGKILL usually means that the machine ran out of memory.",
            RESUMES,
        ]
    elif details and (words := RAY_LOG_LINE.match(details[-1])):
        details = [
            "Ray's processes on this machine have ended, and the training program with them. Often memory "
            "was full, or another program has stopped Ray (`ray stop`).",
            RESUMES,
            f"Ray's last words: {words['text']}",
        ]
    return details


def variables_of(config: AttemptConfig, code: Overlay | None) -> dict[str, str]:
    """Return the variables with the config and the code of a run.

    Code that is too large for a variable is written to the run's folder. Raises RunFailed.
    """
    variables = {CONFIG_VARIABLE: config.model_dump_json()}
    if code is not None and code.is_uploaded:
        _put(config, code)
    elif code is not None:
        variables[CODE_VARIABLE] = code.text
    return variables


def _change_of(file: Path) -> tuple[int, int] | None:
    """Return what differs once a file was replaced or written to; None if there is no such file."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def set_aside_locally(config: AttemptConfig, say: Callable[[str], None]) -> str | None:
    """Rename the folder of a run; return its new name, or None if there was no folder.

    `say` gets the lines about an earlier attempt that is waited for. Raises RunFailed while the run is being
    trained.
    """
    require_packages(NEEDED, "training")
    command = isolated(
        "trainyard_trainer.run_folder.set_aside", "--path", config.storage.path, config.name
    )
    lines = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if is_about_lease(line):
                say(line.rstrip("\n"))
        name = process.stdout.read().strip()
    if process.returncode != 0:
        raise RunFailed(
            f"the folder of run {config.name} could not be set aside", *error_of("".join(lines))
        )
    return name or None


def is_about_lease(line: str) -> bool:
    """Whether a line of the trainer's output is about an earlier attempt that is waited for."""
    return line.startswith("lease: ")


def _put(config: AttemptConfig, code: Overlay) -> None:
    """Write code that is too large for an environment variable to the run's folder. Raises RunFailed."""
    command = isolated(
        "trainyard_trainer.tools.folder",
        *("--path", config.storage.path),
        *("--put", f"{len(code.archive)}", code.sha256),
        *(config.name, code_file(code.sha256)),
    )
    ended = subprocess.run(command, input=code.archive, capture_output=True)
    if ended.returncode != 0:
        raise RunFailed(
            f"the code of run {config.name} could not be put into its folder",
            *error_of(ended.stderr.decode(errors="replace")),
        )


def _end(process: subprocess.Popen[str] | WarmProgram) -> None:
    """Terminate the trainer if it is still running and wait for it; a second Ctrl-C kills it."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        # Read its remaining output: the trainer would block on a full pipe.
        assert process.stdout is not None
        for _ in process.stdout:
            pass
        process.wait()
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
        return RunStatus(submission=run, phase=summary["outcome"], summary=summary)
    return line
