"""The report is one file that needs nothing else."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from training import small_config

from trainer.report import Line, Prediction, chart, duration, render, varied

SUMMARY = {
    "val_accuracy": 0.9731,
    "train_s": 75.2,
    "images_per_s": 612.4,
    "samples_seen": 16896,
    "attempts": 2,
}


def page(tmp_path: Path) -> str:
    epochs = [
        {
            "kind": "epoch",
            "epoch": epoch,
            "step": epoch * 10,
            "loss": 1 / epoch,
            "accuracy": 0.5,
            "val_loss": 2 / epoch,
            "val_accuracy": 0.6,
            "images_per_s": 600.0,
            "learning_rate": 0.1 / epoch,
        }
        for epoch in range(1, 5)
    ]
    predictions = [
        Prediction(
            pixels=np.full((channels, 8, 8), 200, np.uint8),
            label="<3>",
            predicted=predicted,
            confidence=0.875,
        )
        for channels, predicted in zip([1, 3, 2] * 3, ["<3>", "8", "<3>"] * 3, strict=True)
    ]
    attempts = [
        {
            "attempt": 1,
            "time": "2026-01-01T00:00:00+00:00",
            "resumed_from": None,
            "versions": {"ray": "2.60.0"},
        }
    ]
    return render(
        small_config(tmp_path), SUMMARY, metrics=epochs, attempts=attempts, predictions=predictions
    )


class Tags(HTMLParser):
    """Checks that each tag is closed, and collects them."""

    VOID = ("meta", "img", "line", "polyline", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.all: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.all.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.all.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_report_is_one_file_that_loads_nothing(tmp_path: Path) -> None:
    text = page(tmp_path)
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    images = [attributes["src"] for tag, attributes in tags.all if tag == "img"]
    assert len(images) == 9
    assert all(source and source.startswith("data:image/png;base64,") for source in images)
    assert not re.search(r"(src|href)=.https?:|<script|<link|@import|url\((?!#)", text)


def test_the_report_shows_numbers_curves_settings_and_attempts(tmp_path: Path) -> None:
    text = page(tmp_path)
    for words in ("97.31%", "1 min 15 s", "16,896", "train.model.name", "ray 2.60.0", "87.5%"):
        assert words in text
    assert text.count("<svg") == 4
    assert text.count('class="wrong"') == 3
    assert "<3>" not in text
    assert "&lt;3&gt;" in text
    assert "nan" not in text.lower()


def test_a_run_without_metrics_has_a_report(tmp_path: Path) -> None:
    text = render(small_config(tmp_path), SUMMARY, metrics=[], attempts=[], predictions=[])
    assert "97.31%" in text


def test_predictions_take_a_sample_of_each_class_first() -> None:
    assert varied([5, 5, 5, 1, 1, 2], 4) == [0, 3, 5, 1]


@pytest.mark.parametrize(
    ("values", "falls", "is_steep"),
    [
        ([300.0, 2.0, 0.1], True, True),
        ([2.0, 1.0, 0.5], True, False),
        ([300.0, 2.0, 0.1], False, False),
        ([2.0, 0.0], True, False),
    ],
)
def test_a_curve_that_falls_steeply_is_drawn_over_powers_of_ten(
    values: list[float], falls: bool, is_steep: bool
) -> None:
    line = Line(name="loss", colour="black", points=list(enumerate(values)))
    assert ("mathdefault{10" in chart("Loss", [line], falls=falls)) == is_steep


@pytest.mark.parametrize(
    ("seconds", "text"), [(9.4, "9 s"), (75.2, "1 min 15 s"), (3725, "1 h 02 min")]
)
def test_a_time_is_said_as_people_say_it(seconds: float, text: str) -> None:
    assert duration(seconds) == text
