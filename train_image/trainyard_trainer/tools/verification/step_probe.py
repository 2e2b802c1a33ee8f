"""Watch the calls that the user's code makes inside a training step."""

from __future__ import annotations

import os
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from types import FrameType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from trainyard_trainer.user_import import PACKAGE, is_users_file, shown_file

SYNCHRONISING: dict[Any, str] = {
    Tensor.item: "Tensor.item",
    Tensor.tolist: "Tensor.tolist",
    Tensor.cpu: "Tensor.cpu",
    Tensor.numpy: "Tensor.numpy",
    Tensor.nonzero: "Tensor.nonzero",
    Tensor.__bool__: "bool(tensor)",
    Tensor.__float__: "float(tensor)",
    Tensor.__int__: "int(tensor)",
    torch.nonzero: "torch.nonzero",
}
"""Functions that make the host wait until a GPU has computed the tensor."""

DRAWING: dict[Any, str] = {
    **{
        getattr(torch, name): f"torch.{name}"
        for name in (
            *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
            *("bernoulli", "multinomial", "normal", "poisson"),
        )
    },
    **{
        getattr(Tensor, name): f"Tensor.{name}"
        for name in (
            *("bernoulli_", "exponential_", "multinomial", "normal_", "random_", "uniform_"),
        )
    },
    functional.dropout: "torch.nn.functional.dropout",
}
"""Functions that draw from torch's generator, which has another state on each worker."""

CLOCKS: dict[Any, str] = {
    time.time: "time.time",
    time.time_ns: "time.time_ns",
    time.monotonic: "time.monotonic",
    time.monotonic_ns: "time.monotonic_ns",
    time.perf_counter: "time.perf_counter",
    time.perf_counter_ns: "time.perf_counter_ns",
    time.process_time: "time.process_time",
    os.urandom: "os.urandom",
    os.uname: "os.uname",
    os.getpid: "os.getpid",
    socket.gethostname: "socket.gethostname",
}
"""Built-in functions whose result differs between two runs or machines."""

Kind = Literal["random", "clock", "worker", "wait"]


@dataclass(frozen=True, slots=True)
class StepFinding:
    """A call in the user's code that makes a step depend on more than its batch, or that waits."""

    kind: Kind
    call: str
    place: str
    """File, line and function of the user's code."""


class StepProbe(TorchFunctionMode):
    """Records calls of global random generators, clocks, host names, and of functions that wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.findings: dict[StepFinding, None] = {}
        self._is_watching = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the calls of the block."""
        before, state = sys.getprofile(), repr(np.random.get_state())
        functions = _numpy_functions()
        for name, function in functions.items():
            setattr(np.random, name, self._noting(name, function))
        sys.setprofile(self._on_event)
        self._is_watching = True
        try:
            yield
        finally:
            self._is_watching = False
            sys.setprofile(before)
            for name, function in functions.items():
                setattr(np.random, name, function)
        has_drawn = repr(np.random.get_state()) != state
        if has_drawn and not any(each.call.startswith("numpy.random.") for each in self.findings):
            self.findings[StepFinding("random", "numpy.random", "a place that is not known")] = None

    def _noting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of `numpy.random` that notes its calls: a profiler does not see them."""

        @wraps(function)
        def noted(*args: Any, **options: Any) -> Any:
            self._note("random", f"numpy.random.{name}", sys._getframe(1))
            return function(*args, **options)

        return noted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_watching and (name := SYNCHRONISING.get(func)):
            self._note("wait", name, sys._getframe(1))
        # Layers such as nn.Dropout call these functions, too: only calls of the user's own are told.
        if self._is_watching and (name := DRAWING.get(func)) and "generator" not in (kwargs or {}):
            caller = sys._getframe(1)
            if is_users_file(caller.f_code.co_filename):
                self._note("worker", name, caller)
        return func(*args, **(kwargs or {}))

    def _on_event(self, frame: FrameType, event: str, called: Any) -> None:
        if event != "c_call":
            return
        owner = getattr(called, "__self__", None)
        if isinstance(owner, random.Random) and owner is _global_random():
            self._note("random", f"random.{called.__name__}", frame)
        elif isinstance(owner, torch.Generator) and called.__name__ == "seed":
            self._note("random", "torch.seed", frame)
        elif name := _clock_of(called):
            self._note("clock", name, frame)

    def _note(self, kind: Kind, call: str, frame: FrameType | None) -> None:
        """Record a call if the user's code makes it, directly or by a library."""
        while frame is not None:
            file = frame.f_code.co_filename
            if is_users_file(file):
                place = f"{shown_file(file)}, line {frame.f_lineno}, in {frame.f_code.co_name}"
                self.findings[StepFinding(kind, call, place)] = None
                return
            if file.startswith(PACKAGE):
                return
            frame = frame.f_back


def _global_random() -> Any:
    """Return the generator behind the functions of the module `random`."""
    return random.random.__self__  # type: ignore[attr-defined]


def _numpy_functions() -> dict[str, Callable[..., Any]]:
    """Return the functions of `numpy.random` that draw from its global generator."""
    generator: Any = np.random.mtrand._rand
    return {
        name: function
        for name, function in vars(np.random).items()
        if getattr(function, "__self__", None) is generator
    }


def _clock_of(called: Callable[..., Any]) -> str | None:
    try:
        if name := CLOCKS.get(called):
            return name
    except TypeError:  # it has no hash
        return None
    owner = getattr(called, "__self__", None)
    if (
        called.__name__ in ("now", "today", "utcnow")
        and getattr(owner, "__module__", "") == "datetime"
    ):
        return f"datetime.{called.__name__}"
    return None
