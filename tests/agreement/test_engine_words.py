"""The engine, the loaders, the checkpoints and the run's folder serve any kind of data, and know none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainyard_trainer

ROOT = Path(trainyard_trainer.__file__).parent
ROOMS = ("engine", "data/loading", "checkpointing", "run_folder")
WORDS = re.compile(r"(?<![a-zA-Z])(image|label|text|accuracy)(?:s|_|\b)", re.IGNORECASE)

OTHER_MEANINGS = {
    "data/loading/ray_source.py": {"label"},  # labels of Ray nodes
    "run_folder/code_archive.py": {"text"},  # an archive in base64
    "run_folder/log.py": {"text"},  # what a process prints
    "run_folder/ownership/claim_holder.py": {"text"},  # Path.read_text
    "run_folder/measurements/metrics.py": {
        "label",
        "image",
    },  # labels of gauges and curves; the folder train_image
    "run_folder/measurements/startup.py": {"text"},  # Path.read_text
    "run_folder/run_limit.py": {"text"},  # an argument of subprocess
    "run_folder/run_record.py": {"image"},  # container images
}
"""Files in which a word means something else than a kind of data."""

FILES = [file for room in ROOMS for file in sorted((ROOT / room).glob("**/*.py"))]


def words_in(file: Path) -> Iterator[str]:
    for match in WORDS.finditer(file.read_text()):
        yield match[1].lower()


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_room_of_the_engine_names_no_kind_of_data(file: Path) -> None:
    allowed = OTHER_MEANINGS.get(str(file.relative_to(ROOT)), set())
    assert set(words_in(file)) == allowed


def test_the_words_are_found() -> None:
    assert [match[1] for match in WORDS.finditer("image_size labels, text; context")] == [
        "image",
        "label",
        "text",
    ]
