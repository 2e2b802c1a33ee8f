"""The bill of materials of the image: a CycloneDX document of its Debian and Python packages.

`tests/cluster/image.sh IMAGE --inventory DIR` copies the two package databases out of a built image.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL

DPKG_STATUS = "dpkg-status"
"""The file of an inventory with Debian's package database."""

PYTHON_METADATA = "python"
"""The folder of an inventory with one METADATA file for each Python package."""

INSTALLED = "install ok installed"
"""dpkg's status of a package that is there."""


def image_bill(image: str, inventory: Path) -> str:
    """Return the bill of materials of an image as CycloneDX 1.6 in JSON.

    Raises ValueError if the inventory has no package of a kind.
    """
    debian = list(debian_components((inventory / DPKG_STATUS).read_text(encoding="utf-8")))
    files = sorted((inventory / PYTHON_METADATA).iterdir())
    python = list(python_components(file.read_text(encoding="utf-8") for file in files))
    for kind, components in (("Debian", debian), ("Python", python)):
        if not components:
            raise ValueError(f"the inventory in {inventory} has no {kind} package")
    name, _, tag = image.rpartition(":")
    container = Component(name=name, version=tag, type=ComponentType.CONTAINER, bom_ref=image)
    bom = Bom(components=[*debian, *python], metadata=BomMetaData(component=container))
    bom.register_dependency(container, bom.components)
    outputter = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6)
    return outputter.output_as_string(indent=2) + "\n"


def debian_components(status: str) -> Iterator[Component]:
    """Read the installed packages of a dpkg status file."""
    for paragraph in status.strip().split("\n\n"):
        fields = Parser().parsestr(paragraph, headersonly=True)
        if fields["Status"] != INSTALLED:
            continue
        architecture = {"arch": fields["Architecture"]}
        purl = PackageURL("deb", "debian", fields["Package"], fields["Version"], architecture)
        yield _component(fields, fields["Package"], purl)


def python_components(metadata: Iterable[str]) -> Iterator[Component]:
    """Read Python packages from the texts of their METADATA files (PEP 566)."""
    for text in metadata:
        fields = Parser().parsestr(text, headersonly=True)
        name = fields["Name"].lower().replace("_", "-").replace(".", "-")
        yield _component(fields, name, PackageURL("pypi", None, name, fields["Version"]))


def _component(fields: Message, name: str, purl: PackageURL) -> Component:
    return Component(
        name=name,
        version=fields["Version"],
        type=ComponentType.LIBRARY,
        purl=purl,
        bom_ref=purl.to_string(),
    )
