"""Export a model for other programs: its weights or the whole network, and a JSON file that describes it.

python -m trainyard_trainer.tools.export RUN [--out FILE] [--format FORMAT] [--checkpoint NAME] ...
"""

from __future__ import annotations

import argparse
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
from torch.utils._pytree import tree_leaves

from trainyard_trainer.config.tools.checkpoint_tools import CHECKPOINTS_EXPORT
from trainyard_trainer.config.training.recipes import CAUSAL_LM, recipe_named
from trainyard_trainer.errors import ConfigError, RunError
from trainyard_trainer.recipes.example_inputs import ExampleInputs
from trainyard_trainer.recipes.saved_model import Saved, read_saved
from trainyard_trainer.run_files.programs.standard_streams import run_with_safe_streams
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.storage import open_filesystem
from trainyard_trainer.tools.command_line import exit_code_of, open_run, parse
from trainyard_trainer.tools.hub_export import export_hub_folder
from trainyard_trainer.tools.prediction.chat import with_base_model

SUFFIXES = {"state_dict": "pt", "torchscript": "torchscript.pt", "pt2": "pt2", "onnx": "onnx"}
"""The suffix of the files of each format."""

OUTPUT = "scores"
"""The name of the first output of a network in ONNX."""

TRACED, COMPARED = 2, 3
"""The numbers of samples with which a network is traced, and with which its file is compared."""

TOLERANCE = 1e-4
"""The relative and absolute tolerance for the scores of an exported network."""


def export(
    folder: RunFolder,
    *,
    out: str | None,
    endpoint: str | None,
    kind: str,
    which: str,
    trusts_code: bool = False,
) -> str:
    """Write a model, and its description as `<out>.json`. Return the path of the model for display.

    `trusts_code` allows to run the user's recipe from the run's folder. Raises TrainerError.
    """
    saved = read_saved(folder, which, trusts_code=trusts_code)
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
        target.upload(file, path)
    target.write(f"{path}.json", json.dumps({"format": kind, **facts}, indent=2) + "\n")
    return target.show(path)


def write(saved: Saved, file: Path, kind: str) -> None:
    """Write the model in one of the formats. Raises TrainerError."""
    if kind == "state_dict":
        # With a path instead of a stream, torch would write the file's name into the file.
        with file.open("wb") as stream:
            torch.save(saved.weights, stream)
        return
    if saved.recipe.networks:
        raise ConfigError(
            f"{saved.recipe.title()} has several networks, {', '.join(saved.recipe.networks)}, and --format "
            f"{kind} holds one: use --format state_dict"
        )
    network = saved.build()
    found = saved.recipe.example_inputs(COMPARED)
    if found.free_axes and kind != "pt2":
        raise ConfigError(
            f"--format {kind} supports only models whose inputs vary in the number of samples alone, such as "
            "those for images. Use --format pt2 for torch.export.load, or state_dict: the JSON file beside "
            "it describes how to build the network."
        )
    writers: dict[str, Callable[[nn.Module, Examples, Path], None]] = {
        "torchscript": _to_torchscript,
        "pt2": _to_pt2,
        "onnx": _to_onnx,
    }
    examples = Examples.of(found)
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
    """The inputs with which a network is traced and compared."""

    names: list[str]
    traced: tuple[torch.Tensor, ...]
    compared: tuple[torch.Tensor, ...]
    """Inputs with other sizes than `traced` along the free axes."""
    free: tuple[dict[int, Any], ...]
    """For each input the axes whose size may vary, with their `torch.export.Dim`."""

    @classmethod
    def of(cls, found: ExampleInputs) -> Examples:
        count = torch.export.Dim("count")
        free = {0: count} | {
            axis: torch.export.Dim(f"size{axis}", max=most)
            for axis, most in found.free_axes.items()
        }
        compared = []
        for tensor in found.tensors.values():
            for axis in found.free_axes:
                tensor = tensor.narrow(axis, 0, tensor.shape[axis] - 1)
            compared.append(tensor)
        return cls(
            names=[*found.tensors],
            traced=tuple(tensor[:TRACED] for tensor in found.tensors.values()),
            compared=tuple(compared),
            free=(free,) * len(compared),
        )


def _to_torchscript(network: nn.Module, examples: Examples, file: Path) -> None:
    with warnings.catch_warnings():
        # torch recommends torch.export, but some programs still load TorchScript. A comparison of the
        # outputs finds what the tracer warns about.
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        warnings.filterwarnings("ignore", category=torch.jit.TracerWarning)
        torch.jit.save(torch.jit.trace(network, examples.traced, check_trace=False), file)


def _to_pt2(network: nn.Module, examples: Examples, file: Path) -> None:
    program = torch.export.export(network, examples.traced, dynamic_shapes=examples.free)
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
            examples.traced,
            file,
            input_names=examples.names,
            output_names=[OUTPUT],
            dynamic_shapes=examples.free,
            external_data=False,
            verbose=False,
        )


def _compare(network: nn.Module, inputs: tuple[torch.Tensor, ...], file: Path, kind: str) -> None:
    """Raise RunError if the exported network and the model differ in the scores of other inputs."""
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        read = torch.jit.load(file) if kind == "torchscript" else torch.export.load(file).module()
        pairs = list(zip(tree_leaves(network(*inputs)), tree_leaves(read(*inputs)), strict=True))
    difference = max((wanted - found).abs().max().item() for wanted, found in pairs)
    if not all(
        torch.allclose(found, wanted, rtol=TOLERANCE, atol=TOLERANCE) for wanted, found in pairs
    ):
        raise RunError(
            f"{file.name} was not written: the scores of the {kind} file differ from the model's by "
            f"{difference:g}.\n"
            "       Use --format state_dict, which all models support."
        )


def is_hub_folder(wanted: argparse.Namespace, folder: RunFolder) -> bool:
    """Whether a folder for Transformers is wanted, which is the default for a run of causal_lm."""
    if wanted.format is not None or wanted.merge:
        return wanted.merge or wanted.format == "huggingface"
    if not folder.exists(folder.run):
        return False
    return recipe_named(json.loads(folder.read(folder.run)).get("train")) == CAUSAL_LM


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, and return its exit code."""
    _, wanted = parse(arguments, CHECKPOINTS_EXPORT)
    folder = open_run(wanted.run, wanted.storage, wanted.endpoint)
    if is_hub_folder(wanted, folder):
        saved = with_base_model(read_saved(folder, wanted.checkpoint), wanted.base_model)
        endpoint, merges = wanted.endpoint, wanted.merge
        print(export_hub_folder(saved, folder, out=wanted.out, endpoint=endpoint, merges=merges))
        return 0
    out = export(
        folder,
        out=wanted.out,
        endpoint=wanted.endpoint,
        kind=wanted.format or "state_dict",
        which=wanted.checkpoint,
        trusts_code=wanted.trust_code,
    )
    print(f"{out}\n{out}.json")
    return 0


if __name__ == "__main__":
    sys.exit(run_with_safe_streams(lambda: exit_code_of(main)))
