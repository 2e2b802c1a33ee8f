"""Train trees on two real workers of a boosting library, end one of them, and print the other one's error.

python two_boosting_workers.py LIBRARY FOLDER
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from test_gradient_boosting import houses, of_houses, table_of
from torch import distributed

from trainyard_trainer.boosting.libraries import LIBRARIES, BoostingInput, Figures
from trainyard_trainer.boosting.table import read_share
from trainyard_trainer.errors import TrainerError
from trainyard_trainer.parallel.worker import Worker

ROUNDS_BEFORE_THE_END = 3
PAIRS = 10
SECONDS_FOR_THE_ERROR = 10


def train(
    rank: int, library: str, folder: Path, group: Path, tracker: dict[str, Any], ports: list[int]
) -> None:
    """Train as one of two workers; worker 1 ends in a round, and worker 0 prints its error."""
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{group}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=30),
    )
    config = of_houses(folder / "houses", train__library=library, train__rounds=100_000)
    table = table_of(config)
    left = ROUNDS_BEFORE_THE_END

    def each_round(figures: Figures, model: Callable[[], bytes]) -> bool:
        nonlocal left
        left -= 1
        if rank == 1 and not left:
            os._exit(9)
        return True

    task = BoostingInput(
        train=config.train,
        table=table,
        rows=read_share(table, table.train, rank, 2),
        valid=read_share(table, table.valid, rank, 2),
        worker=Worker(rank=rank, world_size=2, device=torch.device("cpu")),
        threads=1,
        network=lambda: {
            "num_machines": 2,
            "machines": ",".join(f"127.0.0.1:{port}" for port in ports),
            "local_listen_port": ports[rank],
        },
    )
    with joined(library, tracker):
        try:
            LIBRARIES[library].boost(task, None, 0, each_round)
        except TrainerError as error:
            print(
                type(error).__name__,
                error.is_final,
                str(error).splitlines()[0],
                sep="\n",
                flush=True,
            )
        # XGBoost cannot leave a group whose other worker is gone.
        os._exit(0)


def joined(library: str, tracker: dict[str, Any]) -> Any:
    """Join XGBoost's group of workers; LightGBM connects by itself."""
    if library == "lightgbm":
        return nullcontext()
    from xgboost.collective import CommunicatorContext

    return CommunicatorContext(**tracker)


def main() -> None:
    """Start pairs of workers until a worker 0 has printed its error.

    XGBoost 3.2 loses about one such error in ten: its thread for the connections ends before the worker waits
    for it, and the worker then waits without end. Ray Train ends such a worker in a run.
    """
    library, folder = sys.argv[1], Path(sys.argv[2])
    houses(folder / "houses")
    for attempt in range(PAIRS):
        if has_ended_both(library, folder, attempt):
            break
    # The tracker waits for the worker that has ended.
    sys.stdout.flush()
    os._exit(0)


def has_ended_both(library: str, folder: Path, attempt: int) -> bool:
    """Start two workers, and return whether worker 0 has ended by itself when worker 1 had ended."""
    tracker = {}
    if library == "xgboost":
        from xgboost.tracker import RabitTracker

        started = RabitTracker(n_workers=2, host_ip="127.0.0.1")
        started.start()
        tracker = started.worker_args()
    context = multiprocessing.get_context("fork")
    given = (library, folder, folder / f"group-{attempt}", tracker, free_ports())
    workers = [context.Process(target=train, args=(rank, *given)) for rank in range(2)]
    for worker in workers:
        worker.start()
    workers[1].join()
    workers[0].join(SECONDS_FOR_THE_ERROR)
    has_ended = not workers[0].is_alive()
    workers[0].kill()
    workers[0].join()
    return has_ended


def free_ports() -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


if __name__ == "__main__":
    main()
