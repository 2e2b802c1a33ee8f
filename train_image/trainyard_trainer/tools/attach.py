"""The command line that connects this terminal to the debugger of a worker of this machine or pod.

    python -m trainyard_trainer.tools.attach PROCESS

`trainyard debug` runs it in the pod of the worker. At the end of standard input the worker trains on.
"""

from __future__ import annotations

import argparse
import os
import select
import socket
import sys

from trainyard_trainer.run_files.exit_codes import DETACHED, SUCCEEDED, WRONG_INPUT
from trainyard_trainer.run_files.unix_sockets import debugger_socket

PIECE_BYTES = 65536


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trainyard_trainer.tools.attach", allow_abbrev=False
    )
    parser.add_argument("process", type=int, help="the id of the worker's process")
    process = parser.parse_args(arguments).process
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(debugger_socket(process))
        except ConnectionRefusedError:
            print(
                f"error: process {process} waits for no debugger: it has ended, has not begun to train, "
                "or is no worker of a recipe",
                file=sys.stderr,
            )
            return WRONG_INPUT
        try:
            connect(connection)
        except KeyboardInterrupt:
            return DETACHED
    return SUCCEEDED


def connect(connection: socket.socket) -> None:
    """Pass on standard input, and print what comes, until the debugger closes the connection."""
    stdin, stdout = sys.stdin.fileno(), sys.stdout.fileno()
    sources: list[socket.socket | int] = [connection, stdin]
    while True:
        ready, _, _ = select.select(sources, [], [])
        if connection in ready:
            try:
                piece = connection.recv(PIECE_BYTES)
            except ConnectionResetError:
                return
            if not piece:
                return
            os.write(stdout, piece)
        if stdin in ready:
            piece = os.read(stdin, PIECE_BYTES)
            try:
                connection.sendall(piece) if piece else connection.shutdown(socket.SHUT_WR)
            except OSError:  # the debugger has closed it; what it has sent is still to be read
                piece = b""
            if not piece:
                sources.remove(stdin)


if __name__ == "__main__":
    sys.exit(main())
