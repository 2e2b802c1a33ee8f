"""What must be the same for the warm process and for a command that wants to use it.

A run in a process that was forked from the warm one has that one's user and rights, its limits, its Python
with all imported packages, and the variables with which these were loaded. Each fact is a text, so that two
of them can be compared; `difference` names the first that differs.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import site
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from trainyard_trainer.run_files.programs.start import PACKAGES, has_installed_packages, python_path
from trainyard_trainer.run_files.warm.load_variables import READ_AT_LOAD, first_difference

Facts = dict[str, str]

SOURCE = "the version or the source of trainyard"
PYTHON = "the Python environment"
USER = "the user, or the rights of the user's processes"
LIMITS = "a limit of the terminal (ulimit, nice or taskset)"
FOLDERS = "the installed packages on PYTHONPATH"
VARIABLES = "variables"

KEPT = re.compile(r"HOME|LANG|LC_.*|TMPDIR|TEMP|TMP|GRPC_.*")
"""Further variables that are read once: by Python, by Ray when it starts, or by gRPC."""

PASSED = {"PATH", "USER", "LOGNAME", "PYTHONPATH", "XDG_RUNTIME_DIR"}
"""Variables that the warm process gets, too. It gets no others: they may hold secrets."""

RIGHTS = re.compile(r"^(Cap\w+|NoNewPrivs|Seccomp):.*$", re.MULTILINE)

NAMESPACES = ("mnt", "net", "pid", "user")


def facts(environment: Mapping[str, str] = os.environ) -> Facts:
    """Return the facts of this process, with an environment that it has or would give to a run."""
    return {
        SOURCE: _files_mark(Path(PACKAGES, "trainyard_trainer").rglob("*.py")),
        PYTHON: f"{sys.executable} {sys.version} {_files_mark(_installed())}",
        USER: _user(),
        LIMITS: _limits(),
        FOLDERS: os.pathsep.join(filter(has_installed_packages, python_path(environment))),
        VARIABLES: json.dumps(read_once(environment)),
    }


def difference(theirs: Facts, mine: Facts) -> str | None:
    """Return what differs, as the subject of a sentence, or None."""
    for name in (SOURCE, PYTHON, USER, LIMITS, FOLDERS):
        if theirs.get(name) != mine[name]:
            return name
    loaded, wanted = (json.loads(each[VARIABLES]) for each in (theirs, mine))
    kept = sorted(filter(KEPT.fullmatch, {*loaded, *wanted}))
    other = [name for name in kept if loaded.get(name) != wanted.get(name)]
    variable = other[0] if other else first_difference(loaded, wanted)
    return variable and f"the environment variable {variable}"


def read_once(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that a process reads only once."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if KEPT.fullmatch(name) or READ_AT_LOAD.fullmatch(name)
    }


def environment_of_warm_process(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that the warm process gets: those without secrets of runs."""
    passed = {name: environment[name] for name in PASSED & environment.keys()}
    return read_once(environment) | passed


def _files_mark(files: Iterable[Path]) -> str:
    """Return a text that changes when one of the files is changed, added or removed."""
    marks = hashlib.sha256()
    for file in sorted(files):
        status = file.stat()
        marks.update(f"{file} {status.st_mtime_ns} {status.st_size}\n".encode())
    return marks.hexdigest()


def _installed() -> list[Path]:
    """Return the files and folders that change when a package is installed, updated or removed."""
    folders = [Path(each) for each in site.getsitepackages()]
    patterns = ("*.dist-info", "*.egg-info", "*.pth")
    return [file for folder in folders for pattern in patterns for file in folder.glob(pattern)]


def _user() -> str:
    """Return the user, the groups, the capabilities and the namespaces: what this process may do."""
    ids = (*os.getresuid(), *os.getresgid(), *sorted(os.getgroups()))
    rights = (match[0] for match in RIGHTS.finditer(Path("/proc/self/status").read_text()))
    spaces = (str(Path("/proc/self/ns", name).readlink()) for name in NAMESPACES)
    return " ".join([*map(str, ids), *rights, *spaces])


def _limits() -> str:
    """Return the resource limits, the priority and the CPUs of this process."""
    names = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    limits = [f"{name} {resource.getrlimit(getattr(resource, name))}" for name in names]
    return " ".join([*limits, str(os.nice(0)), str(sorted(os.sched_getaffinity(0)))])
