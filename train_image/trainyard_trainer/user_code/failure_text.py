"""Find the error of the user's code in the output of its program: the exception, and the line that raised
it."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from trainyard_trainer.run_files.driver_output import ERROR as ERROR_PREFIX

PREFIX = re.compile(
    r"^(?:\x1b\[[0-9;]*m)*"
    r"(?:\(\w+[^()]*pid=\d+[^()]*\)(?:\x1b\[[0-9;]*m)* ?)?"  # Ray: (TorchrunActor pid=7, ip=10.0.0.1)
    r"(?:\[(?:rank|default)(?P<rank>\d+)\]:\s?)?"  # torch and torchrun: [rank1]:
)
"""What Ray, torch and torchrun put in front of a worker's line."""

GROUP_MARGIN = re.compile(r"^\s*(?:\+-[+-]*\s?|\|\s?|\+ (?=Exception Group Traceback))+")
"""What precedes the lines of an exception group: "  | ", "  +-+---------------- 1 ----------------"."""

SUB_EXCEPTION = re.compile(r"\+-{8,} (?:\d+|\.\.\.) -{8,}$")
START = re.compile(r"^\s*(?:Exception Group )?Traceback \(most recent call last\):$")
FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>\S+))?')
ERROR = re.compile(r"^[A-Za-z_](?:[\w.]|<locals>)*(?:: .*|$)")
"""The last line of a traceback: "ValueError: the message". A class in a function is `m.f.<locals>.E`."""

INSTALLED = re.compile(
    r"/(?:site|dist)-packages/|/lib/python3[\d.]*/|/trainyard_trainer/|^<frozen |^<string>$"
)
"""Files that are not the user's code."""

CODE_FOLDER = re.compile(
    r"^.*/(?:working_dir_files/_ray_pkg_[0-9a-f]+"  # on Ray's workers
    r"|trainyard-\w+/tmp\w+)/"  # where the program starts: see `command._unpacked_code`
)
"""The temporary folders with the run's code, whose names tell a reader nothing."""

SECONDARY = re.compile(
    r"DistNetworkError|DistBackendError|ChildFailedError|WorkerGroupError|ControllerError"
    r"|Connection (?:closed|reset|refused) by peer|Connection (?:reset|refused)|connectFullMesh|RayActorError"
)
"""Errors that a worker gets because another worker has ended."""

FINAL = re.compile(
    r"(?:^|\.)(?:ModuleNotFoundError|ImportError|SyntaxError|IndentationError|TabError|NameError"
    r"|FileNotFoundError|NotADirectoryError|RepositoryNotFoundError)\b"
    r"|is not a valid model identifier|is not a local folder"
)
"""Errors that a retry cannot cure, as the last line of a traceback has them."""

LOG_LINE = re.compile(r"^[EWID]\d{4} |^[=-]{5,}$|^\s*$|^\(?(?:error|trainyard):? ")
"""Lines that do not describe a failure: glog's, separators, empty lines, and trainyard's own."""

KEPT_LINES = 2000
"""The number of lines of output in which the error is looked for."""


@dataclass(slots=True)
class Traceback:
    """A traceback as Python prints it."""

    rank: str | None
    """The worker's rank, if the output names it."""
    frames: list[re.Match[str]] = field(default_factory=list)
    error: str = ""

    @property
    def user_frame(self) -> re.Match[str] | None:
        """The last frame in the user's code, if there is one."""
        frames = [frame for frame in self.frames if not INSTALLED.search(frame["file"])]
        return frames[-1] if frames else None

    def __str__(self) -> str:
        worker = "" if self.rank is None else f"worker {self.rank}: "
        frame = self.user_frame
        if frame is None:
            return f"{worker}{self.error}"
        function = f" in {frame['function']}" if frame["function"] else ""
        file = CODE_FOLDER.sub("", frame["file"])
        return f"{worker}{self.error} ({file}:{frame['line']}{function})"


class FailureText:
    """Keeps the last lines of a program's output, to describe its failure."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)

    def reading(self, say: Callable[[str], None]) -> Callable[[str], None]:
        """Return a function that stores a line and passes it on to `say`."""

        def keep(line: str) -> None:
            self._lines.append(line)
            say(line)

        return keep

    def describe(self) -> str:
        """Describe the error of the user's code, or quote the last line of the output if there is no
        traceback."""
        return describe(self._lines)

    @property
    def refusal(self) -> str:
        """What follows `error: ` in the last line that begins with it; empty if there is none."""
        refusals = (line for line in reversed(self._lines) if line.startswith(ERROR_PREFIX))
        return next(refusals, "").removeprefix(ERROR_PREFIX)

    @property
    def is_final(self) -> bool:
        """Whether the same code would end with the same error again."""
        primary = primary_traceback(self._lines)
        return primary is not None and FINAL.search(primary.error) is not None


def describe(lines: Collection[str]) -> str:
    """Describe the failure with which a program's output ends, in one line; empty if it describes none.

    In this order: the last error that the user's code has raised, the last error of a library, an error that
    only follows from the end of another worker, a signal that killed a worker, and the last line.
    """
    if (primary := primary_traceback(lines)) is not None:
        return str(primary)
    without_prefix = [PREFIX.sub("", line, count=1) for line in lines]
    if killed := _killed_worker(without_prefix):
        return killed
    messages = [line.strip() for line in without_prefix if not LOG_LINE.search(line)]
    return messages[-1] if messages else ""


def primary_traceback(lines: Collection[str]) -> Traceback | None:
    """Return the traceback of the error that caused the others, or None if the lines hold no traceback.

    One in the user's code comes first, and one that follows from the end of another worker comes last.
    """
    complete = [traceback for traceback in tracebacks(lines) if traceback.error]
    in_user_code = [traceback for traceback in complete if traceback.user_frame is not None]
    for candidates in (in_user_code, complete):
        primary = [each for each in candidates if not SECONDARY.search(each.error)]
        if primary:
            return primary[-1]
    return in_user_code[-1] if in_user_code else None


def tracebacks(lines: Iterable[str]) -> list[Traceback]:
    """Return the tracebacks in a program's output, in order. Lines of several workers may be mixed."""
    found: list[Traceback] = []
    open_by_rank: dict[str | None, Traceback] = {}
    for line in lines:
        prefix = PREFIX.match(line)
        assert prefix is not None
        rank, text = prefix["rank"], GROUP_MARGIN.sub("", line[prefix.end() :]).rstrip()
        # A syntax error of the script has a frame without a heading; an error of a group may have neither.
        is_heading = START.match(text) or SUB_EXCEPTION.search(line)
        if is_heading or (rank not in open_by_rank and FRAME.match(text)):
            open_by_rank[rank] = Traceback(rank)
            found.append(open_by_rank[rank])
        if is_heading:
            continue
        if rank in open_by_rank:
            traceback = open_by_rank[rank]
            if frame := FRAME.match(text):
                traceback.frames.append(frame)
            elif ERROR.match(text):
                traceback.error = text
                del open_by_rank[rank]
    return _with_groups(found)


def _with_groups(found: list[Traceback]) -> list[Traceback]:
    """Give each error of an exception group the frame of the group, if its own traceback has no frame."""
    for before, after in pairwise(found):
        if not after.frames:
            after.frames = before.frames
    return found


def _killed_worker(lines: Iterable[str]) -> str:
    """Return which worker of torchrun was killed by a signal, from torchrun's own table of failures."""
    text = "\n".join(lines)
    root = text.rfind("Root Cause (first observed failure)")
    if root < 0:
        return ""
    rank = re.search(r"rank\s*: (\d+)", text[root:])
    signal = re.search(r"Signal \d+ \((SIG\w+)\)", text[root:])
    return f"worker {rank[1]} was killed by {signal[1]}" if rank and signal else ""
