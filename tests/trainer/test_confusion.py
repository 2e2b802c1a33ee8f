"""How right a model is on each class, from how often each label was taken for what."""

from __future__ import annotations

from trainyard_trainer.recipes.image_classification.confusion import most_confused, per_class

CONFUSION = [[0, 0, 8], [0, 1, 2], [1, 1, 5], [2, 0, 1], [2, 1, 3]]


def test_the_least_accurate_class_comes_first() -> None:
    assert [(found.label, found.accuracy) for found in per_class(CONFUSION)] == [
        (2, 0.0),
        (0, 0.8),
        (1, 1.0),
    ]


def test_a_class_says_what_it_is_taken_for() -> None:
    assert [found.mistaken_for for found in per_class(CONFUSION)] == [1, 1, None]


def test_a_class_without_images_has_no_accuracy() -> None:
    assert per_class([]) == []


def test_pairs_come_with_their_share_the_most_frequent_first() -> None:
    pairs = [
        (pair.label, pair.predicted, pair.count, pair.share) for pair in most_confused(CONFUSION)
    ]
    assert pairs == [(2, 1, 3, 0.75), (0, 1, 2, 0.2), (2, 0, 1, 0.25)]
