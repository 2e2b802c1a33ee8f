"""Take the two screenshots of the README: `make screenshots` trains the example and writes docs/images/.

It needs `tmux` and `chromium`, both of them Debian packages. A run is trained in a terminal of tmux. rich
makes an HTML page of the terminal's screen, and Chromium takes pictures of that page and of the run's report.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs/images"
COLUMNS, ROWS = 124, 34
PLAN = "trainyard plan examples/digits.yaml --gpus 16"
TRAIN = "trainyard train examples/digits.yaml"
PROMPT = re.compile(r"\$ ?\s*\Z")
MOMENT = re.compile(r"epoch (?:[89]|1[01])/12")
"""What the terminal shows when the picture is taken."""
LIMIT_S = 600
COLOURS = 128
CHROMIUM = (
    "chromium --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars "
    "--disable-background-networking --disable-component-update --disable-sync"
)
PAGE = """\
<!doctype html>
<meta charset="utf-8">
<style>
  body {{ margin: 0; padding: 24px; background: #0c0c0c; color: #d9d9d9; }}
  pre {{ margin: 0; font: 15px/1.35 "DejaVu Sans Mono", monospace; }}
</style>
<pre>{code}</pre>
"""


class Terminal:
    """A terminal of tmux with its own server, so that no other session is touched."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    def _tmux(self, *words: str) -> str:
        command = ["tmux", "-S", str(self._socket), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def start(self, folder: Path, environment: dict[str, str]) -> None:
        settings = [f"{name}={value}" for name, value in environment.items()]
        size = ["-x", str(COLUMNS), "-y", str(ROWS), "-c", str(folder)]
        shell = shlex.join(["env", *settings, "bash", "--norc", "--noprofile"])
        self._tmux("-f", "/dev/null", "new-session", "-d", *size, shell)
        self._tmux("set-option", "-g", "status", "off")

    def type(self, line: str) -> None:
        self._tmux("send-keys", "-l", line)
        self._tmux("send-keys", "Enter")

    def screen(self) -> str:
        """The screen with its colours, as ANSI sequences."""
        return self._tmux("capture-pane", "-p", "-e")

    def end(self) -> None:
        self._tmux("kill-server")

    def wait_for(self, pattern: re.Pattern[str]) -> str:
        """The screen as soon as it shows something. Raises TimeoutError."""
        deadline = time.monotonic() + LIMIT_S
        while not pattern.search(screen := self.screen()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the terminal does not show {pattern.pattern}:\n{screen}")
            time.sleep(0.5)
        return screen


@contextmanager
def terminal(folder: Path, environment: dict[str, str]) -> Iterator[Terminal]:
    opened = Terminal(folder / "tmux.socket")
    opened.start(folder, environment)
    try:
        yield opened
    finally:
        opened.end()


def html_of(screen: str) -> str:
    """An HTML page that shows a screen with ANSI sequences."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(screen.rstrip()), soft_wrap=True)
    return console.export_html(theme=MONOKAI, code_format=PAGE, inline_styles=True)


def picture(address: str, file: Path, width: int, height: int, profile: Path) -> None:
    """Take a picture of a page, with few enough colours for a small file."""
    options = [
        f"--user-data-dir={profile}",
        f"--window-size={width},{height}",
        f"--screenshot={file}",
    ]
    command = [*CHROMIUM.split(), "--virtual-time-budget=5000", *options, address]
    subprocess.run(command, check=True, capture_output=True)
    with Image.open(file) as image:
        small = image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    small.save(file, optimize=True)


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "examples").symlink_to(ROOT / "examples")
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PS1": "$ ",
            "TERM": "screen-256color",
        }
        with terminal(folder, environment) as shell:
            for command in (PLAN, TRAIN):
                shell.wait_for(PROMPT)
                shell.type(command)
                shell.wait_for(
                    re.compile(re.escape(command) + r"\s+\S")
                )  # the first line of its output
            screen = shell.wait_for(MOMENT)
            shell.wait_for(re.compile(r"succeeded: "))
        (folder / "terminal.html").write_text(html_of(screen))
        profile = folder / "chromium"
        picture(f"file://{folder}/terminal.html", IMAGES / "terminal.png", 1172, 745, profile)
        report = folder / "runs/digits/report.html"
        picture(f"file://{report}", IMAGES / "report.png", 1280, 1000, profile)


if __name__ == "__main__":
    main()
