"""Select the files of a folder of code that are packed for a run.

Files are left out if .gitignore or .git/info/exclude lists them, also in the parent folders within the
repository. Caches, virtual environments, results of tools and folders of runs are left out too.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NoReturn

from trainyard.errors import ConfigError
from trainyard.run_file.code.gitignore import IgnoreRule, parse_rules, verdict
from trainyard_trainer.run_files import names

NEVER = (
    ".git", ".hg", ".svn", "__pycache__", ".venv", ".ipynb_checkpoints", ".pytest_cache", ".mypy_cache",
    ".ruff_cache", ".tox", ".nox", ".hypothesis", ".eggs", ".DS_Store", "node_modules",
)  # fmt: skip
"""The names of files and folders that are always left out."""

NEVER_SUFFIXES = (".pyc", ".pyo", ".egg-info")
"""The suffixes of files and folders that are always left out."""

RESULTS = ("wandb", "mlruns", "lightning_logs", "ray_results")
"""The names of folders into which training libraries write. Python packages with these names are kept."""

BUILD_RESULTS = ("build", "dist")
"""The names of folders into which Python's build tools write, if one of `BUILD_FILES` is beside them."""

BUILD_FILES = ("pyproject.toml", "setup.py", "setup.cfg")
"""The names of the files that configure Python's build tools."""

CACHE_TAG = "CACHEDIR.TAG"
"""The name of a file that marks its folder as a cache: https://bford.info/cachedir/."""

CACHE_SIGNATURE = b"Signature: 8a477f597d28d172789f06886806bc55"
"""The first bytes of such a file."""

RUN_RECORDS = (names.RUN, names.ATTEMPTS, names.SUMMARY, names.LEASE)
"""The names of files of a run's folder. A folder with at least two of them is a run's folder."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The ignore rules of one file, for the paths below the folder that the file is in."""

    folder: PurePosixPath
    """The folder of the file, relative to the root of the rules."""
    rules: tuple[IgnoreRule, ...]

    def verdict(self, path: PurePosixPath, *, is_folder: bool) -> bool | None:
        """Return whether the rules ignore a path, or None if no rule matches it."""
        if not path.is_relative_to(self.folder):
            return None
        relative = path.relative_to(self.folder).as_posix()
        return verdict(self.rules, relative, is_folder=is_folder)


def files_of(folder: Path) -> Iterator[PurePosixPath]:
    """Yield the paths of the selected files, relative to the folder.

    Raises ConfigError for anything but files and folders. Reading a pipe, for example, could block forever.
    """
    root = repository_of(folder)
    inside = PurePosixPath((folder.relative_to(root)).as_posix())
    rules = _rules_above(root, inside)
    for place, folders, files in os.walk(folder, onerror=_raise):
        here = PurePosixPath(Path(place).relative_to(root).as_posix())
        if ".gitignore" in files:
            rules.append(Rules(here, parse_rules(Path(place, ".gitignore").read_bytes())))
        is_built = any(name in files for name in BUILD_FILES)
        kept = [
            name
            for name in folders
            if not _is_written_by_tools(Path(place, name), is_built=is_built)
            and not is_ignored(here / name, rules, is_folder=True)
        ]
        folders[:] = sorted(kept)
        chosen = [
            name
            for name in files
            if name not in NEVER
            and not name.endswith(NEVER_SUFFIXES)
            and not is_ignored(here / name, rules)
        ]
        for name in (*folders, *chosen):
            _require_plain(folder, Path(place, name))
        yield from ((here / name).relative_to(inside) for name in chosen)


def repository_of(folder: Path) -> Path:
    """Return the root of the git repository that contains a folder, or the folder itself if there is none."""
    return next((each for each in (folder, *folder.parents) if (each / ".git").exists()), folder)


def is_ignored(path: PurePosixPath, rules: list[Rules], *, is_folder: bool = False) -> bool:
    """Return whether the nearest rules that match a path ignore it."""
    for each in reversed(rules):
        found = each.verdict(path, is_folder=is_folder)
        if found is not None:
            return found
    return False


def _rules_above(root: Path, inside: PurePosixPath) -> list[Rules]:
    """Return the rules of the repository above a folder, or none if they ignore the folder itself."""
    rules = []
    exclude = _git_folder(root) / "info/exclude"
    if exclude.is_file():
        rules.append(Rules(PurePosixPath(), parse_rules(exclude.read_bytes())))
    for above in reversed(inside.parents):
        if (root / above / ".gitignore").is_file():
            rules.append(Rules(above, parse_rules((root / above / ".gitignore").read_bytes())))
    way = [*reversed(inside.parents), inside][1:]
    return [] if any(is_ignored(each, rules, is_folder=True) for each in way) else rules


def _git_folder(root: Path) -> Path:
    """Return the git folder with info/exclude, also for a worktree or a submodule."""
    git = root / ".git"
    if not git.is_file():
        return git
    git = root / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
    common = git / "commondir"
    return git / common.read_text(encoding="utf-8").strip() if common.is_file() else git


def _is_written_by_tools(folder: Path, *, is_built: bool) -> bool:
    """Return whether a folder is a cache, a virtual environment, a build result or a run's folder."""
    name = folder.name
    if name in NEVER or name.endswith(NEVER_SUFFIXES) or (is_built and name in BUILD_RESULTS):
        return True
    if name in RESULTS and not (folder / "__init__.py").exists():
        return True
    if (folder / "pyvenv.cfg").is_file() or _is_run(folder):
        return True
    tag = folder / CACHE_TAG
    return tag.is_file() and tag.read_bytes().startswith(CACHE_SIGNATURE)


def _is_run(folder: Path) -> bool:
    """Return whether a folder is the folder of a run."""
    return sum((folder / name).exists() for name in RUN_RECORDS) > 1


def _require_plain(folder: Path, path: Path) -> None:
    mode = path.lstat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        what = "a symbolic link" if stat.S_ISLNK(mode) else "a special file"
        raise ConfigError(
            f"code = {folder}: {path.relative_to(folder)} is {what}, which cannot be packed",
            "Replace it by a file, or list it in .gitignore.",
        )


def _raise(error: OSError) -> NoReturn:
    """Raise the error of an unreadable folder, which `os.walk` would otherwise skip."""
    raise error
