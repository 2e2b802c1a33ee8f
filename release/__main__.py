"""Build the parts of a release: `python -m release packages | bill IMAGE INVENTORY | checksums`.

packages     the wheel, the sdist and the packaged chart
bill         the CycloneDX bill of materials of a built image, from the inventory of its packages
checksums    SHA256SUMS of everything in dist/
version      print the version; exit with 1 if another place names another one
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from release.version import ROOT, project_version, wrong_versions

DIST = ROOT / "dist"
CHECKSUMS = "SHA256SUMS"


def build_packages(dist: Path) -> None:
    """Build wheel, sdist and chart into a folder."""
    if shutil.which("helm") is None:
        sys.exit(
            "error: helm is not on PATH\n       `make cluster-build` builds one, which make targets find."
        )
    subprocess.run(
        [sys.executable, "-m", "uv", "build", "--quiet", "--out-dir", dist, ROOT], check=True
    )
    (dist / ".gitignore").unlink(missing_ok=True)  # uv leaves one that ignores the whole folder
    subprocess.run(
        ["helm", "package", ROOT / "charts/trainyard", "--destination", dist],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def write_bill(image: str, inventory: Path, dist: Path) -> None:
    """Write the bill of materials of an image beside the packages."""
    from release.bill import image_bill

    file = dist / f"trainyard-image-{project_version()}.cdx.json"
    file.write_text(image_bill(image, inventory), encoding="utf-8")


def write_checksums(dist: Path) -> None:
    """Write SHA256SUMS, which `sha256sum --check` reads, for every file of a release."""
    files = sorted(file for file in dist.iterdir() if file.is_file() and file.name != CHECKSUMS)
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (dist / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Run one part of `make dist` and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m release", allow_abbrev=False)
    parser.add_argument(
        "--dist", type=Path, default=DIST, help="where the files go (default: dist/)"
    )
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("version", help="print the version, and check that it is the same everywhere")
    parts.add_parser("packages", help="build wheel, sdist and chart")
    parts.add_parser("checksums", help="write SHA256SUMS")
    bill = parts.add_parser("bill", help="write the bill of materials of an image")
    bill.add_argument("image", help="the image's name with its tag")
    bill.add_argument("inventory", type=Path, help="what `image.sh IMAGE --inventory DIR` wrote")
    wanted = parser.parse_args(arguments)
    if wrong := wrong_versions():
        print("error: a release has one version", *wrong, sep="\n       ", file=sys.stderr)
        return 1
    wanted.dist.mkdir(parents=True, exist_ok=True)
    match wanted.part:
        case "version":
            print(project_version())
        case "packages":
            build_packages(wanted.dist)
        case "checksums":
            write_checksums(wanted.dist)
        case "bill":
            write_bill(wanted.image, wanted.inventory, wanted.dist)
    return 0


if __name__ == "__main__":
    sys.exit(main())
