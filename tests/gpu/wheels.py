"""Download the wheels that `make gpu` needs on a machine without network: `make gpu-wheels` runs it.

    python -m tests.gpu.wheels [--python 3.12] [--machine x86_64] [--has pyarrow ...] [--torch 2.11.0]

The packages are those of the dependency group `gpu-wheels` in pyproject.toml with what they need, in the
versions of requirements.txt. The wheels lie in build/gpu-wheels/part-1, part-2 and so on, of at most
PART_BYTES each, so that they can be copied one after the other where a copy is limited in size.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.bench.rounds import ROOT, say
from tests.gpu.needs import MACHINE, WHEELS, name_of, requirements_in

FOLDER = ROOT / "build/gpu-wheels"
PART_BYTES = 56 * 2**20
"""With the checkout beside it, a part stays below 64 MiB."""
GLIBC = 28
"""The machine has at least glibc 2.28, as the wheels of PyTorch want."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.wheels", allow_abbrev=False)
    this = ".".join(platform.python_version_tuple()[:2])
    parser.add_argument("--python", default=this, help="version of the GPU machine's Python")
    parser.add_argument("--machine", default=platform.machine(), help="its processor")
    parser.add_argument("--has", nargs="*", default=[], help="more packages that it has already")
    parser.add_argument(
        "--torch", help="its version of torch: bring the torchvision that was made for it, too"
    )
    wanted = parser.parse_args()
    if re.fullmatch(r"3\.\d+", wanted.python) is None:
        parser.error(f"--python {wanted.python} is not a version such as 3.12")
    shutil.rmtree(FOLDER, ignore_errors=True)
    all_wheels = FOLDER / "all"
    all_wheels.mkdir(parents=True)
    for text in texts_of(wanted.python, wanted.machine, wanted.has, wanted.torch):
        download(text, all_wheels, wanted.python, wanted.machine)
    parts = divide({file.name: file.stat().st_size for file in all_wheels.iterdir()})
    for number, names in enumerate(parts, 1):
        part = FOLDER / f"part-{number}"
        part.mkdir()
        for name in names:
            (all_wheels / name).rename(part / name)
        size = sum(file.stat().st_size for file in part.iterdir())
        say(f"{part.relative_to(ROOT)}: {len(names)} wheels, {size / 2**20:.1f} MiB")
    all_wheels.rmdir()


def texts_of(python: str, machine: str, has: Sequence[str], torch: str | None) -> list[str]:
    """Return what is to be downloaded, as texts of requirements with hashes."""
    there = {*map(name_of, requirements_in(MACHINE)), *has}
    texts = [
        compiled(["--group", WHEELS, "--constraint", "requirements.txt"], python, machine, there)
    ]
    if torch:
        # Of what torchvision needs, nothing is downloaded: torch and numpy are there, Pillow is above.
        pins = f"torchvision\ntorch=={torch}\n"
        found = compiled(["-"], python, machine, there - {"torchvision"}, pins)
        texts.append(entry_of(found, "torchvision"))
    return texts


def compiled(
    source: list[str], python: str, machine: str, there: set[str], text: str | None = None
) -> str:
    """Resolve requirements for the GPU machine, without the packages that are there."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", *source]
    command += ["--python-version", python, "--python-platform", f"{machine}-manylinux_2_{GLIBC}"]
    command += ["--generate-hashes", "--no-header", "--no-annotate"]
    command += [word for name in sorted(there) for word in ("--no-emit-package", name)]
    done = subprocess.run(
        command, cwd=ROOT, input=text, check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def entry_of(requirements: str, name: str) -> str:
    """Return the one requirement of that name, with its hashes."""
    entries = re.split(r"\n(?=\S)", requirements)
    return next(entry for entry in entries if entry.startswith(f"{name}=="))


def download(text: str, folder: Path, python: str, machine: str) -> None:
    requirements = folder / "requirements.txt"
    requirements.write_text(text)
    command = [sys.executable, "-m", "uv", "tool", "run", "--quiet", "--from", "pip", "pip"]
    command += ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command += ["--implementation", "cp", "--python-version", python, "--dest", str(folder)]
    # pip takes each name of a platform literally.
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(GLIBC, 4, -1)]
    tags += [f"manylinux2014_{machine}", f"manylinux2010_{machine}", f"manylinux1_{machine}"]
    command += [word for tag in tags for word in ("--platform", tag)]
    subprocess.run([*command, "--requirement", str(requirements)], cwd=ROOT, check=True)
    requirements.unlink()


def divide(sizes: Mapping[str, int], limit: int = PART_BYTES) -> list[list[str]]:
    """Divide files into parts of at most `limit` bytes.

    The largest file comes first, and each goes into the first part that has room for it.
    Raises ValueError if a file is larger than a part.
    """
    parts: list[list[str]] = []
    for name in sorted(sizes, key=lambda each: (-sizes[each], each)):
        if sizes[name] > limit:
            raise ValueError(f"{name} has {sizes[name]} bytes, and a part at most {limit}")
        for part in parts:
            if sum(sizes[each] for each in part) + sizes[name] <= limit:
                part.append(name)
                break
        else:
            parts.append([name])
    return parts


if __name__ == "__main__":
    main()
