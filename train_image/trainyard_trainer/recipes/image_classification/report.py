"""What `image_classification` brings to the report: predictions, mistakes, and what is taken for what."""

from __future__ import annotations

from typing import Any

from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.config.training.train import ImageClassification
from trainyard_trainer.data.image_stream import ImageStream
from trainyard_trainer.data.prepared import Prepared
from trainyard_trainer.recipes.image_classification.classes import class_table, confusion
from trainyard_trainer.recipes.image_classification.confusion import per_class
from trainyard_trainer.recipes.image_classification.gallery import gallery, mistakes
from trainyard_trainer.recipes.image_classification.predictions import find_mistakes, predict
from trainyard_trainer.report.elements import count
from trainyard_trainer.report.page import RecipeReport, Tile
from trainyard_trainer.run_folder.folder import RunFolder


def find(
    folder: RunFolder,
    config: TrainerConfig,
    data: Prepared | ImageStream,
    summary: dict[str, Any],
    validation: dict[str, Any],
) -> RecipeReport:
    assert isinstance(config.train, ImageClassification)
    images, found = data.images, validation["confusion"]
    best = ""
    if summary["best_epoch"] is not None:
        best = f"best: {summary['best_val_accuracy']:.2%} in epoch {summary['best_epoch']}"
    steps = f"in {count(summary['steps'], 'step')}"
    wrong = find_mistakes(data, validation["worst"])
    return RecipeReport(
        title=config.train.model.name,
        result=Tile("validation accuracy", f"{validation['accuracy']:.2%}", best),
        speed=(
            Tile("samples per second", f"{summary['samples_per_s']:,.0f}"),
            Tile("images seen", f"{summary['samples_seen']:,}", steps),
        ),
        sections=(
            (
                "Predictions on validation images",
                gallery(predict(folder, config.train.model, data)),
            ),
            ("Worst mistakes", mistakes(wrong)),
            ("What is taken for what", confusion(found, images.classes)),
            ("Accuracy of each class", class_table(per_class(found), images.classes)),
        ),
        facts=(
            ("training images", f"{data.num_train:,}"),
            ("validation images", f"{data.num_valid:,}"),
            ("an image", " x ".join(map(str, images.shape)) + f", {images.encoding}"),
            ("classes", f"{len(images.classes):,}"),
            ("left out because they could not be read", f"{summary['bad_samples']:,}"),
        ),
    )
