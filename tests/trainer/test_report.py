"""The report is one file that needs nothing else, and shows what a run's folder holds."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from training import open_folder, small_config

from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.data.prepared import DatasetInfo, Prepared, Split
from trainyard_trainer.data.stored_rows import read_validation, to_table
from trainyard_trainer.recipes.image_classification.classes import class_table, confusion, short
from trainyard_trainer.recipes.image_classification.confusion import per_class
from trainyard_trainer.recipes.image_classification.gallery import source
from trainyard_trainer.recipes.image_classification.model import build_model
from trainyard_trainer.recipes.image_classification.predictions import read_labels, varied
from trainyard_trainer.recipes.registry import recipe_of
from trainyard_trainer.report.charts import MOST_POINTS, Chart, Line, draw, thinned
from trainyard_trainer.report.elements import duration
from trainyard_trainer.report.report import write_report
from trainyard_trainer.run_folder.folder import RunFolder

CLASSES = tuple(f"<{digit}>" for digit in range(10))

SUMMARY = {
    "val_accuracy": 0.9,
    "best_val_accuracy": 0.9731,
    "best_epoch": 3,
    "epochs": 4,
    "stopped_early": True,
    "workers": 2,
    "steps": 132,
    "samples_seen": 16896,
    "samples_per_s": 612.4,
    "attempts": 2,
    "train_s": 75.2,
    "goodput": {
        **{"share": 0.75, "total_s": 100.0, "steps_s": 75.0, "data_s": 0.0, "validation_s": 1.0},
        **{"checkpoint_s": 0.0, "starts_s": 9.0, "again_s": 12.0},
        **{"unnoticed_s": 3.0, "ends_s": 0.0, "between_attempts_s": 40.0},
    },
    "seconds": {
        "startup": 10.0,
        "data": 40.0,
        "compute": 40.0,
        "communication": 5.0,
        "checkpoint": 1.0,
        "validation": 4.0,
    },
    "bad_samples": 7,
    "dropped_per_epoch": 29,
    "checkpoint": "s000000016896-a2",
    "record": [
        {
            "attempt": 1,
            "began": "2026-01-01T00:00:00+00:00",
            "ended": "2026-01-01T01:00:00+00:00",
            "image": "trainyard:1",
            "image_digests": ["sha256:0123456789abcdef"],
            "code_sha256": None,
            "git": {"revision": "fedcba9876543210", "is_dirty": True},
            "nodes": [
                {
                    "name": "pod-a",
                    "id": "0a",
                    "gpus": [{"model": "NVIDIA H100", "id": "GPU-1a2b"}],
                    "gpu_driver": "550.54.15",
                }
            ],
            "gpu_hours": 1.0,
            "cpu_hours": 8.0,
        }
    ],
}

VALIDATION = {
    "num_samples": 30,
    "loss": 0.25,
    "accuracy": 0.9,
    "confusion": [[label, label, 3] for label in range(8)] + [[8, 3, 2], [8, 8, 1], [9, 9, 3]],
    "worst": [{"id": 28, "label": 8, "predicted": 3, "confidence": 0.875}],
}


def record(kind: str, epoch: int, step: int) -> dict[str, Any]:
    known = {
        "kind": kind,
        "epoch": epoch,
        "step": step,
        "loss": 1 / step,
        "accuracy": 0.5,
        "learning_rate": 0.1 / step,
        "samples_per_s": 600.0,
        "data_wait_s": 0.01,
        "step_s": 0.1,
        "memory_bytes": 2**28,
    }
    return known if kind == "interval" else known | {"val_loss": 2 / step, "val_accuracy": 0.6}


def prepare(folder: RunFolder) -> Prepared:
    """30 validation images in two files of small row groups; the pixels of each are its row's number."""
    images = DatasetInfo(source="digits", shape=(1, 8, 8), classes=CLASSES, mean=(0.3,), std=(0.4,))
    files = []
    for rows in (range(0, 13), range(13, 30)):
        ids = np.array(rows)
        pixels_NCHW = np.broadcast_to(
            ids.astype(np.uint8)[:, None, None, None], (len(ids), 1, 8, 8)
        )
        files.append(f"{folder.data}/valid/part-{len(files):05}.parquet")
        with folder.writing(files[-1]) as stream:
            pq.write_table(to_table(images, ids, pixels_NCHW, ids % 10), stream, row_group_size=4)
    return Prepared(
        info=images,
        train=Split(files=(), rows=(4253,)),
        valid=Split(files=tuple(files), rows=(13, 17)),
        path=folder.show(folder.data),
        endpoint=folder.endpoint,
        bad_samples=7,
    )


def write_lines(folder: RunFolder, path: str, records: list[dict[str, Any]]) -> None:
    folder.write(path, "".join(json.dumps(line) + "\n" for line in records))


def page(config: TrainerConfig, *, metrics: list[dict[str, Any]], worst: list[Any]) -> str:
    """The report of a finished run."""
    folder = open_folder(config)
    data = prepare(folder)
    with folder.writing(folder.model) as stream:
        torch.save(build_model(config.train.model).state_dict(), stream)
    write_lines(folder, folder.metrics, metrics)
    attempt = {
        "attempt": 1,
        "time": "2026-01-01T00:00:00+00:00",
        "resumed_from": None,
        "versions": {"ray": "2.60.0"},
    }
    write_lines(folder, folder.attempts, [attempt])
    validation = VALIDATION | {"worst": worst}
    recipe = recipe_of(config, data.info)
    own = recipe.report(folder, config, data, SUMMARY, validation)
    write_report(folder, config, data, SUMMARY, own, recipe.metrics)
    return folder.read(folder.report).decode()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = small_config(tmp_path_factory.mktemp("runs"), train__epochs=12)
    metrics = [
        line
        for epoch in range(1, 5)
        for line in (record("interval", epoch, epoch * 10 - 5), record("epoch", epoch, epoch * 10))
    ]
    return page(config, metrics=metrics, worst=VALIDATION["worst"])


class Tags(HTMLParser):
    """Checks that each tag is closed, and collects them."""

    VOID = ("meta", "img", "line", "polyline", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.all: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.all.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.all.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


# The page.


def test_the_report_is_one_file_that_loads_nothing(report: str) -> None:
    images = [attributes["src"] for tag, attributes in Tags(report).all if tag == "img"]
    assert len(images) == 10
    assert all(image and image.startswith("data:image/png;base64,") for image in images)
    assert not re.search(r"(src|href)=.https?:|<script|<link|@import|url\((?!#)", report)


@pytest.mark.parametrize(
    "words",
    [
        "90.00%",
        "best: 97.31% in epoch 3",
        "stopped early after 4 epochs of 12",
        "1 min 15 s",
        "16,896",
        "in 132 steps",
        "<td>left out because they could not be read</td><td>7</td>",
        "<td>left over in each epoch (data.drop_last)</td><td>29</td>",
        "<td>delivered checkpoint</td><td>s000000016896-a2 (last)</td>",
        "train.model.name",
        "ray 2.60.0",
        "2026-01-01 00:00:00 UTC",
    ],
)
def test_the_report_shows_outcome_settings_and_attempts(report: str, words: str) -> None:
    assert words in report
    assert "nan" not in report.lower()


def test_the_report_tells_the_goodput_and_where_the_rest_went(report: str) -> None:
    assert "Goodput 75.0%: of 1 min 40 s of all workers together, 1 min 15 s went into" in report
    assert (
        "The rest: validation 1.0 s, starts 9.0 s, steps trained again 12 s, "
        "faults until they were noticed 3.0 s. The run had no workers for 40 s between" in report
    )


def test_the_report_says_what_bounds_the_run_and_which_line_to_change(report: str) -> None:
    assert "Input-bound" in report
    assert "44%" in report
    assert "<code>data.decode_workers: 1</code>" in report
    # 40 of 100 seconds, in the bar and in the table.
    assert 'title="Data 40.0%"' in report
    assert '<td class="number">40.0%</td><td class="number">40 s</td>' in report


def test_the_report_has_curves(report: str) -> None:
    assert report.count("<svg") == 6


def test_a_mistake_has_its_picture_and_its_words(report: str) -> None:
    mistake = report[report.index('<div class="mistakes">') :]
    # Row 28 of the validation split is in the second file, and grey 28.
    assert source(np.full((1, 8, 8), 28, np.uint8)) in mistake
    assert "<b>&lt;8&gt;</b> taken for <b>&lt;3&gt;</b><small>confidence 87.5%</small>" in mistake


def test_names_of_classes_are_text_and_no_tags(report: str) -> None:
    assert "<3>" not in report
    assert "&lt;3&gt;" in report


def test_a_run_without_metrics_and_mistakes_has_a_report(tmp_path: Path) -> None:
    text = page(small_config(tmp_path), metrics=[], worst=[])
    Tags(text)
    assert "There are none." in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 s"), (9.44, "9.4 s"), (75.2, "1 min 15 s"), (3725, "1 h 02 min")],
)
def test_a_time_is_said_as_people_say_it(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# Classes.


def test_few_classes_have_a_matrix_and_the_most_confused_pairs() -> None:
    text = confusion(VALIDATION["confusion"], CLASSES)
    Tags(text)
    assert text.count('<td class="hit') == 10
    assert text.count('<td class="miss') == 1
    assert '<td class="number">2</td><td class="number">66.7%</td>' in text


def test_many_classes_have_the_most_confused_pairs_alone() -> None:
    classes = [str(number) for number in range(31)]
    pairs = [[label, (label + 1) % 31, label + 1] for label in range(31)]
    text = confusion(pairs, classes)
    assert "hit" not in text
    assert text.count("<tr>") == 1 + 12
    assert text.index("<td>30</td><td>0</td>") < text.index("<td>29</td><td>30</td>")


def test_a_model_without_mistakes_has_no_confusion() -> None:
    assert "Each validation image is recognised." in confusion([[0, 0, 3]], ["0", "1"])


def test_the_worst_classes_are_shown_and_the_others_folded_away() -> None:
    found = [[label, label, 1 + label] for label in range(20)] + [
        [label, 0, 1] for label in range(1, 20)
    ]
    text = class_table(per_class(found), [str(number) for number in range(21)])
    Tags(text)
    shown, folded = text.split("<details>")
    assert shown.count("<tr>") == 1 + 15
    assert folded.count("<tr>") == 1 + 5
    assert "1 class without validation images" in text


@pytest.mark.parametrize(
    ("number", "text"), [(999, "999"), (1234, "1.2k"), (9949, "9.9k"), (12345, "12k")]
)
def test_a_cell_has_few_digits(number: int, text: str) -> None:
    assert short(number) == text


# Pictures.


def test_only_the_wanted_rows_come_in_the_order_asked_for(storage: tuple[str, str | None]) -> None:
    path, endpoint = storage
    data = prepare(RunFolder.open(path, "small", endpoint))
    rows = [28, 0, 13, 12, 28]
    assert read_validation(data, rows, "image")[:, 0, 0, 0].tolist() == rows


def test_labels_are_those_of_all_files(tmp_path: Path) -> None:
    data = prepare(RunFolder.open(str(tmp_path), "small"))
    assert read_labels(data).tolist() == [row % 10 for row in range(30)]


def test_predictions_take_a_sample_of_each_class_first() -> None:
    assert varied([5, 5, 5, 1, 1, 2], 4) == [0, 3, 5, 1]


@pytest.mark.parametrize(
    ("shape", "kind"),
    [((1, 8, 8), "png"), ((3, 64, 64), "png"), ((2, 8, 8), "png"), ((3, 65, 200), "jpeg")],
)
def test_a_picture_is_exact_if_small_and_a_photograph_if_large(
    shape: tuple[int, int, int], kind: str
) -> None:
    assert source(np.zeros(shape, np.uint8)).startswith(f"data:image/{kind};base64,")


# Charts.


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
    svg = draw(Chart(title="Loss", lines=[line], is_log=falls))
    assert ("mathdefault{10" in svg) == is_steep


def test_many_points_are_thinned_to_means_of_neighbours() -> None:
    many = [(float(x), float(x % 2)) for x in range(10 * MOST_POINTS)]
    few = thinned(many)
    assert len(few) == MOST_POINTS
    assert few[0] == (4.5, 0.5)
    assert thinned(few) == few


def test_it_shows_where_and_with_what_each_attempt_ran(report: str) -> None:
    for shown in (
        *("fedcba987654, dirty", "trainyard:1 (0123456789ab)", "1 x NVIDIA H100"),
        *("GPU-hours", "CPU-hours", "git revision"),
    ):
        assert shown in report
    for shown in ("GPU-1a2b", "550.54.15", "pod-a"):
        assert f"<td>{shown}</td>" in report
