"""One run file and some values of its keys -> many runs: their names, what is next, how they compare.

Nothing here knows a cluster or the time; `launcher.commands.sweep` does.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from launcher.config import OwnRun, RunConfig, load_run, parse_overrides, read_yaml
from launcher.errors import ClusterError, ClusterUnreachable, ConfigError
from launcher.watch import ENDED, Phase, record_of
from trainer.config import LENGTHS, MAY_CHANGE, RUN_NAME_LIMIT, AttemptConfig

Object = dict[str, Any]

COMBINATION_LIMIT = 1000
HASH_DIGITS = 8
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
"""Also what YAML takes for text, such as 1e-3."""

RECIPE_METRICS = ("val_accuracy", "best_val_accuracy", "val_loss", "loss", "accuracy")
"""What a built-in recipe tells: of the last epoch, and the best validation accuracy of all."""
RECORDED = ("val_loss",)
"""Of them, what neither summary.json nor progress.json says, but metrics.jsonl."""


# Combinations.


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """The values of one run, and the run under a name of its own."""

    settings: Mapping[str, str]
    """Swept key -> value, as typed."""
    run: RunConfig

    @property
    def name(self) -> str:
        return self.run.name

    def __str__(self) -> str:
        return in_words(self.settings)


def in_words(settings: Mapping[str, str]) -> str:
    """`train.seed=1 train.epochs=3`."""
    return " ".join(f"{key}={value}" for key, value in settings.items())


def load_sweep(
    path: Path,
    words: Sequence[str],
    settings: Sequence[str] = (),
    *,
    gpus: str | None = None,
    workers: str | None = None,
    name: str | None = None,
) -> list[Combination]:
    """The runs of all combinations of the words' values, each loaded as with `--set` of its values.

    Raises ConfigError that names the combination.
    """
    swept = parse_words(words)
    sizes = [len(values) for values in swept.values()]
    if math.prod(sizes) > COMBINATION_LIMIT:
        raise ConfigError(
            f"{' x '.join(map(str, sizes))} = {math.prod(sizes)} combinations are more than "
            f"{COMBINATION_LIMIT}",
            "Sweep fewer values at once.",
        )
    read_yaml(path)  # a file that cannot be read is no combination's fault
    combinations = []
    for values in itertools.product(*swept.values()):
        chosen = dict(zip(swept, values, strict=True))
        with naming(chosen):
            own = [*settings, *(f"{key}={value}" for key, value in chosen.items())]
            run = load_run(path, own, gpus=gpus, workers=workers, name=name)
            named = run.model_copy(update={"name": run_name(run.name, chosen)})
        combinations.append(Combination(settings=chosen, run=named))
    _refuse_equal(combinations)
    return combinations


def parse_words(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """`KEY=V1,V2` of each word -> the values of each key. Raises ConfigError."""
    swept: dict[str, tuple[str, ...]] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"{word!r} must read KEY=V1,V2,... such as train.seed=1,2,3")
        if key == "name":
            raise ConfigError(
                "name cannot be swept: each run gets a name of its own",
                "Use --name for what all these names begin with.",
            )
        values = split_values(text)
        if key in swept:
            together = ",".join((*swept[key], *values))
            raise ConfigError(f"{key} stands here twice", f"Write {key}={together}")
        if "" in values:
            raise ConfigError(
                f"{word}: a value is empty",
                "Remove the comma or give a value: null stands for none, '' for an empty text.",
            )
        swept[key] = values
    return swept


def split_values(text: str) -> tuple[str, ...]:
    """The text between commas, but for commas in {}, [] and quotes: `1,{a: 2, b: 3}` are two values."""
    values, depth, quote = [""], 0, ""
    for letter in text:
        before = values[-1]
        if quote:
            is_escaped = quote == '"' and before.endswith("\\")
            quote = "" if letter == quote and not is_escaped else quote
        elif letter in "'\"" and before.rstrip()[-1:] in ("", *"{[,:", letter):
            quote = letter
        elif letter in "{[":
            depth += 1
        elif letter in "}]":
            depth = max(depth - 1, 0)
        if letter == "," and not depth and not quote:
            values.append("")
        else:
            values[-1] += letter
    return tuple(value.strip() for value in values)


def run_name(base: str, settings: Mapping[str, str]) -> str:
    """`<base>-<8 hex>`, of the values alone, in any order and spelling; a base that is too long is cut."""
    spelled = sorted(
        f"{key}={json.dumps(_one_spelling(value), sort_keys=True, default=str)}"
        for keys, value in parse_overrides(f"{key}={text}" for key, text in settings.items())
        for key in (".".join(keys),)
    )
    suffix = "-" + hashlib.sha256("\n".join(spelled).encode()).hexdigest()[:HASH_DIGITS]
    return base[: RUN_NAME_LIMIT - len(suffix)].rstrip("-") + suffix


def _one_spelling(value: Any) -> Any:
    """0.10, .1 and 1e-1 are one number, and 2 and 2.0."""
    if isinstance(value, dict):
        return {str(key): _one_spelling(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_one_spelling(item) for item in value]
    if isinstance(value, str) and NUMBER.fullmatch(value):
        value = float(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _refuse_equal(combinations: Sequence[Combination]) -> None:
    """Raises ConfigError for two combinations that are one run, or have one name."""
    seen: dict[str, Combination] = {}
    for combination in combinations:
        config = combination.run.model_dump(mode="json", exclude={"name"})
        for mark in (combination.name, json.dumps(config, sort_keys=True)):
            if mark in seen:
                raise ConfigError(
                    f"{seen[mark]} and {combination} are one run", "Remove one of them."
                )
            seen[mark] = combination


@contextmanager
def naming(combination: Combination | Mapping[str, str]) -> Iterator[None]:
    """Errors begin with the combination that they are of."""
    words = in_words(combination) if isinstance(combination, Mapping) else str(combination)
    try:
        yield
    except ClusterUnreachable:
        raise
    except ConfigError as error:
        raise ConfigError(f"{words}: {error.what}", *error.details) from error
    except ClusterError as error:
        raise ClusterError(f"{words}: {error.what}", *error.details, reason=error.reason) from error


# What is next.


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A run stands otherwise than before."""

    run: str
    before: Phase | None
    """None for a run that was not submitted yet."""
    after: Phase


class Sweep:
    """How its runs stand -> which are to be submitted next."""

    def __init__(self, runs: Sequence[str], at_once: int) -> None:
        """`at_once`: the most that may be live at one time."""
        self._phases: dict[str, Phase | None] = dict.fromkeys(runs)
        self._at_once = at_once

    @property
    def live(self) -> list[str]:
        """Runs that were submitted, and may still do something."""
        return [run for run, phase in self._phases.items() if phase and phase not in ENDED]

    @property
    def waiting(self) -> list[str]:
        """Runs that were not submitted yet."""
        return [run for run, phase in self._phases.items() if phase is None]

    @property
    def due(self) -> list[str]:
        """Runs to submit now."""
        return self.waiting[: max(self._at_once - len(self.live), 0)]

    @property
    def is_over(self) -> bool:
        return not self.live and not self.waiting

    def submit(self, run: str) -> None:
        """It was submitted."""
        self._phases[run] = "accepted"

    def refuse(self, run: str) -> None:
        """It cannot be submitted."""
        self._phases[run] = "failed"

    def hear(self, phases: Mapping[str, Phase]) -> list[Change]:
        """All submissions there are, as they stand now; none of them older than the last `submit`."""
        changes = []
        for run, before in self._phases.items():
            after = self._after(before, phases.get(run))
            if after is not None and after != before:
                changes.append(Change(run=run, before=before, after=after))
        for change in changes:
            self._phases[change.run] = change.after
        return changes

    def _after(self, before: Phase | None, seen: Phase | None) -> Phase | None:
        if before in ENDED:
            return before
        if before is None:
            # One that failed under an earlier command is submitted again.
            return None if seen in ("failed", "stopped") else seen
        return seen or "stopped"  # somebody deleted it


# How they compare.


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """By what the best run is known."""

    metric: str
    is_lowest: bool

    def is_better(self, value: float, than: float) -> bool:
        return value < than if self.is_lowest else value > than


def goal_of(text: str, runs: Sequence[RunConfig] = ()) -> Goal:
    """`accuracy`: the highest; `val_loss`, as all that ends in loss: the lowest; `-error`: the lowest.

    Raises ConfigError for what the built-in recipes among the runs do not tell.
    """
    metric = text.removeprefix("-")
    if not metric:
        raise ConfigError("--metric is empty: give the name of what is to be best")
    if metric not in RECIPE_METRICS and any(not isinstance(run, OwnRun) for run in runs):
        raise ConfigError(
            f"--metric {metric}: a built-in recipe does not tell that",
            f"It tells: {', '.join(RECIPE_METRICS)}.",
        )
    return Goal(metric=metric, is_lowest=text != metric or metric.endswith("loss"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a run has ended, and what it has told of itself, as far as that is known."""

    phase: Phase
    message: str = ""
    summary: Object | None = None
    progress: Object | None = None
    epoch: Object | None = None
    """The last epoch's line of metrics.jsonl."""

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of each that is a number."""
        found: dict[str, float] = {}
        for record in (self.progress or {}, self.epoch or {}, self.summary or {}):
            found |= _numbers(record)
        return {name: found[name] for name in (*RECIPE_METRICS, *found) if name in found}

    def lacks(self, goal: Goal) -> bool:
        """Whether the folder of this run says what is not known yet."""
        if self.phase != "succeeded":
            return False
        if self.summary is None:
            return True
        return self.epoch is None and goal.metric in RECORDED and "program" not in self.summary


def _numbers(record: Object) -> dict[str, float]:
    """The metrics in a record; those of own code are a mapping, where a recipe has the path of a file."""
    told = record.get("metrics")
    if not isinstance(told, dict):
        told = {name: record.get(name) for name in RECIPE_METRICS}
    return {
        name: value
        for name, value in told.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


class Kept(Protocol):
    """What is needed of a run's folder."""

    def read(self, file: str) -> str | None: ...


def completed(outcome: Outcome, folder: Kept, goal: Goal) -> Outcome:
    """The same with what the run's folder says where the run's log did not."""
    outcome = replace(
        outcome,
        summary=outcome.summary or _record(folder, "summary.json"),
        progress=outcome.progress or _record(folder, "progress.json"),
    )
    return replace(outcome, epoch=_last_epoch(folder)) if outcome.lacks(goal) else outcome


def _record(folder: Kept, file: str) -> Object | None:
    return record_of(folder.read(file) or "", "")


def _last_epoch(folder: Kept) -> Object | None:
    lines = reversed((folder.read("metrics.jsonl") or "").splitlines())
    records = (record_of(line, "") for line in lines)
    return next((one for one in records if one is not None and one.get("kind") == "epoch"), None)


def has_trained(folder: Kept, config: Object) -> bool:
    """Whether the run has succeeded, and has learnt just what this config would have it learn."""
    summary = _record(folder, "summary.json")
    if summary is None or summary["outcome"] != "succeeded":
        return False
    kept = _record(folder, "run.json")
    return kept is not None and _learnt(kept) == _learnt(config)


def _learnt(config: Object) -> Object:
    """What decides the outcome: of a recipe its identity and length, of own code all that it is told."""
    if "train" not in config:
        return {key: config[key] for key in config.keys() - AttemptConfig.model_fields.keys()}
    identity = {
        section: {key: value for key, value in config[section].items() if key not in free}
        for section, free in MAY_CHANGE.items()
    }
    return identity | {key: config["train"].get(key) for key in LENGTHS}


def rows_of(
    combinations: Sequence[Combination], outcomes: Mapping[str, Outcome], goal: Goal
) -> list[Object]:
    """A row for each run, in the order of the values; of those that succeeded one is the best."""
    ordered = {combination.name: outcomes[combination.name] for combination in combinations}
    best = best_of(ordered, goal)
    return [
        {
            "run": combination.name,
            "settings": dict(combination.settings),
            "phase": outcome.phase,
            **_counts(outcome),
            "metrics": outcome.metrics,
            "best": combination.name == best,
            "message": outcome.message,
        }
        for combination, outcome in zip(combinations, ordered.values(), strict=True)
    ]


def best_of(outcomes: Mapping[str, Outcome], goal: Goal) -> str | None:
    """The run with the best value, of equals the first; None where none has told one."""
    best, name = math.nan, None
    for run, outcome in outcomes.items():
        value = outcome.metrics.get(goal.metric)
        if value is None or outcome.phase != "succeeded":
            continue
        if name is None or goal.is_better(value, best):
            best, name = value, run
    return name


def _counts(outcome: Outcome) -> Object:
    summary, progress = outcome.summary or {}, outcome.progress or {}
    return {
        "epochs": summary.get("epochs"),
        "steps": summary.get("steps", progress.get("step")),
        "images_per_s": summary.get("images_per_s", progress.get("images_per_s")),
    }


def table_of_rows(rows: Sequence[Object], goal: Goal) -> tuple[list[str], list[list[str]]]:
    """Headings, and the cells of each row; the metric comes first, and what no run has told does not come."""
    told = {name for row in rows for name in row["metrics"]} - {goal.metric}
    others = [name for name in dict.fromkeys((*RECIPE_METRICS, *sorted(told))) if name in told]
    keys = list(rows[0]["settings"])
    columns = [
        ("run", [row["run"] for row in rows]),
        *((key, [row["settings"][key] for row in rows]) for key in keys),
        ("phase", [row["phase"] for row in rows]),
        ("epochs", [row["epochs"] for row in rows]),
        ("steps", [row["steps"] for row in rows]),
        (goal.metric, [_cell(row, goal.metric) + " (best)" * row["best"] for row in rows]),
        *((name, [_cell(row, name) for row in rows]) for name in others),
        ("images/s", [row["images_per_s"] for row in rows]),
        ("message", [row["message"] or None for row in rows]),
    ]
    shown = [column for column in columns if any(cell is not None for cell in column[1])]
    cells = [["-" if cell is None else str(cell) for cell in column] for _, column in shown]
    return [heading for heading, _ in shown], [list(row) for row in zip(*cells, strict=True)]


def _cell(row: Object, metric: str) -> str:
    value = row["metrics"].get(metric)
    return "-" if value is None else f"{value:.4g}"
