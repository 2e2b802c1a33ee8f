"""The weights from which a run starts: `train.init`, a file of safetensors or a state_dict of PyTorch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from trainyard_trainer.config.location import HUB, is_remote
from trainyard_trainer.config.training.train import InitialWeights
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.fetching.bucket import BucketFile
from trainyard_trainer.fetching.hub import HubSource
from trainyard_trainer.fetching.node_cache import fetched, say_on_stderr
from trainyard_trainer.run_folder.folder import RunFolder

SAFETENSORS = ".safetensors"

PATH_KEY = "train.init.path"
KEYS = (PATH_KEY, "train.init.endpoint")
"""The keys of a run file that name the file."""

SHOWN = 5
"""How many tensors a message names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Which tensors of the model are read from the file."""

    names: Mapping[str, str]
    """The name in the file, by the name in the model."""
    random: tuple[str, ...]
    """The tensors of the model that keep their random values."""


def check_initial_weights(init: InitialWeights, endpoint: str | None, model: nn.Module) -> Fit:
    """Compare names and shapes of the file with those of the model, which may be on the meta device.

    `endpoint` is that of the run's storage. Raises ConfigError with every difference.
    """
    with _opened(init, endpoint) as tensors:
        return fit_of(init, {name: tensors.shape(name) for name in tensors.names}, model)


def load_initial_weights(init: InitialWeights, endpoint: str | None, model: nn.Module) -> None:
    """Copy the tensors of the file into the model, in the model's data types. Raises ConfigError."""
    with _opened(init, endpoint) as tensors:
        fit = fit_of(init, {name: tensors.shape(name) for name in tensors.names}, model)
        state = model.state_dict()
        with torch.no_grad():
            for name, in_file in fit.names.items():
                state[name].copy_(tensors.read(in_file))


def fit_of(init: InitialWeights, shapes: Mapping[str, tuple[int, ...]], model: nn.Module) -> Fit:
    """Match the tensors of the file with those of the model by name. Raises ConfigError."""
    state = model.state_dict(keep_vars=True)
    found = {
        name.removeprefix(init.prefix): name for name in shapes if name.startswith(init.prefix)
    }
    _require_matches(init, [*state, *found])
    wanted = {name for name in state if not _is_skipped(name, init)}
    given = {name for name in found if not _is_skipped(name, init)}
    # Of tensors that the model uses twice, safetensors holds only one.
    held = {id(state[name]) for name in given & state.keys()}
    missing = [name for name in state if name in wanted - given and id(state[name]) not in held]
    unknown = [name for name in found if name in given - state.keys()]
    both = [name for name in state if name in wanted & given]
    other = [name for name in both if tuple(state[name].shape) != shapes[found[name]]]
    problems = [
        *differences("are missing in the file", missing, [*found], {}),
        *differences("of the file are not in the model", unknown, [*state], {}),
        *differences(
            "have another shape",
            other,
            (),
            {name: (tuple(state[name].shape), shapes[found[name]]) for name in other},
        ),
    ]
    if problems:
        raise ConfigError(
            f"train.init.path = {init.path} does not fit the model:\n       "
            + "\n       ".join(problems)
            + "\n       Name them in train.init.skip, such as fc.*: tensors of the model then stay random."
        )
    names = {name: found[name] for name in both}
    return Fit(names=names, random=tuple(name for name in state if name not in wanted))


def _is_skipped(name: str, init: InitialWeights) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in init.skip)


def _require_matches(init: InitialWeights, names: list[str]) -> None:
    """Raise ConfigError for a pattern or prefix that matches no tensor."""
    for pattern in init.skip:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"train.init.skip: {pattern} matches no tensor of the model or of {init.path}, "
                f"such as {', '.join(names[:SHOWN])}"
            )


def differences(
    what: str,
    names: list[str],
    near: Iterable[str],
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
) -> Iterator[str]:
    """Describe the tensors with one kind of problem in a line, if there are any."""
    if not names:
        return
    shown = []
    for name in names[:SHOWN]:
        text = name
        if name in shapes:
            text += " {} in the model, {} in the file".format(*shapes[name])
        elif close := get_close_matches(name, near, n=1):
            text += f" (there is {close[0]})"
        shown.append(text)
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    yield f"{len(names)} tensors {what}: {', '.join(shown)}{more}"


# The file on this machine.


def pinned_weights(init: InitialWeights, folder: RunFolder) -> InitialWeights:
    """Return the settings with the commit that a model of the hub had at the first start of a run.

    `folder` is the run's. Raises TrainerError.
    """
    if not init.path.startswith(HUB):
        return init
    if folder.exists(folder.initial_weights):
        path = json.loads(folder.read(folder.initial_weights))["path"]
    else:
        path = HubSource(init.path, PATH_KEY).pinned
    return init.model_copy(update={"path": path})


def note_weights(init: InitialWeights, folder: RunFolder) -> None:
    """Write the address of a model of the hub into the run's folder, unless it is there."""
    if init.path.startswith(HUB) and not folder.exists(folder.initial_weights):
        folder.write(folder.initial_weights, json.dumps({"path": init.path}, indent=2))


def file_of(init: InitialWeights, endpoint: str | None) -> Path:
    """Return the file, which is fetched to this machine once if it lies elsewhere. Raises TrainerError.

    `endpoint` is that of the run's storage.
    """
    endpoint = init.endpoint or endpoint
    if init.path.startswith(HUB):
        name = init.file or f"model{SAFETENSORS}"
        return fetched(HubSource(init.path, PATH_KEY), [name], say_on_stderr) / name
    if is_remote(init.path):
        source = BucketFile(init.path, endpoint, KEYS)
        return fetched(source, [source.name], say_on_stderr) / source.name
    if not Path(init.path).is_file():
        found = "it is a folder" if Path(init.path).exists() else "there is none"
        raise ConfigError(f"train.init.path = {init.path} has to be a file, and {found}")
    return Path(init.path)


# Its tensors.


class _Tensors:
    """The tensors of a file by name."""

    names: list[str]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading its values."""
        raise NotImplementedError

    def read(self, name: str) -> Tensor:
        """Return a tensor in host memory."""
        raise NotImplementedError


class _Safetensors(_Tensors):
    """A file of safetensors, of which one tensor at a time is in memory."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.names = [*file.keys()]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        return tensor


class _StateDict(_Tensors):
    """A state_dict, whose file is mapped into memory."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = state
        self.names = [*state]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._state[name].shape)

    def read(self, name: str) -> Tensor:
        return self._state[name]


@contextmanager
def _opened(init: InitialWeights, endpoint: str | None) -> Iterator[_Tensors]:
    """Open the file, which is fetched if it is not on this machine. Raises TrainerError."""
    file = file_of(init, endpoint)
    if file.suffix == SAFETENSORS:
        yield from _open_safetensors(init, file)
    else:
        yield _StateDict(_state_dict_of(init, file))


def _open_safetensors(init: InitialWeights, file: Path) -> Iterator[_Tensors]:
    from safetensors import SafetensorError, safe_open

    if init.key is not None:
        raise ConfigError(
            f"train.init.key = {init.key}: a file of safetensors has no keys above its tensors; remove it"
        )
    try:
        opened = safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ConfigError(
            f"train.init.path = {init.path} is no whole file of safetensors: {error}"
        ) from None
    with opened as content:
        yield _Safetensors(content)


def _state_dict_of(init: InitialWeights, file: Path) -> Mapping[str, Tensor]:
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=_is_zip(file))
    except (UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else "it is empty"
        raise ConfigError(
            f"train.init.path = {init.path} holds no weights that may be loaded: {reason}\n"
            "       Nothing of it was run. Save a state_dict, or a file that ends in .safetensors."
        ) from None
    if init.key is not None:
        if not isinstance(content, Mapping) or init.key not in content:
            raise ConfigError(f"train.init.key = {init.key}: {init.path} has {_described(content)}")
        content = content[init.key]
    if not isinstance(content, Mapping) or not all(
        isinstance(value, Tensor) for value in content.values()
    ):
        raise ConfigError(
            f"train.init.path = {init.path} is no state_dict, but {_described(content)}.\n"
            "       Name the key of the state_dict: train.init.key."
        )
    return content


def _is_zip(file: Path) -> bool:
    """Return whether the file has PyTorch's zip format, which can be mapped into memory."""
    with file.open("rb") as stream:
        return stream.read(2) == b"PK"


def _described(content: object) -> str:
    if isinstance(content, Mapping):
        kinds = [f"{key} ({type(value).__name__})" for key, value in content.items()]
        return f"a mapping with the keys {', '.join(kinds[:SHOWN])}"
    return f"a value of type {type(content).__name__}"
