"""What the page says of classes: how accurate each is, and what it is taken for."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from trainyard_trainer.recipes.image_classification.confusion import (
    ClassResult,
    Confusion,
    most_confused,
)
from trainyard_trainer.report.elements import bar, count, note

MOST_CLASSES = 30
"""Of a confusion matrix that can be read."""

DENSE_CLASSES = 13
"""From here on the cells of the matrix are small."""

MOST_PAIRS = 12

MOST_RESULTS = 15
"""Classes that are shown at once; the others can be unfolded."""


def confusion(found: Confusion, classes: Sequence[str]) -> str:
    pairs = most_confused(found)
    if not pairs:
        return note("Each validation image is recognised.")
    rows = "".join(
        f"<tr><td>{escape(classes[pair.label])}</td><td>{escape(classes[pair.predicted])}</td>"
        f'<td class="number">{pair.count:,}</td><td class="number">{pair.share:.1%}</td></tr>'
        for pair in pairs[:MOST_PAIRS]
    )
    worst = (
        '<table><thead><tr><th>label</th><th>taken for</th><th class="number">images</th>'
        f'<th class="number">of class</th></tr></thead><tbody>{rows}</tbody></table>'
    )
    if len(classes) > MOST_CLASSES:
        return worst
    return f'<div class="confusion">{matrix(found, classes)}{worst}</div>'


def matrix(found: Confusion, classes: Sequence[str]) -> str:
    """Rows are labels, columns what they were taken for; a deeper cell has more of its row."""
    counts = np.zeros((len(classes), len(classes)), np.int64)
    for label, predicted, number in found:
        counts[label, predicted] = number
    names = [escape(name) for name in classes]
    head = "".join(f'<th scope="col" title="{name}"><span>{name}</span></th>' for name in names)
    rows = "".join(
        f'<tr><th scope="row" title="{name}"><span>{name}</span></th>'
        + "".join(cell(counts, label, predicted, classes) for predicted in range(len(classes)))
        + "</tr>"
        for label, name in enumerate(names)
    )
    is_dense = len(classes) >= DENSE_CLASSES
    return (
        f'<figure class="card matrix{" dense" if is_dense else ""}">'
        "<figcaption>Rows: the label. Columns: the prediction.</figcaption>"
        f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></figure>"
    )


def cell(counts: np.ndarray, label: int, predicted: int, classes: Sequence[str]) -> str:
    number = counts[label, predicted]
    if not number:
        return "<td></td>"
    share = number / counts[label].sum()
    # Errors are few: the root makes them visible.
    depth = share if label == predicted else 0.15 + 0.85 * share**0.5
    kind = ("hit" if label == predicted else "miss") + (" deep" if depth > 0.55 else "")
    title = escape(f"{classes[label]} taken for {classes[predicted]}: {number:,} ({share:.1%})")
    return f'<td class="{kind}" style="--depth:{depth:.2f}" title="{title}">{short(number)}</td>'


def short(number: int) -> str:
    """As many digits as a cell has room for."""
    if number < 1000:
        return str(number)
    return f"{number / 1000:.1f}k" if number < 9950 else f"{number / 1000:.0f}k"


def class_table(results: Sequence[ClassResult], classes: Sequence[str]) -> str:
    """The least accurate first; what is beyond the first few can be unfolded."""
    shown, folded = results[:MOST_RESULTS], results[MOST_RESULTS:]
    text = class_rows(shown, classes)
    if folded:
        text += (
            f"<details><summary>{len(folded):,} more classes, from "
            f"{folded[0].accuracy:.1%} on</summary>{class_rows(folded, classes)}</details>"
        )
    if missing := len(classes) - len(results):
        text += (
            f'<p class="note">{count(missing, "class", "classes")} without validation images.</p>'
        )
    return text


def class_rows(results: Sequence[ClassResult], classes: Sequence[str]) -> str:
    rows = "".join(
        f"<tr><td>{escape(classes[result.label])}</td>"
        f'<td class="number">{result.accuracy:.1%}</td>'
        f'<td class="wide">{bar(result.accuracy)}</td>'
        f'<td class="number">{result.right:,} of {result.images:,}</td>'
        f"<td>{'' if result.mistaken_for is None else escape(classes[result.mistaken_for])}</td></tr>"
        for result in results
    )
    return (
        '<table class="classes"><thead><tr><th>class</th><th class="number">accuracy</th>'
        '<th class="wide"></th><th class="number">right</th><th>taken for</th></tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )
