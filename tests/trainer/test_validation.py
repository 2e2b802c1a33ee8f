"""How well a model does: each image counted once, at any number of workers, and the worst mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional
from training import Group, small_config, task_of

from trainyard_trainer.config.training.metric import ACCURACY
from trainyard_trainer.config.training.models import Model
from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.data.loading.torch_loader import ValidationBatches
from trainyard_trainer.data.prepared import DatasetInfo
from trainyard_trainer.engine.learning.sums import EvaluationSums, LossSums, Validation
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.recipes.image_classification.recipe import NUM_WORST, Classification
from trainyard_trainer.recipes.loss import Loss

CPU = torch.device("cpu")
ALONE = Worker(device=CPU)


def batch_of(ids: list[int], labels: list[int]) -> Batch:
    """Images that nobody looks at."""
    images = torch.zeros(len(ids), 1, 1, 1, dtype=torch.uint8)
    return Batch({"image": images, "label": torch.tensor(labels)}, torch.tensor(ids))


class Judge:
    """A validation by the recipe for images, of a model whose outputs are given."""

    def __init__(self, classes: int = 3, worker: Worker = ALONE) -> None:
        info = DatasetInfo(
            source="test",
            shape=(1, 1, 1),
            classes=tuple(map(str, range(classes))),
            mean=(0.5,),
            std=(0.5,),
        )
        model = Model(name="resnet18", in_channels=1, num_classes=classes, image_size=1)
        self.recipe = Classification(model, info)
        self.sums = EvaluationSums(self.recipe, worker)

    def update(self, outputs: torch.Tensor, batch: Batch, num_samples: int | None = None) -> None:
        found = self.recipe.evaluate(lambda inputs: outputs, batch)
        self.sums.update(found, len(batch) if num_samples is None else num_samples)

    def compute(self) -> Validation:
        return self.sums.compute()


def outputs_for(predicted: list[int], sureness: list[float], classes: int = 3) -> torch.Tensor:
    """What a model says that is so sure of its predictions; 0 is no preference."""
    outputs = torch.zeros(len(predicted), classes)
    outputs[torch.arange(len(predicted)), predicted] = torch.tensor(sureness)
    return outputs


def judged(outputs: torch.Tensor, batch: Batch, classes: int = 3) -> Validation:
    metrics = Judge(classes)
    metrics.update(outputs, batch)
    return metrics.compute()


def test_answers_are_counted_by_label_and_prediction() -> None:
    labels, predicted = [0, 0, 0, 1, 2, 2], [0, 0, 2, 1, 0, 0]
    found = judged(outputs_for(predicted, [5.0] * 6), batch_of(list(range(6)), labels))
    assert found.num_samples == 6
    assert found.metrics["accuracy"] == 3 / 6
    assert found.details["confusion"] == [[0, 0, 2], [0, 2, 1], [1, 1, 1], [2, 0, 2]]


def test_the_loss_is_the_mean_over_all_images() -> None:
    outputs = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
    labels = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    metrics = Judge()
    for start, end in ((0, 7), (7, 8), (8, 10)):
        ids = list(range(start, end))
        metrics.update(outputs[start:end], batch_of(ids, labels[start:end]))
    expected = functional.cross_entropy(outputs.double(), torch.tensor(labels)).item()
    assert metrics.compute().loss == pytest.approx(expected, abs=1e-6)


def test_the_worst_mistakes_come_with_all_that_is_known_of_them() -> None:
    found = judged(
        outputs_for([0, 1, 2, 0], [9.0, 1.0, 2.0, 3.0]), batch_of([70, 71, 72, 73], [0, 0, 1, 2])
    )
    # The first one is right, however sure.
    assert [mistake["id"] for mistake in found.details["worst"]] == [73, 72, 71]
    first = found.to_json()["worst"][0]
    assert (first["label"], first["predicted"]) == (2, 0)
    assert first["confidence"] == pytest.approx(torch.tensor([3.0, 0, 0]).softmax(0)[0].item())


def test_of_many_mistakes_only_the_most_confident_are_kept() -> None:
    count = 5 * NUM_WORST
    sureness = torch.randperm(count, generator=torch.Generator().manual_seed(0)) / 10 + 0.1
    metrics = Judge()
    outputs = outputs_for([1] * count, sureness.tolist())
    for ids in torch.arange(count).split(7):
        metrics.update(outputs[ids], batch_of(ids.tolist(), [0] * len(ids)))
    worst = metrics.compute().details["worst"]
    assert [mistake["id"] for mistake in worst] == sureness.argsort(descending=True)[
        :NUM_WORST
    ].tolist()


def test_of_equally_confident_mistakes_those_with_the_lowest_ids_are_kept() -> None:
    count = 10 * NUM_WORST
    ids = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    # So sure that float32 says 1.0.
    found = judged(outputs_for([1] * count, [200.0] * count), batch_of(ids.tolist(), [0] * count))
    assert found.details["worst"] == [
        {"id": number, "label": 0, "predicted": 1, "confidence": 1.0} for number in range(NUM_WORST)
    ]


def test_ids_of_large_data_sets_are_kept_exactly() -> None:
    found = judged(outputs_for([1], [5.0]), batch_of([2**24 + 1], [0]))
    assert found.details["worst"][0]["id"] == 2**24 + 1


def test_a_model_without_mistakes_has_no_worst_ones() -> None:
    found = judged(outputs_for([0, 1], [5.0, 5.0]), batch_of([0, 1], [0, 1]))
    assert (found.metrics["accuracy"], found.details["worst"]) == (1.0, [])


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_workers_together_say_what_one_says(tmp_path: Path, workers: int) -> None:
    config = small_config(tmp_path, train__global_batch_size=120)
    data = task_of(config).data
    outputs = torch.randn(data.num_valid, 10, generator=torch.Generator().manual_seed(0))

    def validate(worker: Worker) -> tuple[Validation, list[int]]:
        metrics, ids = Judge(10, worker), []
        for batch in ValidationBatches(data, worker, config):
            metrics.update(outputs[batch.ids], batch)
            ids += batch.ids.tolist()
        return metrics.compute(), ids

    alone, _ = validate(ALONE)
    assert alone.num_samples == data.num_valid == 359
    results = Group(workers).run(validate)
    assert sorted(number for _, ids in results for number in ids) == list(range(359))
    for found, _ in results:
        assert found.loss == pytest.approx(alone.loss, rel=1e-6)
        assert (found.num_samples, found.metrics) == (alone.num_samples, alone.metrics)
        assert found.details == alone.details


def test_a_worker_without_images_changes_nothing() -> None:
    def validate(worker: Worker) -> Validation:
        metrics = Judge(worker=worker)
        outputs, batch = outputs_for([1, 2], [5.0, 4.0]), batch_of([0, 1], [1, 1])
        # The second worker computes what the first one does, since it has to take part in it.
        metrics.update(outputs, batch, num_samples=0 if worker.rank else 2)
        return metrics.compute()

    first, second = Group(2).run(validate)
    assert first == second
    assert (first.num_samples, first.metrics["accuracy"], len(first.details["worst"])) == (
        2,
        0.5,
        1,
    )


# In training.


def found_in(loss: float, num_correct: int, num_targets: int) -> Loss:
    """The sums of a batch with this mean loss."""
    accuracy = (torch.tensor(num_correct), num_targets)
    return Loss(
        sum=torch.tensor(loss * num_targets), weight=num_targets, metrics={"accuracy": accuracy}
    )


def new_sums() -> LossSums:
    return LossSums([ACCURACY], CPU)


def test_sums_tell_the_loss_since_they_were_read_and_the_accuracy_since_the_epoch_began() -> None:
    sums = new_sums()
    sums.update(found_in(2.0, 1, 2))
    assert sums.since_last() == (2.0, {"accuracy": 0.5})
    sums.update(found_in(4.0, 2, 2))
    assert sums.since_last() == (4.0, {"accuracy": 0.75})
    assert sums.since_last() == (0.0, {"accuracy": 0.75})
    assert sums.over_workers(ALONE).tolist() == [12.0, 4.0, 3.0, 4.0]


def test_sums_go_on_from_those_of_an_interrupted_epoch() -> None:
    whole, cut = new_sums(), new_sums()
    for sums in (whole, cut):
        sums.update(found_in(2.0, 1, 2))
        sums.since_last()
    resumed = new_sums()
    resumed.restore(cut.over_workers(ALONE))
    for sums in (whole, resumed):
        sums.update(found_in(4.0, 2, 2))
    assert resumed.since_last() == whole.since_last() == (4.0, {"accuracy": 0.75})
    assert torch.equal(resumed.sums, whole.sums)


def test_a_total_over_workers_leaves_each_workers_sums_as_they_are() -> None:
    def count(worker: Worker) -> tuple[list[float], list[float]]:
        sums = new_sums()
        sums.update(found_in(1.0, worker.rank + 1, worker.rank + 1))
        return sums.over_workers(worker).tolist(), sums.sums.tolist()

    first, second = Group(2).run(count)
    assert first == ([3.0, 3.0, 3.0, 3.0], [1.0, 1.0, 1.0, 1.0])
    assert second == ([3.0, 3.0, 3.0, 3.0], [2.0, 2.0, 2.0, 2.0])
