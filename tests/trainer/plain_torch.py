"""A process with torch in which nothing of trainyard can be imported."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

PROGRAM = """
import sys
sys.modules["trainyard_trainer"] = sys.modules["trainyard"] = None
import torch
network, inputs, outputs = sys.argv[1:]
is_program = network.endswith(".pt2")
ask = torch.export.load(network).module() if is_program else torch.jit.load(network)
with torch.inference_mode():
    torch.save([ask(each) for each in torch.load(inputs)], outputs)
"""


def asked(network: Path, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What the network of a file says there: torch.export's if its name ends in .pt2, else TorchScript's."""
    with tempfile.TemporaryDirectory() as scratch:
        given, said = Path(scratch) / "inputs", Path(scratch) / "outputs"
        torch.save([*inputs], given)
        subprocess.run([sys.executable, "-I", "-c", PROGRAM, network, given, said], check=True)
        outputs: list[torch.Tensor] = torch.load(said)
        return outputs
