"""Saving beside training: the step waits for a copy in host memory, a thread brings that to storage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch


class Saver:
    """Does one save at a time in a thread of its own. Rank 0 has one."""

    def __init__(self, save: Callable[[dict[str, Any]], None]) -> None:
        """`save` gets the contents of the checkpoint's files and whatever else was given to `start`."""
        self._save = save
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """After an error of the loop a save under way ends, but its own error is not the news."""
        if kind is None:
            self.wait()
        self._thread.shutdown()

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way. Raises what the last one raised."""
        if self._pending is None:
            return False
        if not self._pending.done():
            return True
        self.wait()
        return False

    def start(self, **contents: Any) -> None:
        """Copy the tensors and save them in the background, once the save before is done."""
        self.wait()
        self._pending = self._thread.submit(self._save, on_host(contents))

    def wait(self) -> None:
        """Until nothing is under way. Raises what the last save raised."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()


def on_host(content: Any) -> Any:
    """The same with all tensors copied to host memory, where training does not change them."""
    if isinstance(content, torch.Tensor):
        return content.detach().to("cpu", copy=True)
    if isinstance(content, Mapping):
        return {key: on_host(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return type(content)(map(on_host, content))
    return content
