"""Keep the versions of data sets of Lance that a run reads, so that all its attempts read the same rows."""

from __future__ import annotations

import json
from collections.abc import Mapping

from trainyard_trainer.data.sources.lance_datasets import LanceVersion
from trainyard_trainer.run_folder.folder import RunFolder


def kept_versions(folder: RunFolder) -> dict[str, LanceVersion]:
    """Return the versions that the first attempt of a run has read, by the addresses of the data sets."""
    if not folder.exists(folder.data_versions):
        return {}
    known = json.loads(folder.read(folder.data_versions))
    return {address: LanceVersion(**version) for address, version in known.items()}


def keep_versions(folder: RunFolder, versions: Mapping[str, LanceVersion]) -> None:
    """Write the versions that a run reads into its folder, unless they are there."""
    if versions and kept_versions(folder) != versions:
        known = {address: version._asdict() for address, version in versions.items()}
        folder.write(folder.data_versions, json.dumps(known, indent=2))
