"""The golden files are what is rendered today, all of them and to the letter."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest
from golden import (
    FOLDER,
    METRICS_PAGE,
    PAGE,
    PLATFORM,
    ROOT,
    TABLE,
    TABLES_OF_DOCS,
    chart_platform,
    expected_files,
    rendered,
    with_tables,
)
from helm_chart import need_tool

from trainyard.diagnosis.page import catalogue_page
from trainyard_trainer.run_folder.measurements.metrics import metrics_page

REPAIR = "If the change is meant, run `make golden` and read its diff."


def difference(golden: str, today: str) -> str:
    return "\n".join(
        difflib.unified_diff(
            golden.splitlines(), today.splitlines(), "golden", "today", lineterm=""
        )
    )


@pytest.mark.parametrize("path", expected_files(), ids=lambda path: path.stem)
def test_rendered_objects_are_the_golden_ones(path: Path) -> None:
    assert path.exists(), f"{path.name} is missing. {REPAIR}"
    today = expected_files()[path]()
    assert path.read_text() == today, f"{difference(path.read_text(), today)}\n{REPAIR}"


def test_no_golden_file_is_left_over() -> None:
    assert set(FOLDER.glob("*")) == set(expected_files()), REPAIR


def test_the_packaged_platform_is_the_chart_at_its_default_values() -> None:
    today = chart_platform(str(need_tool("helm")))
    assert today == PLATFORM.read_text(), f"{difference(PLATFORM.read_text(), today)}\n{REPAIR}"


def test_the_page_of_known_failures_is_the_catalogue() -> None:
    today = catalogue_page()
    assert today == PAGE.read_text(), f"{difference(PAGE.read_text(), today)}\n{REPAIR}"


def test_the_documentation_has_the_tables_of_the_registries() -> None:
    pages = {page: page.read_text() for page in (ROOT / "docs").rglob("*.md")}
    found = {match[2] for text in pages.values() for match in TABLE.finditer(text)}
    assert found == TABLES_OF_DOCS.keys()
    outdated = [page.name for page, text in pages.items() if with_tables(text) != text]
    assert outdated == [], REPAIR


def test_the_list_of_metrics_is_the_table_of_metrics() -> None:
    today = metrics_page()
    golden = METRICS_PAGE.read_text()
    assert today == golden, f"{difference(golden, today)}\n{REPAIR}"


def test_one_changed_character_of_the_template_is_seen() -> None:
    template = (ROOT / "manifests/rayjob.yaml.j2").read_text()
    changed = template.replace("python -I -u -m trainyard_trainer", "python -m trainer2")
    golden = FOLDER / "digits-gpus-16.yaml"
    today = rendered(ROOT / "examples/digits.yaml", {"gpus": "16"}, changed)
    assert "+  entrypoint: python -m trainer2" in difference(golden.read_text(), today)
