"""TensorBoard event files of a run: the lines of metrics.jsonl once more, as curves.

The step of an event is the number of training samples seen, so that runs of other batch sizes lie over each
other. Each start of the workers begins a file, and tells TensorBoard to forget what comes again.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c

from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.measurements.metrics import METRICS, RunMetric, tensorboard_values


class TensorBoard:
    """Writes records as they lie in metrics.jsonl; rank 0 has one.

    `samples` are those of the checkpoint from which the workers start.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        samples: int,
        metrics: Iterable[RunMetric] = METRICS,
        shows_epochs: bool = True,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`shows_epochs`: each epoch at once, where they are no matter of milliseconds."""
        self.folder = folder
        self.metrics = tuple(metrics)
        self.shows_epochs = shows_epochs
        self.now = now
        self.flushed = now()
        self.path = folder.events(_next_number(folder))
        self.pending = _framed(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._add(samples + 1, session_log=SessionLog(status=SessionLog.START))

    def __call__(self, record: Mapping[str, Any]) -> None:
        values = [
            Summary.Value(tag=tag, simple_value=value)
            for tag, value in tensorboard_values(record, self.metrics).items()
        ]
        self._add(record["samples"], summary=Summary(value=values))
        is_due = self.now() - self.flushed >= self.folder.flush_interval_s
        if is_due or (self.shows_epochs and record["kind"] == "epoch"):
            self._flush()

    def _add(self, samples: int, **content: Any) -> None:
        self.pending += _framed(Event(wall_time=time.time(), step=samples, **content))

    def close(self) -> None:
        """Write what the file still lacks."""
        if self.pending:
            self._flush()

    def _flush(self) -> None:
        self.folder.outlast(lambda: self.folder.append(self.path, self.pending))
        self.pending, self.flushed = b"", self.now()


def _next_number(folder: RunFolder) -> int:
    number = 1
    while folder.exists(folder.events(number)):
        number += 1
    return number


def _framed(event: Event) -> bytes:
    """A record of an event file: its length and itself, each with a checksum.

    tensorboardX's own writer wants a file of its own, and waits for the disk at each flush.
    """
    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    return b"".join(
        (
            length,
            struct.pack("<I", masked_crc32c(length)),
            data,
            struct.pack("<I", masked_crc32c(data)),
        )
    )
