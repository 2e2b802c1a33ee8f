"""What is read is not believed: no file of a run's folder can run a program in whoever opens it."""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.trainer.saved_run import open_small, save, weights_of
from trainyard_trainer.checkpointing.checkpoint import (
    MODEL,
    STATE,
    Checkpoints,
)
from trainyard_trainer.checkpointing.resume import Start
from trainyard_trainer.errors import RunError
from trainyard_trainer.recipes.saved_model import deliver, read_saved
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.tools import export, predict

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path for room in ("launcher", "train_image") for path in (ROOT / room).rglob("*.py")
)

FORBIDDEN = {
    "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads", "shelve.open", "joblib.load",
    "eval", "exec", "os.system", "os.popen", "yaml.unsafe_load", "yaml.full_load",
    "shutil.unpack_archive", "tarfile.TarFile.extractall", "torch.hub.load",
}  # fmt: skip
"""Calls that run what a file says, or write where it says."""
SAFE_LOADERS = {
    *("StrictLoader", "KubernetesLoader", "_KubeconfigLoader"),
    "getattr(yaml, 'CSafeLoader', yaml.SafeLoader)",
}


def calls(text: str) -> Iterator[tuple[str, ast.Call]]:
    """Each call with the words before its bracket."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def option(call: ast.Call, name: str) -> str:
    """A keyword's value as it is written; empty where it is left out."""
    found = [keyword.value for keyword in call.keywords if keyword.arg == name]
    return ast.unparse(found[0]) if found else ""


def problems(text: str) -> list[str]:
    """What a source does with files that others may have written."""
    found = []
    for name, call in calls(text):
        last = name.rpartition(".")[2]
        if name in FORBIDDEN or last in ("extractall", "extract"):
            found.append(name)
        if name == "torch.load" and option(call, "weights_only") != "True":
            found.append("torch.load without weights_only=True")
        if name.startswith("np.load") and option(call, "allow_pickle") not in ("", "False"):
            found.append("np.load with pickles")
        if name in ("yaml.load", "yaml.load_all"):
            loader = option(call, "Loader") or "".join(map(ast.unparse, call.args[1:]))
            if loader not in SAFE_LOADERS:
                found.append(f"{name} with an unsafe loader")
        if option(call, "shell") == "True":
            found.append(f"{name} through a shell")
    return found


def test_no_source_loads_what_can_run() -> None:
    assert len(SOURCES) > 100
    found = {
        str(path.relative_to(ROOT)): wrong
        for path in SOURCES
        if (wrong := problems(path.read_text()))
    }
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "torch.load(f, weights_only=is_safe)",
        "pickle.loads(data)",
        "np.load(f, allow_pickle=True)",
        "yaml.load(text, Loader=yaml.Loader)",
        "tarfile.open(f).extractall(p)",
        "subprocess.run(x, shell=True)",
        "eval(text)",
    ],
)
def test_the_search_finds_what_it_looks_for(line: str) -> None:
    assert len(problems(line)) == 1


class Program:
    """A pickle that makes a file when it is loaded as pickles are."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """What is there once the program has run."""
    return tmp_path / "it-ran"


def hostile(mark: Path, kind: str) -> bytes:
    """Weights beside a program, as torch writes them or as a bare pickle."""
    content = {"weight": torch.zeros(3), "more": Program(mark)}
    if kind == "pickle":
        return pickle.dumps(content)
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


@pytest.fixture(params=["torch", "pickle"])
def program(request: pytest.FixtureRequest, mark: Path) -> bytes:
    return hostile(mark, request.param)


def test_the_program_would_run(mark: Path) -> None:
    torch.load(io.BytesIO(hostile(mark, "torch")), weights_only=False)
    assert mark.is_dir()


def replaced(folder: RunFolder, name: str, file: str, data: bytes) -> None:
    """A file of a checkpoint, with a manifest that fits: whoever writes one can write the other."""
    checkpoints = Checkpoints(folder)
    folder.write(checkpoints.path(name, file), data)
    manifest = json.loads(folder.read(checkpoints.path(name, "manifest.json")))
    manifest["files"][file] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    folder.write(checkpoints.path(name, "manifest.json"), json.dumps(manifest))


@pytest.mark.parametrize("file", [MODEL, STATE])
def test_a_checkpoint_with_a_program_in_it_is_refused(
    tmp_path: Path, mark: Path, program: bytes, file: str
) -> None:
    folder = open_small(tmp_path)
    name = save(folder, 1)
    replaced(folder, name, file, program)
    assert Checkpoints(folder).check(name).name == name  # its sums say nothing
    with pytest.raises(RunError, match=r"(?s)holds no weights.*Nothing of it was run"):
        Start.of(folder, name)
    assert not mark.exists()


def test_a_delivered_model_with_a_program_in_it_is_refused_by_every_tool(
    tmp_path: Path, mark: Path, program: bytes
) -> None:
    folder = open_small(tmp_path)
    name = save(folder, 1, weights=weights_of(1))
    deliver(folder, Checkpoints(folder), Checkpoints(folder).read_manifest(name))
    folder.write(folder.model, program)
    tools: tuple[Callable[[], object], ...] = (
        lambda: read_saved(folder, "delivered"),
        lambda: predict.main([folder.root, str(tmp_path / "a.png")]),
        lambda: export.main([folder.root, "--out", str(tmp_path / "out.pt")]),
    )
    for tool in tools:
        with pytest.raises(RunError, match="holds no weights"):
            tool()
    assert not mark.exists()
    assert not (tmp_path / "out.pt").exists()
