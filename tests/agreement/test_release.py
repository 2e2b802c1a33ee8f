"""What `make dist` builds: one version, packages that work alone, and a bill of materials of the image."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from release.version import project_version, repeated_versions

if sys.version_info < (3, 11):
    pytest.skip("the release tools need Python 3.11", allow_module_level=True)

DPKG_STATUS = """\
Package: bash
Status: install ok installed
Architecture: amd64
Version: 5.2.15-2+b7

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1.0
"""

METADATA = """\
Metadata-Version: 2.4
Name: Jinja2
Version: 3.1.6
License-Expression: BSD-3-Clause
"""


def release(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "release", *arguments], check=True)


def inventory(folder: Path, *, metadata: str = METADATA) -> Path:
    (folder / "python").mkdir(parents=True)
    (folder / "dpkg-status").write_text(DPKG_STATUS)
    (folder / "python/jinja2-3.1.6.dist-info").write_text(metadata)
    return folder


@pytest.mark.parametrize("place", repeated_versions())
def test_the_version_is_one_number_everywhere(place: str) -> None:
    assert repeated_versions()[place] == project_version()


def test_the_bill_of_materials_names_the_packages_that_are_installed(tmp_path: Path) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    from release.bill import image_bill

    text = image_bill("registry/trainyard:0.1.0", inventory(tmp_path / "inventory"))
    bill = json.loads(text)
    assert bill["bomFormat"] == "CycloneDX"
    assert (bill["metadata"]["component"]["name"], bill["metadata"]["component"]["version"]) == (
        "registry/trainyard",
        "0.1.0",
    )
    assert {each["purl"] for each in bill["components"]} == {
        "pkg:deb/debian/bash@5.2.15-2%2Bb7?arch=amd64",
        "pkg:pypi/jinja2@3.1.6",
    }
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None


def test_a_bill_without_packages_is_refused(tmp_path: Path) -> None:
    from release.bill import image_bill

    folder = inventory(tmp_path / "inventory")
    (folder / "dpkg-status").write_text("")
    with pytest.raises(ValueError, match="has no Debian package"):
        image_bill("trainyard:0.1.0", folder)


def test_the_checksums_are_those_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_bytes(b"wheel")
    release("--dist", tmp_path, "checksums")
    release("--dist", tmp_path, "checksums")
    expected = hashlib.sha256(b"wheel").hexdigest()
    assert (tmp_path / "SHA256SUMS").read_text() == f"{expected}  a.whl\n"
