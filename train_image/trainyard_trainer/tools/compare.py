"""The tool that shows two runs side by side, as tables, as JSON, and as a picture of their curves.

python -m trainyard_trainer.tools.compare A B [--storage DIR] [--endpoint URL] [--plot FILE.png] [--json]
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainyard_trainer.config.tools.run_tools import COMPARE
from trainyard_trainer.config.training.metric import LOSS, VALIDATION_PREFIX, is_validation
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.run_files.programs.standard_streams import run_with_safe_streams
from trainyard_trainer.terminal import table_text
from trainyard_trainer.tools.command_line import exit_code_of, parse
from trainyard_trainer.tools.run_comparison import (
    HEADINGS,
    ComparedRun,
    Points,
    Record,
    config_of,
    curves_of,
    facts_of,
    is_number,
    open_folders,
    read_run,
)

MOST_CHARTS = 4
"""The largest number of metrics of the user's code that are drawn."""


# Tables and JSON.


def document_of(a: ComparedRun, b: ComparedRun) -> Record:
    """Return the comparison as `--json` prints it."""
    return {
        "runs": [{"name": run.label, "notes": run.notes, **facts_of(run)} for run in (a, b)],
        "config": config_of(a, b),
    }


def tables(a: ComparedRun, b: ComparedRun) -> Iterator[str]:
    """Yield the differences of the config, and a table for each heading that has values."""
    if a.config and b.config:
        config = config_of(a, b)
        differ = config["differ"]
        yield f"config: {len(differ)} of {config['equal'] + len(differ)} fields differ"
        if differ:
            fields = [(row["field"], written(row["a"]), written(row["b"])) for row in differ]
            yield table_text(("field", a.label, b.label), fields)
    one, other = facts_of(a), facts_of(b)
    for heading in HEADINGS:
        rows = list(rows_of(flat(one[heading]), flat(other[heading])))
        if rows:
            # The column of ratios is left out if it is empty.
            width = 4 if any(row[3] for row in rows) else 3
            head = (heading, a.label, b.label, "ratio")
            yield table_text(head[:width], [row[:width] for row in rows])


def flat(facts: Record) -> Record:
    """Return the rows of a table. A metric becomes three rows: last, lowest and highest.

    For a loss, the highest value is left out; for an accuracy, the lowest value.
    """
    rows: Record = {}
    for name, value in facts.items():
        if not isinstance(value, dict):
            rows[name] = value
            continue
        rows[f"{name}, last"] = value["last"]
        if "acc" not in name:
            rows[f"{name}, lowest"] = value["lowest"]
        if "loss" not in name:
            rows[f"{name}, highest"] = value["highest"]
    return rows


def rows_of(a: Record, b: Record) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, both values, and the ratio of the second to the first value."""
    for name in dict.fromkeys((*a, *b)):
        one, other = a.get(name), b.get(name)
        if one is not None or other is not None:
            yield name, shown(one), shown(other), ratio(one, other)


def written(value: Any) -> str:
    """Return a value as a config file has it."""
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)


def shown(value: Any) -> str:
    """Return a value as text for people, with about four digits."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4g}"
    return written(value)


def ratio(a: Any, b: Any) -> str:
    """Return b / a as text; empty if they are no numbers or a is not positive."""
    return f"{b / a:.2f}" if is_number(a) and is_number(b) and a > 0 else ""


def print_comparison(a: ComparedRun, b: ComparedRun, *, as_json: bool) -> None:
    """Print the comparison as JSON or as tables; notes about the runs go to standard error."""
    if as_json:
        print(json.dumps(document_of(a, b), indent=2))
        return
    print("\n\n".join(tables(a, b)))
    for run in (a, b):
        for note in run.notes:
            print(f"{run.label}: {note}", file=sys.stderr)


# Picture.


def drawn_of(names: Iterable[str]) -> list[str]:
    """Return the loss, and the validation's value of the recipe's first metric: what is drawn."""
    first = [name for name in names if is_validation(name) and name != f"{VALIDATION_PREFIX}{LOSS}"]
    return [name for name in names if name == LOSS or name in first[:1]]


def write_plot(runs: Sequence[ComparedRun], file: Path) -> None:
    """Write a picture of the curves of both runs.

    Raises ConfigError if there are no curves, or the file cannot be written.
    """
    is_own = all(run.is_own for run in runs if run.metrics)
    curves = {run.label: curves_of(run) if run.is_own == is_own else {} for run in runs}
    there = dict.fromkeys(name for found in curves.values() for name in found)
    names = list(there)[:MOST_CHARTS] if is_own else drawn_of(there)
    if not names:
        raise ConfigError(f"--plot = {file}: neither run has metrics yet.")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(draw(curves, names, "report" if is_own else "samples"))
    except OSError as error:
        raise ConfigError(f"--plot = {file} cannot be written: {error.strerror}") from error
    left_out = [label for label, found in curves.items() if not found]
    without = f", without {', '.join(left_out)}" if left_out else ""
    print(f"plot: {file}{without}", file=sys.stderr)


def draw(curves: Mapping[str, Mapping[str, Points]], names: Sequence[str], unit: str) -> bytes:
    """Return a PNG file with a chart for each metric, in which each run has a curve."""
    # Imported here, since the import takes a second and most comparisons draw nothing.
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from trainyard_trainer.report.charts import BLUE, ORANGE, PLAIN, STEEP, thinned

    output = io.BytesIO()
    with rc_context(PLAIN):
        figure = Figure(figsize=(5.2 * len(names), 3.2), layout="constrained")
        charts = figure.subplots(1, len(names), squeeze=False).flat
        for axes, name in zip(charts, names, strict=True):
            values = [y for found in curves.values() for _, y in found.get(name, ())]
            is_steep = "acc" not in name and max(values) > STEEP * min(values) > 0
            for (label, found), colour in zip(curves.items(), (BLUE, ORANGE), strict=True):
                if name in found:
                    x, y = zip(*thinned(found[name]), strict=True)
                    axes.plot(x, y, color=colour, label=label, marker="o", markersize=3)
            axes.set_yscale("log" if is_steep else "linear")
            axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
            axes.set_title(name, loc="left", parse_math=False)
            axes.set_xlabel(unit)
            axes.legend()
        figure.savefig(output, format="png", dpi=120)
    return output.getvalue()


def main(arguments: list[str] | None = None) -> int:
    _, wanted = parse(arguments, COMPARE)
    folders = open_folders((wanted.a, wanted.b), wanted.storage, wanted.endpoint)
    a, b = (read_run(label, folder) for label, folder in folders)
    print_comparison(a, b, as_json=wanted.json)
    if wanted.plot:
        write_plot((a, b), Path(wanted.plot))
    return 0


if __name__ == "__main__":
    sys.exit(run_with_safe_streams(lambda: exit_code_of(main)))
