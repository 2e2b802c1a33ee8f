"""Many runs of one run file: which there are, what they are called, what comes next, which is the best."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_cluster import FakeCluster
from stand_in import stand_in_for_trainer

from trainyard.__main__ import run as trainyard
from trainyard.errors import ClusterError, ClusterUnreachable, ConfigError
from trainyard.local import training
from trainyard.run_file.load import load_run
from trainyard.submission.status import Phase
from trainyard.submission.submit import is_live
from trainyard.sweeps.combinations import (
    COMBINATION_LIMIT,
    load_sweep,
    parse_words,
    run_name,
    split_values,
)
from trainyard.sweeps.on_cluster import carry_out, patiently
from trainyard.sweeps.outcomes import (
    Goal,
    SweepOutcome,
    best_of,
    completed,
    goal_of,
    has_trained,
    rows_of,
    table_of_rows,
)
from trainyard.sweeps.schedule import SweepSchedule
from trainyard_trainer.attempt.attempt import with_absolute_path

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "examples/digits.yaml"
ONE, TWO, THREE = (run_name("digits", {"train.seed": seed}) for seed in "123")
ACCURACY = Goal(metric="val_accuracy", is_lowest=False)
LOSS = Goal(metric="val_loss", is_lowest=True)

Object = dict[str, Any]
Write = Callable[[dict[str, Any]], Path]


# Combinations.


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,2,3", ("1", "2", "3")),
        ("1", ("1",)),
        (" 1 , 2 ", ("1", "2")),
        ("{a: 1, b: 2},{a: 3, b: 4}", ("{a: 1, b: 2}", "{a: 3, b: 4}")),
        ("[1, 2],[],[[3, 4], {a: [5, 6]}]", ("[1, 2]", "[]", "[[3, 4], {a: [5, 6]}]")),
        ("'a,b',\"c,d\"", ("'a,b'", '"c,d"')),
        ("{a: '}', b: 1},2", ("{a: '}', b: 1}", "2")),
        ('"a\\",b",c', ('"a\\",b"', "c")),
        ("'it''s, so',b", ("'it''s, so'", "b")),
        ("it's,so", ("it's", "so")),
        ("a},b", ("a}", "b")),
        ("{a: 1,2", ("{a: 1,2",)),
        ("1,,2", ("1", "", "2")),
        ("", ("",)),
    ],
)
def test_values_are_split_at_the_commas_between_them(text: str, values: tuple[str, ...]) -> None:
    assert split_values(text) == values


@pytest.mark.parametrize(
    ("words", "what", "remedy"),
    [
        (["train.seed"], "'train.seed' must have the form KEY=V1,V2", "train.seed=1,2,3"),
        (["=1,2"], "must have the form KEY=V1,V2", "train.seed=1,2,3"),
        (["train.seed="], "train.seed=: a value is empty", "use null for no value"),
        (["train.seed=1,,2"], "a value is empty", "Remove the comma"),
        (["train.seed=1,2,"], "a value is empty", "Remove the comma"),
        (["train.seed=1", "train.seed=2,3"], "is given twice", "Use train.seed=1,2,3"),
        (["name=a,b"], "name cannot be swept", "Use --name"),
    ],
)
def test_words_that_cannot_be_swept_are_refused_with_the_remedy(
    words: list[str], what: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as error:
        parse_words(words)
    assert what in error.value.what
    assert remedy in str(error.value)


def test_each_combination_is_a_run_whose_keys_were_set_as_by_set() -> None:
    combinations = load_sweep(
        DIGITS, ["train.seed=1,2", "train.model.image_size=16,24"], ["train.epochs=3"], workers="1"
    )
    assert [str(each) for each in combinations] == [
        "train.seed=1 train.model.image_size=16",
        "train.seed=1 train.model.image_size=24",
        "train.seed=2 train.model.image_size=16",
        "train.seed=2 train.model.image_size=24",
    ]
    for each in combinations:
        own = [f"{key}={value}" for key, value in each.settings.items()]
        assert each.run == load_run(DIGITS, ["train.epochs=3", *own], workers="1", name=each.name)
    assert len({each.name for each in combinations}) == 4


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["train.seed=1,x"], "train.seed=x: "),
        (["train.sed=1"], "train.sed=1: "),
        (["train.seed=1,2", "train.epochs=3,0"], "train.seed=1 train.epochs=0: "),
        (["train.seed=1,{"], "train.seed={: --set train.seed={: the value is not valid YAML"),
        (["train.seed=1,2,1"], "train.seed=1 and train.seed=1 are the same run"),
        (["train.clip_norm=0.1,1e-1"], "are the same run"),
        (["train.model.image_size=16,32", "train.model={name: resnet18, in_channels: 1, num_classes: 10}"],
         "are the same run"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_and_the_combination_is_named(words: list[str], what: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_sweep(DIGITS, words)
    assert what in error.value.what


def test_a_run_file_that_cannot_be_read_is_no_combinations_fault() -> None:
    with pytest.raises(ConfigError, match=r"^error: cannot read none\.yaml"):
        load_sweep(Path("none.yaml"), ["train.seed=1,2"])


def test_too_many_combinations_are_refused_with_their_number() -> None:
    seeds = "train.seed=" + ",".join(map(str, range(COMBINATION_LIMIT // 2)))
    with pytest.raises(ConfigError, match="500 x 3 = 1500 combinations are more than 1000"):
        load_sweep(DIGITS, [seeds, "train.epochs=1,2,3"])


# Names.


def test_a_name_tells_the_values_whatever_else_is_swept_and_in_any_order() -> None:
    few = load_sweep(DIGITS, ["train.seed=1,2", "train.epochs=3"])
    many = load_sweep(DIGITS, ["train.epochs=1,2,3", "train.seed=0,1,2"])
    assert {each.name for each in few} < {each.name for each in many}
    assert few[0].name == "digits-b18ddb73"


@pytest.mark.parametrize(
    ("one", "other"),
    [("0.001", "1e-3"), ("2", "2.0"), (".5", "0.50"), ("{a: 1, b: 2}", "{b: 2, a: 1.0}")],
)
def test_one_value_in_two_spellings_has_one_name(one: str, other: str) -> None:
    assert run_name("digits", {"a.b": one}) == run_name("digits", {"a.b": other})


@pytest.mark.parametrize(
    ("one", "other"), [("1", "'x1'"), ("1", "true"), ("null", "0"), ("a", "b")]
)
def test_other_values_have_other_names(one: str, other: str) -> None:
    assert run_name("digits", {"a.b": one}) != run_name("digits", {"a.b": other})


@pytest.mark.parametrize("base", ["d", "d" * 38, "d" * 28 + "-" + "d" * 9])
def test_a_name_can_be_one_of_a_run(base: str) -> None:
    name = run_name(base, {"train.seed": "1"})
    assert load_run(DIGITS, name=name).name == name
    assert "--" not in name


# What is next.


def test_as_one_ends_the_next_is_due() -> None:
    sweep = SweepSchedule(["a", "b", "c"], 2)
    assert sweep.due == ["a", "b"]
    for run in sweep.due:
        sweep.submit(run)
    assert sweep.due == []
    sweep.update({"a": "running", "b": "starting"})
    assert sweep.due == []
    sweep.update({"a": "failed", "b": "running"})
    assert sweep.due == ["c"]
    sweep.submit("c")
    sweep.update({"a": "failed", "b": "succeeded", "c": "succeeded"})
    assert sweep.is_over


@pytest.mark.parametrize(
    ("seen", "due", "is_over"),
    [
        ({"a": "succeeded"}, ["b"], False),
        ({"a": "succeeded", "b": "succeeded"}, [], True),
        ({"a": "running"}, [], False),
        ({"a": "suspended"}, [], False),
        ({"a": "failed", "b": "stopped"}, ["a"], False),
    ],
)
def test_what_earlier_commands_have_left_is_gone_on_with(
    seen: dict[str, Phase], due: list[str], is_over: bool
) -> None:
    sweep = SweepSchedule(["a", "b"], 1)
    sweep.update(seen)
    assert (sweep.due, sweep.is_over) == (due, is_over)


def test_a_run_that_failed_is_submitted_once() -> None:
    sweep = SweepSchedule(["a"], 1)
    assert sweep.update({"a": "failed"}) == []
    sweep.submit("a")
    (change,) = sweep.update({"a": "failed"})
    assert (change.before, change.after) == ("accepted", "failed")
    assert sweep.is_over


def test_a_submission_that_was_deleted_has_stopped_and_is_left_so() -> None:
    sweep = SweepSchedule(["a"], 1)
    sweep.submit("a")
    (change,) = sweep.update({})
    assert change.after == "stopped"
    assert sweep.is_over
    assert sweep.update({"a": "running"}) == []


def test_a_refused_run_makes_room() -> None:
    sweep = SweepSchedule(["a", "b"], 1)
    sweep.refuse("a")
    assert sweep.due == ["b"]


# Comparing.


SUMMARY: Object = {
    "outcome": "succeeded",
    "val_accuracy": 0.9,
    "best_val_accuracy": 0.95,
    "epochs": 2,
    "steps": 44,
    "samples_per_s": 812.5,
    "metrics": "/runs/digits/metrics.jsonl",
    "error": None,
}
PROGRESS: Object = {"epoch": 2, "step": 44, "loss": 0.25, "accuracy": 0.92, "val_accuracy": 0.9}
OWN: Object = {
    "outcome": "succeeded",
    "program": "python train.py",
    "metrics": {"error": 0.125, "of": "x"},
}


class Folder:
    """A run's folder that holds these files."""

    def __init__(self, **files: Any) -> None:
        self._files = {
            name.replace("_", "."): text if isinstance(text, str) else json.dumps(text)
            for name, text in files.items()
        }

    def read(self, file: str) -> str | None:
        return self._files.get(file)


@pytest.mark.parametrize(
    ("text", "goal"),
    [
        ("val_accuracy", ACCURACY),
        ("loss", Goal(metric="loss", is_lowest=True)),
        ("val_loss", Goal(metric="val_loss", is_lowest=True)),
        ("-val_loss", Goal(metric="val_loss", is_lowest=True)),
        ("-accuracy", Goal(metric="accuracy", is_lowest=True)),
    ],
)
def test_the_highest_is_the_best_and_the_lowest_of_a_loss_or_after_a_dash(
    text: str, goal: Goal
) -> None:
    assert goal_of(text, [load_run(DIGITS)]) == goal


@pytest.mark.parametrize(
    ("example", "goal"),
    [
        ("digits.yaml", ACCURACY),
        ("gradient_boosting.yaml", ACCURACY),
        ("command.yaml", LOSS),
        ("regression.yaml", LOSS),
    ],
)
def test_without_a_choice_the_first_metric_of_the_recipe_decides(example: str, goal: Goal) -> None:
    assert goal_of(None, [load_run(ROOT / "examples" / example)]) == goal


def test_a_metric_that_a_recipe_does_not_tell_is_refused_and_own_code_may_tell_anything() -> None:
    with pytest.raises(ConfigError, match="does not report this metric") as error:
        goal_of("val_acc", [load_run(DIGITS)])
    assert "It reports: val_accuracy, " in str(error.value)
    assert goal_of("val_acc", [load_run(ROOT / "examples/command.yaml")]).metric == "val_acc"
    with pytest.raises(ConfigError, match="--metric is empty"):
        goal_of("-")


def test_metrics_are_the_last_numbers_that_a_run_has_told() -> None:
    outcome = SweepOutcome(phase="succeeded", summary=SUMMARY, progress=PROGRESS)
    assert outcome.metrics == {
        "val_accuracy": 0.9,
        "best_val_accuracy": 0.95,
        "loss": 0.25,
        "accuracy": 0.92,
    }
    assert SweepOutcome(phase="succeeded", summary=OWN).metrics == {"error": 0.125}
    reported = {"reports": 3, "metrics": {"error": 0.5, "good": True}}
    assert SweepOutcome(phase="failed", progress=reported).metrics == {"error": 0.5}
    failed = {"outcome": "failed", "val_accuracy": None}
    assert (
        SweepOutcome(phase="failed", summary=failed, progress=PROGRESS).metrics["val_accuracy"]
        == 0.9
    )


def test_what_the_log_did_not_say_is_taken_from_the_folder() -> None:
    folder = Folder(summary_json=SUMMARY, progress_json=PROGRESS)
    found = completed(SweepOutcome(phase="succeeded"), folder)
    assert found == SweepOutcome(phase="succeeded", summary=SUMMARY, progress=PROGRESS)


@pytest.mark.parametrize(
    ("outcome", "is_incomplete"),
    [
        (SweepOutcome(phase="succeeded"), True),
        (SweepOutcome(phase="failed"), False),
        (SweepOutcome(phase="succeeded", summary=SUMMARY), False),
        (SweepOutcome(phase="succeeded", summary=OWN), False),
    ],
)
def test_a_folder_is_asked_only_for_what_a_success_has_not_said(
    outcome: SweepOutcome, is_incomplete: bool
) -> None:
    assert outcome.is_incomplete is is_incomplete


def outcomes(**accuracies: float | None) -> dict[str, SweepOutcome]:
    return {
        run: SweepOutcome(phase="succeeded", summary={"val_accuracy": accuracy})
        for run, accuracy in accuracies.items()
    }


@pytest.mark.parametrize(
    ("accuracies", "metric", "best"),
    [
        ({"a": 0.5, "b": 0.9}, "val_accuracy", "b"),
        ({"a": 0.5, "b": 0.9}, "-val_accuracy", "a"),
        ({"a": 0.5, "b": 0.5}, "val_accuracy", "a"),
        ({"a": None, "b": 0.1}, "val_accuracy", "b"),
        ({"a": 0.0, "b": None}, "-val_accuracy", "a"),
        ({"a": None}, "val_accuracy", None),
        ({"a": 0.5}, "loss", None),
    ],
)
def test_the_best_is_the_first_of_those_that_succeeded_and_told(
    accuracies: dict[str, float | None], metric: str, best: str | None
) -> None:
    failed = SweepOutcome(phase="failed", progress={"val_accuracy": 0.99})
    assert best_of({"x": failed, **outcomes(**accuracies)}, goal_of(metric)) == best


def test_the_table_has_a_row_for_each_run_and_marks_the_best() -> None:
    combinations = load_sweep(DIGITS, ["train.seed=1,2,3"])
    found = {
        THREE: SweepOutcome(phase="failed", message="AppFailed: out of memory"),
        TWO: SweepOutcome(phase="succeeded", summary=SUMMARY, progress=PROGRESS),
        ONE: SweepOutcome(phase="succeeded", summary=SUMMARY | {"val_accuracy": 0.8}),
    }
    rows = rows_of(combinations, found, ACCURACY)
    assert [(row["run"], row["best"]) for row in rows] == [
        (ONE, False),
        (TWO, True),
        (THREE, False),
    ]
    assert rows[1]["settings"] == {"train.seed": "2"}
    headings, cells = table_of_rows(rows, ACCURACY)
    assert headings == [
        *("run", "train.seed", "phase", "epochs", "steps", "val_accuracy"),
        *("best_val_accuracy", "loss", "accuracy", "samples/s", "message"),
    ]
    assert cells == [
        [ONE, "1", "succeeded", "2", "44", "0.8", "0.95", "-", "-", "812.5", "-"],
        [TWO, "2", "succeeded", "2", "44", "0.9 (best)", "0.95", "0.25", "0.92", "812.5", "-"],
        [THREE, "3", "failed", "-", "-", "-", "-", "-", "-", "-", "AppFailed: out of memory"],
    ]


def recipe_config(**train: Any) -> Object:
    return {
        "name": "digits",
        "data": {"source": "digits", "decode_workers": None},
        "train": {"seed": 1, "epochs": 3, "compile": False} | train,
        "scaling": {"num_workers": 1},
    }


@pytest.mark.parametrize(
    ("kept", "is_trained"),
    [
        (recipe_config(), True),
        (recipe_config() | {"scaling": {"num_workers": 2}}, True),
        (recipe_config(compile=True), True),
        (recipe_config(epochs=2), False),
        (recipe_config(seed=2), False),
        ({"name": "digits", "command": ["true"]}, False),
    ],
)
def test_a_run_is_not_trained_again_if_it_has_learnt_just_that(
    kept: Object, is_trained: bool
) -> None:
    folder = Folder(summary_json=SUMMARY, run_json=kept)
    assert has_trained(folder, recipe_config()) is is_trained


@pytest.mark.parametrize(
    ("change", "is_trained"),
    [
        ({}, True),
        ({"scaling": {"num_workers": 2}}, True),
        ({"command": ["false"]}, False),
        ({"code_sha256": "b"}, False),
    ],
)
def test_own_code_is_run_again_if_it_is_other_code(change: Object, is_trained: bool) -> None:
    config = {"name": "mine", "command": ["true"], "code_sha256": "a", "scaling": {}}
    folder = Folder(summary_json=OWN, run_json=config | change)
    assert has_trained(folder, config) is is_trained


@pytest.mark.parametrize("summary", [None, SUMMARY | {"outcome": "failed"}, "{"])
def test_a_run_that_has_not_succeeded_is_trained(summary: Any) -> None:
    assert not has_trained(Folder(run_json=recipe_config()), recipe_config())
    folder = Folder(run_json=recipe_config(), summary_json=summary)
    assert not has_trained(folder, recipe_config())


# On a cluster.


class Yard(FakeCluster):
    """A cluster that carries its RayJobs out, a step of the oldest at each event of a watch. `fates` say
    how the run of a seed ends: with this accuracy, or FAILED; without one, with 0.5."""

    def __init__(self, **fates: float | str) -> None:
        super().__init__()
        seeds = {"one": ONE, "two": TWO, "three": THREE}
        self.fates = {seeds[seed]: fate for seed, fate in fates.items()}
        self.most_live = 0
        self.has_heads = True

    @property
    def jobs(self) -> list[Object]:
        return [found for (kind, _), found in self.objects.items() if kind == "RayJob"]

    @property
    def created(self) -> list[str]:
        """Runs in the order of their submissions."""
        return [name[: len(ONE)] for verb, _, name in self.calls if verb == "create"]

    def create(self, body: Object, *, dry_run: bool = False) -> Object:
        stored = super().create(body, dry_run=dry_run)
        self.most_live = max(self.most_live, sum(map(is_live, self.jobs)))
        return stored

    def watch(
        self,
        kind: str,
        labels: Mapping[str, str | None] | None = None,
        *,
        fields: str = "",
        resource_version: str,
    ) -> Iterator[Object]:
        while True:
            job = next(filter(is_live, self.jobs))
            self._step(job, job["metadata"]["labels"]["trainyard.io/run"])
            changed = copy.deepcopy(job)
            changed["metadata"]["resourceVersion"] = "8"
            yield {"type": "MODIFIED", "object": changed}

    def _step(self, job: Object, run: str) -> None:
        status = job.setdefault("status", {})
        if not status:
            ray_cluster = f"{job['metadata']['name']}-abc"
            status |= {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}
            status["rayClusterName"] = ray_cluster
            return
        fate = self.fates.get(run, 0.5)
        if fate == "FAILED":
            status |= {"jobDeploymentStatus": "Failed", "jobStatus": "FAILED"}
            status |= {"reason": "AppFailed", "message": "noise\nerror: out of memory"}
            return
        status |= {"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}
        if self.has_heads:
            summary = SUMMARY | {"val_accuracy": fate}
            self.add_head(status["rayClusterName"], f"summary {json.dumps(summary)}")


@pytest.fixture
def sweep_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, list[Object], str]]:
    """Exit code, rows and what was said of a sweep over three seeds on a cluster."""

    def sweep(cluster: Yard, *options: str) -> tuple[int, list[Object], str]:
        monkeypatch.setattr(
            "trainyard.cluster.cluster.Cluster", lambda namespace, context=None: cluster
        )
        platform = f"--platform={ROOT / 'launcher/trainyard/platform.yaml'}"
        capsys.readouterr()
        words = [
            "sweep",
            f"{DIGITS}",
            "train.seed=1,2,3",
            "--workers=1",
            platform,
            "--namespace=team",
        ]
        code = trainyard([*words, "--json", *options])
        said = capsys.readouterr()
        return code, json.loads(said.out)["runs"] if said.out else [], said.err

    return sweep


Sweeping = Callable[..., tuple[int, list[Object], str]]


def test_all_are_trained_a_few_at_once_and_each_change_is_a_line(sweep_on: Sweeping) -> None:
    yard = Yard(one=0.7, two=0.9, three=0.8)
    code, rows, said = sweep_on(yard, "--max-parallel=2")
    assert code == 0
    assert yard.most_live == 2
    assert yard.created == [ONE, TWO, THREE]
    assert [(row["metrics"]["val_accuracy"], row["best"]) for row in rows] == [
        (0.7, False),
        (0.9, True),
        (0.8, False),
    ]
    assert [line for line in said.splitlines() if line.startswith(TWO)] == [
        f"{TWO} (train.seed=2): submitted",
        f"{TWO} (train.seed=2): running",
        f"{TWO} (train.seed=2): succeeded: val_accuracy 0.9",
    ]
    assert said.splitlines()[-1] == "3 runs: 3 succeeded, 0 did not"


def test_the_same_command_again_submits_nothing_and_tells_the_same(sweep_on: Sweeping) -> None:
    yard = Yard(one=0.7, two=0.9, three=0.8)
    first = sweep_on(yard)
    yard.calls.clear()
    again = sweep_on(yard)
    assert yard.calls == []
    assert again[:2] == first[:2]
    assert f"{TWO} (train.seed=2): succeeded before: val_accuracy 0.9" in again[2]


def test_runs_that_fail_stop_nothing_and_the_next_command_tries_them_once_more(
    sweep_on: Sweeping,
) -> None:
    yard = Yard(one="FAILED", two=0.9, three="FAILED")
    code, rows, said = sweep_on(yard, "--max-parallel=1")
    assert code == 1
    assert [row["phase"] for row in rows] == ["failed", "succeeded", "failed"]
    assert rows[0]["message"] == "AppFailed: error: out of memory"
    assert f"{ONE} (train.seed=1): failed: AppFailed: error: out of memory" in said
    assert f"`trainyard explain {ONE} -n team` finds the cause" in said
    yard.calls.clear()
    yard.fates = {ONE: 0.6, THREE: "FAILED"}
    code, rows, said = sweep_on(yard, "--max-parallel=1")
    assert code == 1
    assert [row["phase"] for row in rows] == ["succeeded", "succeeded", "failed"]
    assert yard.created == [ONE, THREE]
    assert f"{ONE} (train.seed=1): submitted again" in said


def test_more_values_later_train_only_what_is_new(sweep_on: Sweeping) -> None:
    yard = Yard(one=0.7, two=0.9, three=0.8)
    sweep_on(yard)
    yard.calls.clear()
    _, rows, _ = sweep_on(yard, "train.epochs=12,13")
    assert len(rows) == len(set(yard.created)) == 6
    yard.calls.clear()
    sweep_on(yard, "train.epochs=13,12,14")
    assert len(yard.created) == 3


def test_ctrl_c_leaves_live_runs_alone_and_the_same_command_goes_on(sweep_on: Sweeping) -> None:
    yard = Yard(one=0.7, two=0.9, three=0.8)
    watch = yard.watch

    def interrupted(*arguments: Any, **named: Any) -> Iterator[Object]:
        yield next(watch(*arguments, **named))
        raise KeyboardInterrupt

    yard.watch = interrupted  # type: ignore[method-assign]
    code, rows, said = sweep_on(yard, "--max-parallel=2")
    assert (code, rows) == (130, [])
    assert "detached: 2 runs continue (`trainyard list -n team`), 1 were not submitted" in said
    yard.watch = watch  # type: ignore[method-assign]
    code, rows, said = sweep_on(yard, "--max-parallel=2")
    assert code == 0
    assert f"{ONE} (train.seed=1): already active (running)" in said
    assert yard.created == [ONE, TWO, THREE]
    assert yard.most_live == 2


def test_nothing_is_submitted_unless_all_can_be(sweep_on: Sweeping) -> None:
    yard = Yard(one=0.7, two=0.9, three=0.8)
    yard.add_job(f"{THREE}-00000000", run=THREE, status="RUNNING")
    code, _, said = sweep_on(yard)
    assert code == 3
    assert f"error: train.seed=3: run {THREE} is live as {THREE}-00000000" in said
    assert yard.calls == []


def test_a_run_that_is_refused_later_is_told_and_the_others_go_on(sweep_on: Sweeping) -> None:
    yard = Yard(one=0.7, two=0.9, three=0.8)
    create = yard.create

    def limited(body: Object, *, dry_run: bool = False) -> Object:
        if body["metadata"]["labels"]["trainyard.io/run"] == TWO:
            raise ClusterError("exceeded quota", reason="Forbidden")
        return create(body, dry_run=dry_run)

    yard.create = limited  # type: ignore[method-assign]
    code, rows, _ = sweep_on(yard)
    assert code == 1
    assert [row["phase"] for row in rows] == ["succeeded", "failed", "succeeded"]
    assert rows[1]["message"] == "not submitted: exceeded quota"


class Folders:
    """The folders of runs; counts how often somebody opens them."""

    def __init__(self, **files: Any) -> None:
        self.opened: list[str | None] = []
        self._files = files

    @contextmanager
    def open(
        self, cluster: Any, platform: Any, run: str, head: str | None = None
    ) -> Iterator[Folders]:
        self.opened.append(head)
        yield self

    def sibling(self, run: str) -> Folders:
        return self

    def read(self, file: str) -> str | None:
        return Folder(**self._files).read(file)


def test_where_no_head_is_left_one_reader_pod_tells_of_all(
    sweep_on: Sweeping, monkeypatch: pytest.MonkeyPatch
) -> None:
    yard = Yard()
    yard.has_heads = False
    folders = Folders(summary_json=SUMMARY, progress_json=PROGRESS)
    monkeypatch.setattr("trainyard.sweeps.on_cluster.open_folder", folders.open)
    code, rows, _ = sweep_on(yard)
    assert code == 0
    assert folders.opened == [None]
    assert [row["metrics"]["val_accuracy"] for row in rows] == [0.9] * 3


def test_folders_that_cannot_be_read_cost_the_metrics_alone(
    sweep_on: Sweeping, monkeypatch: pytest.MonkeyPatch
) -> None:
    yard = Yard()
    yard.has_heads = False

    def refused(*_: Any) -> Any:
        raise ClusterError("no room for a reader pod", reason="Timeout")

    monkeypatch.setattr("trainyard.sweeps.on_cluster.open_folder", refused)
    code, rows, said = sweep_on(yard)
    assert code == 0
    assert [row["metrics"] for row in rows] == [{}] * 3
    assert "the metrics of 3 runs could not be read: no room for a reader pod" in said
    assert "no run has reported val_accuracy; reported were: no metrics" in said


def test_a_run_that_another_platform_has_trained_is_not_trained_again(
    sweep_on: Sweeping, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    yard = Yard()
    sweep_on(yard)
    config = config_of(next(job for job in yard.jobs if job["metadata"]["name"].startswith(ONE)))
    folders = Folders(summary_json=SUMMARY, run_json=config)
    monkeypatch.setattr("trainyard.sweeps.on_cluster.open_folder", folders.open)
    document = yaml.safe_load((ROOT / "launcher/trainyard/platform.yaml").read_text())
    upgraded = tmp_path / "platform.yaml"
    upgraded.write_text(yaml.safe_dump(document | {"image": "registry/trainyard:next"}))
    yard.calls.clear()
    code, _, said = sweep_on(yard, f"--platform={upgraded}")
    assert code == 0
    assert folders.opened == [None]
    assert f"{ONE} (train.seed=1): succeeded before: val_accuracy 0.9" in said
    assert yard.created == [TWO, THREE]  # the same folder does not tell of these


def test_a_run_that_is_to_be_longer_is_gone_on_with(
    sweep_on: Sweeping, monkeypatch: pytest.MonkeyPatch
) -> None:
    yard = Yard()
    sweep_on(yard)
    folders = Folders(summary_json=SUMMARY, run_json=config_of(yard.jobs[0]))
    monkeypatch.setattr("trainyard.sweeps.on_cluster.open_folder", folders.open)
    yard.calls.clear()
    code, _, _ = sweep_on(yard, "--set=train.epochs=13")
    assert code == 0
    assert yard.created == [ONE, TWO, THREE]


def config_of(job: Object) -> Object:
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    values = {variable["name"]: variable.get("value", "") for variable in head["env"]}
    config: Object = json.loads(values["TRAINYARD_CONFIG"].replace("$$", "$"))
    return config


class Deleting(Yard):
    """Somebody deletes each RayJob."""

    def watch(self, *arguments: Any, **named: Any) -> Iterator[Object]:
        while True:
            job = next(filter(is_live, self.jobs))
            self.objects.pop(("RayJob", job["metadata"]["name"]))
            job["metadata"]["resourceVersion"] = "8"
            yield {"type": "DELETED", "object": job}


def test_a_deleted_rayjob_is_a_run_that_was_stopped(sweep_on: Sweeping) -> None:
    code, rows, said = sweep_on(Deleting())
    assert code == 1
    assert {(row["phase"], row["message"]) for row in rows} == {
        ("stopped", "its RayJob was deleted")
    }
    assert f"{ONE} (train.seed=1): stopped: its RayJob was deleted" in said


def test_a_cluster_that_is_away_for_a_moment_is_asked_again() -> None:
    slept: list[float] = []
    answers: list[Any] = [ClusterUnreachable("away"), ClusterError("busy", reason="503"), "there"]

    def ask() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    assert patiently(ask, lambda: 0.0, slept.append) == "there"
    assert len(slept) == 2


def test_a_cluster_that_stays_away_ends_the_sweep() -> None:
    now = iter(range(0, 10_000, 100))

    def ask() -> str:
        raise ClusterUnreachable("away")

    with pytest.raises(ClusterUnreachable):
        patiently(ask, lambda: float(next(now)), lambda _: None)


def test_a_sweep_with_nothing_to_do_asks_nothing() -> None:
    cluster = FakeCluster()
    carry_out(cluster, SweepSchedule([], 2), {}, None)  # type: ignore[arg-type]
    assert cluster.calls == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--here", "--max-parallel=2"], "--max-parallel 2 is for a cluster"),
        (["--here", "--platform=x.yaml"], "--platform is for a cluster"),
        (["--storage=x"], "--storage is for --here"),
        (["--metric=val_acc"], "--metric val_acc: a built-in recipe does not report this metric"),
        (["--workers=3"], "train.seed=1: "),
        (["train.seed=4"], "train.seed is given twice"),
    ],
)
def test_what_cannot_be_is_refused_before_a_cluster_is_asked(
    sweep_on: Sweeping, options: list[str], message: str
) -> None:
    yard = Yard()
    code, _, said = sweep_on(yard, *options)
    assert code == 2
    assert message in said
    assert yard.calls == []


# On this machine.


PROGRAM = """
import json, os, pathlib, sys
config = json.loads(os.environ["TRAINYARD_CONFIG"])
folder = pathlib.Path(config["storage"]["path"]) / config["name"]
seed = config["train"]["seed"]
(folder.parent / "trained").open("a").write(f"{seed} ")
if seed == FAILING:
    print("error: no luck", file=sys.stderr)
    sys.exit(1)
(folder / "run.json").write_text(json.dumps(config))
summary = {"outcome": "succeeded", "val_accuracy": 0.5 + seed / 10, "epochs": 12, "steps": 9}
(folder / "summary.json").write_text(json.dumps(summary))
"""


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[int], tuple[int, str, str]]:
    """Exit code, output and what was said of a sweep with a program that fails for one seed."""
    monkeypatch.setattr(training, "NEEDED", ())
    monkeypatch.setattr("trainyard.sweeps.on_this_machine.NEEDED", ())
    monkeypatch.chdir(tmp_path)
    main = stand_in_for_trainer(tmp_path, monkeypatch)

    def sweep(failing: int) -> tuple[int, str, str]:
        main.write_text(PROGRAM.replace("FAILING", f"{failing}"))
        capsys.readouterr()
        code = trainyard(["sweep", f"{DIGITS}", "train.seed=1,2,3", "--here", "--storage=runs"])
        said = capsys.readouterr()
        return code, said.out, said.err

    return sweep


def test_here_runs_are_trained_one_after_the_other_and_none_twice(
    here: Callable[[int], tuple[int, str, str]], tmp_path: Path
) -> None:
    code, table, said = here(2)
    assert code == 1
    assert f"{TWO} (train.seed=2): failed: no luck" in said
    assert f"{THREE} (train.seed=3): succeeded: val_accuracy 0.8" in said
    code, table, said = here(0)
    assert code == 0
    assert f"{ONE} (train.seed=1): succeeded before: val_accuracy 0.6" in said
    assert (tmp_path / "runs/trained").read_text() == "1 2 3 2 "
    rows = [line.split() for line in table.splitlines()]
    assert rows[0] == ["run", "train.seed", "phase", "epochs", "steps", "val_accuracy"]
    assert rows[3] == [THREE, "3", "succeeded", "12", "9", "0.8", "(best)"]


@pytest.mark.parametrize(
    "train",
    [
        {
            "recipe": "causal_lm",
            "model": {"path": "./tiny"},
            "questions": {"path": "./questions.jsonl"},
            "context_length": 8,
        },
        {
            "recipe": "language_model",
            "model": {
                "layers": 1,
                "heads": 1,
                "width": 8,
                "context_length": 8,
                "tokenizer": "./words",
            },
        },
    ],
    ids=["model and questions", "tokenizer"],
)
def test_here_a_run_with_relative_paths_is_not_trained_twice(
    here: Callable[[int], tuple[int, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    train: dict[str, Any],
) -> None:
    trained = []

    def record(config: Any, *_: Any) -> Iterator[str]:
        trained.append(config.name)
        folder = Path(config.storage.path) / config.name
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(with_absolute_path(config).model_dump_json())
        (folder / "summary.json").write_text(json.dumps({"outcome": "succeeded", "val_loss": 1.0}))
        yield "done"

    monkeypatch.setattr("trainyard.sweeps.on_this_machine.train_locally", record)
    lengths = {"epochs": 1, "global_batch_size": 1}
    run = {"name": "tune", "resources": {"workers": 1}, "data": {"source": "./data.jsonl"}}
    (tmp_path / "run.yaml").write_text(json.dumps(run | {"train": train | lengths}))
    command = ["sweep", "run.yaml", "train.seed=1,2", "--here", "--storage=runs"]
    assert trainyard(command) == 0, capsys.readouterr().err
    assert trainyard(command) == 0
    assert len(trained) == 2
    assert capsys.readouterr().err.count("succeeded before") == 2


def test_ctrl_c_here_says_that_the_same_command_goes_on(
    here: Callable[[int], tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Iterator[str]:
        yield "hello"
        raise KeyboardInterrupt

    monkeypatch.setattr("trainyard.sweeps.on_this_machine.train_locally", interrupted)
    code, table, said = here(0)
    assert (code, table) == (130, "")
    assert f"run {ONE} was interrupted: the same command resumes the sweep" in said


@pytest.mark.slow
def test_here_a_sweep_trains_on_ray_and_goes_on_where_it_was(tmp_path: Path) -> None:
    def sweep(*words: str) -> subprocess.CompletedProcess[str]:
        tiny = ("train.model.image_size=16", "train.epochs=1", "data.valid_share=0.8")
        settings = [f"--set={each}" for each in tiny]
        command = [sys.executable, "-m", "trainyard", "sweep", f"{DIGITS}", *words, *settings]
        options = ["--here", f"--storage={tmp_path}", "--workers=1", "--metric=val_loss", "--json"]
        return subprocess.run(
            [*command, *options], cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False
        )  # fmt: skip

    first = sweep("train.seed=1,2")
    assert first.returncode == 0, first.stderr
    rows = json.loads(first.stdout)["runs"]
    assert [(row["phase"], row["epochs"]) for row in rows] == [("succeeded", 1)] * 2
    losses = [row["metrics"]["val_loss"] for row in rows]
    assert [row["best"] for row in rows] == [loss == min(losses) for loss in losses]
    again = sweep("train.seed=2,1")
    assert again.returncode == 0, again.stderr
    assert "running" not in again.stderr
    assert again.stderr.count("succeeded before: val_loss") == 2
    assert json.loads(again.stdout)["runs"] == rows[::-1]
