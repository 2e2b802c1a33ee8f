"""The command `check`: check the RayJobs and RayClusters of a manifest by KubeRay's rules."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from trainyard.cli.options import Json, print_json


def check(
    manifest: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.yaml",
            help="A manifest; objects other than RayJobs and RayClusters are skipped. - is standard input.",
        ),
    ],
    kuberay: Annotated[Literal["1.6", "1.7"], typer.Option(help="The version of KubeRay.")] = "1.6",
    as_json: Json = False,
) -> None:
    """Check RayJobs and RayClusters by KubeRay's rules before they are created. Exits 1 on an error."""
    from trainyard.cli import show
    from trainyard.errors import ConfigError
    from trainyard.rules import check
    from trainyard.run_file.yaml_text import read_documents

    subjects = [
        document
        for document in read_documents(manifest)
        if isinstance(document, dict) and document.get("kind") in check.KINDS
    ]
    if not subjects:
        raise ConfigError(f"{manifest} holds none of {', '.join(check.KINDS)}")
    found = [
        {"object": check.name_of(subject)} | asdict(finding)
        for subject in subjects
        for finding in check.check(subject, kuberay)
    ]
    errors = sum(row["severity"] == "error" for row in found)
    if as_json:
        print_json(found)
    elif found:
        headings = ("severity", "object", "path", "value", "problem", "remedy")
        show.table(headings, [[row[key] for key in headings] for row in found])
    show.say(
        f"{manifest}: {len(subjects)} checked by the rules of KubeRay {kuberay}, "
        f"{errors} errors, {len(found) - errors} warnings"
    )
    if errors:
        raise typer.Exit(1)
