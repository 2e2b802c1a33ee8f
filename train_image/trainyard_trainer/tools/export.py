"""Export a model for other programs: its weights or the whole network, and a JSON file that describes it.

python -m trainyard_trainer.tools.export RUN [--out FILE] [--format FORMAT] [--checkpoint NAME] ...
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from pyarrow import fs
from torch import nn

from trainyard_trainer.config.tool_arguments import CHECKPOINTS_EXPORT
from trainyard_trainer.errors import ConfigError, RunError
from trainyard_trainer.recipes.saved_model import Saved, read_saved
from trainyard_trainer.run_files.standard_streams import run_with_safe_streams
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.storage import open_filesystem
from trainyard_trainer.tools.command_line import exit_code_of, open_run, parse

SUFFIXES = {"state_dict": "pt", "torchscript": "torchscript.pt", "pt2": "pt2", "onnx": "onnx"}
"""The suffix of the files of each format."""

INPUT, OUTPUT = "images", "scores"
"""The names of the network's input and output in ONNX."""

TRACED, COMPARED = 2, 3
"""The batch sizes with which a network is traced, and with which its file is compared."""

LENGTH = 32
"""The length of these samples in bytes of text, if the model's context length is not shorter."""

TOLERANCE = 1e-4
"""The relative and absolute tolerance for the scores of an exported network."""


def export(
    folder: RunFolder, *, out: str | None, endpoint: str | None, kind: str, which: str
) -> str:
    """Write a model, and its description as `<out>.json`. Return the path of the model for display.

    Raises TrainerError.
    """
    saved = read_saved(folder, which)
    facts = saved.facts
    file_name = f"{facts['run']}-{facts['checkpoint']}.{SUFFIXES[kind]}"
    filesystem, path = folder.filesystem, f"{folder.root}/export/{file_name}"
    if out is not None:
        filesystem, path = open_filesystem(out, endpoint)
        (info,) = RunFolder(filesystem, path).infos([path])
        if info.type == fs.FileType.Directory:
            path = f"{path}/{file_name}"
    target = RunFolder(filesystem, path.rpartition("/")[0])
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / Path(path).name
        write(saved, file, kind)
        with file.open("rb") as stream, target.writing(path) as output:
            while chunk := stream.read(2**24):
                output.write(chunk)
    target.write(f"{path}.json", json.dumps({"format": kind, **facts}, indent=2) + "\n")
    return target.show(path)


def write(saved: Saved, file: Path, kind: str) -> None:
    """Write the model in one of the formats. Raises TrainerError."""
    network = saved.build()
    if kind == "state_dict":
        # With a path instead of a stream, torch would write the file's name into the file.
        with file.open("wb") as stream:
            torch.save(saved.weights, stream)
        return
    is_text = saved.facts["input"]["dtype"] != "float32"
    if is_text and kind != "pt2":
        raise ConfigError(
            f"--format {kind} supports only models for images. Use --format pt2 for torch.export.load, or "
            "state_dict: the JSON file beside it describes how to build the network."
        )
    writers: dict[str, Callable[[nn.Module, Examples, Path], None]] = {
        "torchscript": _to_torchscript,
        "pt2": _to_pt2,
        "onnx": _to_onnx,
    }
    examples = _texts(saved) if is_text else _images(saved)
    try:
        writers[kind](network, examples, file)
    except RuntimeError as error:
        raise RunError(
            f"{saved.recipe.title()} cannot be written as {kind}: {str(error).splitlines()[0]}\n"
            "       Use --format state_dict, which all models support."
        ) from error
    if kind != "onnx":
        _compare(network, examples.compared, file, kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class Examples:
    """The example inputs with which a network is traced and compared."""

    traced: torch.Tensor
    compared: torch.Tensor
    """Inputs with other sizes than `traced` along the free axes."""
    free: dict[int, Any]
    """The axes whose size may vary, with their `torch.export.Dim`."""


def _images(saved: Saved) -> Examples:
    shape = saved.facts["input"]["shape"][1:]
    images = torch.randn(COMPARED, *shape, generator=torch.Generator().manual_seed(0))
    free = {0: torch.export.Dim("count")}
    return Examples(traced=images[:TRACED], compared=images, free=free)


def _texts(saved: Saved) -> Examples:
    """Return samples of text that consist of many short documents."""
    most = saved.config.context_length
    shape = (COMPARED, min(most, LENGTH))
    texts = torch.randint(8, shape, generator=torch.Generator().manual_seed(0))
    free = {0: torch.export.Dim("count"), 1: torch.export.Dim("length", max=most)}
    return Examples(traced=texts[:TRACED], compared=texts[:, :-1], free=free)


def _to_torchscript(network: nn.Module, examples: Examples, file: Path) -> None:
    with warnings.catch_warnings():
        # torch recommends torch.export, but some programs still load TorchScript. A comparison of the
        # outputs finds what the tracer warns about.
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        warnings.filterwarnings("ignore", category=torch.jit.TracerWarning)
        torch.jit.save(torch.jit.trace(network, examples.traced, check_trace=False), file)


def _to_pt2(network: nn.Module, examples: Examples, file: Path) -> None:
    program = torch.export.export(network, (examples.traced,), dynamic_shapes=(examples.free,))
    torch.export.save(program, file)


def _to_onnx(network: nn.Module, examples: Examples, file: Path) -> None:
    missing = [package for package in ("onnx", "onnxscript") if find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"--format onnx needs packages that are not installed: {', '.join(missing)}\n"
            "       Install them with `pip install 'trainyard[export]'`, or `make setup` in a clone."
        )
    with warnings.catch_warnings():
        # PyTorch warns about its own code.
        warnings.filterwarnings("ignore", category=FutureWarning)
        torch.onnx.export(
            network,
            (examples.traced,),
            file,
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes=(examples.free,),
            external_data=False,
            verbose=False,
        )


def _compare(network: nn.Module, inputs: torch.Tensor, file: Path, kind: str) -> None:
    """Raise RunError if the exported network and the model differ in the scores of other inputs."""
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        read = torch.jit.load(file) if kind == "torchscript" else torch.export.load(file).module()
        wanted, found = network(inputs), read(inputs)
    if not torch.allclose(found, wanted, rtol=TOLERANCE, atol=TOLERANCE):
        difference = (found - wanted).abs().max().item()
        raise RunError(
            f"{file.name} was not written: the scores of the {kind} file differ from the model's by "
            f"{difference:g}.\n"
            "       Use --format state_dict, which all models support."
        )


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, and return its exit code."""
    _, wanted = parse(arguments, CHECKPOINTS_EXPORT)
    folder = open_run(wanted.run, wanted.storage, wanted.endpoint)
    out = export(
        folder,
        out=wanted.out,
        endpoint=wanted.endpoint,
        kind=wanted.format,
        which=wanted.checkpoint,
    )
    print(f"{out}\n{out}.json")
    return 0


if __name__ == "__main__":
    sys.exit(run_with_safe_streams(lambda: exit_code_of(main)))
