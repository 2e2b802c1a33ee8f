"""What the logs of workers cost the steps of a run: a thread copies the end of a worker's output to storage.

Counted is the CPU time of the process, the thread's included, since other work on the machine changes it less
than the clock on the wall. The log is copied ten times as often as in a run.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tests.bench.loops import again_and_again, ours, same_batch
from tests.bench.rounds import Options, Row, Section, alternate, main, ratios
from tests.bench.step import settings_of
from tests.trainer.s3_server import CREDENTIALS, running_bucket
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.worker_log import FILE_BYTES, INTERVAL_S, WorkerLog

OFTEN = 10
"""How many times as often as in a run the log is copied beside the steps."""
LARGEST_RATIO = 1.01
LARGEST_PERCENT = 1.0
"""Of the time between two copies."""
LINE = b"step 12345: loss 0.123456, 1,234 samples/s, and what else a user prints in each step\n"


@contextmanager
def printing(folder: RunFolder, place: Path, every_s: float) -> Iterator[Path]:
    """Copy a growing file to a run's folder while the block runs; yield the file."""
    stream = place / "worker.out"
    stream.write_bytes(b"")
    log = WorkerLog(
        folder, "worker.log", [stream], interval_s=every_s, first_s=every_s, limit=FILE_BYTES
    )
    try:
        yield stream
    finally:
        log.end()


def copy_s(folder: RunFolder, place: Path) -> float:
    """Return the CPU seconds of one copy of a log that is full."""
    with printing(folder, place, every_s=3600) as stream:
        stream.write_bytes(LINE * (FILE_BYTES // len(LINE)))
        began = time.process_time()
    return time.process_time() - began


def measure(options: Options) -> list[Section]:
    torch.set_num_threads(1)
    settings = settings_of(64, options.choose(40, 2))
    batch, learn = same_batch(settings), ours(settings)

    def steps(stream: Path | None = None) -> float:
        """Return the CPU seconds of a step after which a line is printed."""

        def batches() -> Iterator[object]:
            for each in again_and_again(batch, settings):
                if stream is not None:
                    with stream.open("ab") as file:
                        file.write(LINE)
                yield each

        return learn(batches()).step_s

    def copied(folder: RunFolder, place: Path) -> Callable[[], float]:
        def turn() -> float:
            with printing(folder, place, INTERVAL_S / OFTEN) as stream:
                return steps(stream)

        return turn

    os.environ |= CREDENTIALS
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        with running_bucket(place / "server") as bucket:
            folders = {
                "a folder": RunFolder.open(f"{place}/runs", "bench", None),
                "a bucket": RunFolder.open(bucket.path, "bench", bucket.endpoint),
            }
            ways = {name: copied(folder, place) for name, folder in folders.items()}
            found = alternate({"without": steps} | ways, options.rounds_or(5))
            copies = alternate(
                {name: lambda f=folder: copy_s(f, place) for name, folder in folders.items()},
                options.choose(20, 2),
            )
    rows = []
    for name in folders:
        rows += [
            Row(
                what=f"ResNet-18 step, the log copied to {name} each second, over a step without",
                unit="x",
                values=ratios(found[name], found["without"]),
                at_most=LARGEST_RATIO,
            ),
            Row(
                what=f"a copy of a full log (1 MiB) to {name}",
                unit="ms",
                values=tuple(seconds * 1e3 for seconds in copies[name]),
            ),
            Row(
                what=f"that as a share of the {INTERVAL_S:g} s between two copies of a run",
                unit="%",
                values=tuple(100 * seconds / INTERVAL_S for seconds in copies[name]),
                at_most=LARGEST_PERCENT,
            ),
        ]
    notes = ("CPU time of the process. The bucket is versitygw on the same machine.",)
    return [Section(title="The logs of workers", rows=tuple(rows), notes=notes)]


if __name__ == "__main__":
    main(measure)
