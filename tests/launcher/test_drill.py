"""What a drill makes of what it has seen: pure, on the records of runs."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import fault_table
from trainyard.cli.commands.cluster_runs.drill import drill as drill_command
from trainyard.drills.drill import (
    SETTINGS,
    drill_name,
    has_all_at_work,
    has_even_epochs,
    left_in_folder,
    require_landed,
)
from trainyard.drills.drill_run import DrillRecorder
from trainyard.drills.final_errors import FINAL_ERRORS, FinalErrorReport, missed_by, pod_seconds
from trainyard.drills.report import TOO_SHORT, UNEVEN, DrillReport, missed
from trainyard.drills.scenarios import SCENARIOS
from trainyard.drills.soak import SETTINGS as SOAK_SETTINGS
from trainyard.drills.soak import STRIKES, goodput_of, in_turn
from trainyard.drills.soak_report import RunSize, SoakReport, SoakStrike, growth
from trainyard.drills.strikes import FIND
from trainyard.drills.timeline import (
    Observation,
    PodLife,
    RecordedRun,
    Recovery,
    observations_around,
    recover,
    seconds_per_step,
    stood_still_s,
)
from trainyard.drills.undisturbed import weights_of
from trainyard.errors import ClusterError, ConfigError, LauncherError
from trainyard.planning.plan import plan_run
from trainyard.platform import load_platform
from trainyard.run_file.load import load_run
from trainyard_trainer.config.trainer_config import RUN_NAME_LIMIT, BuiltInConfig, TrainerConfig

Object = dict[str, Any]

STRUCK = 1000.0
DIGITS = Path(__file__).resolve().parents[2] / "examples/digits.yaml"


def start(
    attempt: int, group: int, step: int, reached: int, time: float, **startup: float
) -> Object:
    record = {
        "attempt": attempt,
        "group": group,
        "step": step,
        "reached_step": reached,
        "time": time,
    }
    return record | ({"startup": startup} if startup else {})


def attempt(number: int, began: float, reached: int = 0, imports_s: float = 6.0) -> Object:
    return {"attempt": number, "began": began, "imports_s": imports_s, "reached_step": reached}


FIRST = start(1, 1, 0, 0, 900.0, began=880.0, lease=0.1, workers=15.0, first_step=5.0)
BEFORE = [
    Observation(time=950.0, phase="running", step=0),
    Observation(time=980.0, phase="running", step=60),
]
BEFORE += [Observation(time=1000.0, phase="running", step=100)]


# A worker is lost: the same attempt goes on with another group.


def a_worker_is_lost(pods: list[PodLife] | None = None, **more: Any) -> Recovery:
    second = start(1, 2, 70, 101, 1010.0, began=1002.0, workers=7.0, model=2.0, first_step=1.5)
    failure = {"attempt": 1, "group": 1, "time": 1002.0, "rank": 1, "error": "died"}
    records = RecordedRun(
        attempts=[attempt(1, 880.0)], starts=[FIRST, second], failures=[failure], **more
    )
    return recover(records, pods or [], BEFORE, STRUCK)


def test_a_loss_counts_from_the_failure_that_was_noticed_to_the_next_step() -> None:
    found = a_worker_is_lost()
    assert (found.noticed_s, found.noticed_by) == (2.0, "Ray Train")
    assert found.again_s == pytest.approx(10.5)
    assert found.phases == pytest.approx({"workers": 7.0, "model": 2.0, "first step": 1.5})


def test_steps_are_lost_from_the_last_report_back_to_the_checkpoint() -> None:
    found = a_worker_is_lost()
    assert found.steps_lost == 31
    assert found.seconds_lost == pytest.approx(31 * 0.5)  # 100 steps took 50 s


def test_the_start_of_a_pod_divides_the_wait_for_workers() -> None:
    pod = PodLife(name="w", kind="worker", created=1003.0, started=1005.0, ready=1008.0)
    phases = a_worker_is_lost([pod]).phases
    assert list(phases) == [
        *("worker pod made", "worker pod starts", "worker pod ready"),
        *("workers", "model", "first step"),
    ]
    assert sum(phases.values()) == pytest.approx(10.5)


def test_pods_from_before_the_strike_say_nothing() -> None:
    old = PodLife(name="w", kind="worker", created=870.0, started=872.0, ready=875.0)
    assert a_worker_is_lost([old]) == a_worker_is_lost()


def test_a_group_that_leaves_a_node_loses_nothing_and_counts_from_there() -> None:
    left = {"attempt": 1, "group": 1, "time": 1052.0, "rank": None, "error": None}
    second = start(1, 2, 180, 180, 1060.0, began=1052.0, workers=9.0, model=1.0)
    records = RecordedRun(attempts=[attempt(1, 880.0)], starts=[FIRST, second], failures=[left])
    new = PodLife(name="w", kind="worker", created=1001.0)
    found = recover(records, [new], BEFORE, STRUCK)
    assert (found.noticed_s, found.noticed_by) == (52.0, "Ray, by its notice")
    assert (found.again_s, found.steps_lost) == (10.0, 0)


def test_the_replacement_of_a_worker_counts_until_all_workers_can_make_a_step() -> None:
    failure = {"attempt": 1, "group": 1, "time": 1002.5, "rank": 1}
    replaced = {"attempt": 1, "group": 1, "step": 100, "time": 1000.5, "seconds": 6.0}
    records = RecordedRun(
        attempts=[attempt(1, 880.0)], starts=[FIRST], failures=[failure], replacements=[replaced]
    )
    found = recover(records, [], BEFORE, STRUCK)
    assert (found.noticed_s, found.noticed_by) == (0.5, "the other workers")
    assert (found.again_s, found.steps_lost) == (6.0, 0)
    assert found.phases == pytest.approx({"Ray Train notices": 2.0, "replacement": 4.0})


# The head is lost: another attempt.


def test_an_attempt_counts_from_the_new_head_and_its_job_imports_and_lease_are_told() -> None:
    second = start(
        *(2, 1, 70, 70, 1050.0),
        **{"began": 1030.0, "lease": 12.0, "ray": 3.0, "workers": 8.0, "first_step": 2.0},
    )
    records = RecordedRun(
        attempts=[attempt(1, 880.0), attempt(2, 1030.0, reached=105)],
        starts=[FIRST, second],
        failures=[],
    )
    head = PodLife(name="h", kind="head", created=1003.0, started=1006.0, ready=1016.0)
    found = recover(records, [head], BEFORE, STRUCK)
    assert (found.noticed_s, found.noticed_by) == (3.0, "KubeRay, by a new head")
    assert found.again_s == 52.0
    assert found.phases == pytest.approx(
        {
            "head pod starts": 3.0,
            "head pod ready": 10.0,
            "job submitted": 8.0,
            "imports": 6.0,
            "lease": 12.0,
            "ray": 3.0,
            "workers": 8.0,
            "first step": 2.0,
        }
    )
    assert found.steps_lost == 35


def test_a_phase_that_the_watch_shows_is_a_notice_too() -> None:
    seen = [
        *BEFORE,
        Observation(time=1004.0, phase="retrying"),
        Observation(time=1009.0, phase="starting"),
    ]
    found = recover(RecordedRun(attempts=[], starts=[FIRST], failures=[]), [], seen, STRUCK)
    assert (found.noticed_s, found.noticed_by) == (4.0, "KubeRay (retrying)")


# Nothing comes after.


def test_a_run_that_never_trains_again_has_no_time_for_it() -> None:
    stuck = start(1, 2, 70, 100, 1010.0)
    found = recover(
        RecordedRun(attempts=[], starts=[FIRST, stuck], failures=[]), [], BEFORE, STRUCK
    )
    assert (found.noticed_s, found.again_s, found.phases) == (None, None, {})
    assert found.steps_lost == 30


def test_a_fault_that_workers_do_not_feel_costs_nothing() -> None:
    found = recover(RecordedRun(attempts=[], starts=[FIRST], failures=[]), [], BEFORE, STRUCK)
    assert (found.noticed_s, found.noticed_by, found.steps_lost) == (None, "nobody", 0)


def test_a_head_that_is_made_after_the_end_is_no_notice() -> None:
    seen = [*BEFORE, Observation(time=1090.0, phase="succeeded")]
    head = PodLife(name="h", kind="head", created=1092.0, started=None, ready=None)
    found = recover(RecordedRun(attempts=[], starts=[FIRST], failures=[]), [head], seen, STRUCK)
    assert (found.noticed_s, found.noticed_by) == (None, "nobody")


def test_the_pace_is_known_from_two_sights_of_it() -> None:
    assert seconds_per_step(BEFORE, STRUCK) == 0.5
    assert seconds_per_step(BEFORE, 960.0) is None


# How a process is found in a pod.


def test_a_process_is_found_by_the_words_that_it_was_started_with(tmp_path: Path) -> None:
    program = tmp_path / "gcs_server"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "1234.5"]) as process:
        found = {
            words: subprocess.run(
                [sys.executable, "-c", FIND, *words], capture_output=True, text=True, check=True
            ).stdout.split()
            for words in (("gcs_server", "1234.5"), ("gcs_server", "1234.6"), ("server",))
        }
        process.kill()
    assert list(found.values()) == [[str(process.pid)], [], []]


# What is compared, and what is left.


class Kept:
    """A run's folder with these files."""

    def __init__(self, **files: Any) -> None:
        self._files = files

    def files(self) -> list[str]:
        return sorted(self._files)

    def read(self, file: str) -> str | None:
        return json.dumps(self._files[file]) if file in self._files else None

    def sum(self, file: str) -> str | None:
        return f"sum of {file}" if file in self._files else None


def config(**changes: Any) -> TrainerConfig:
    train = {"model": {"name": "resnet18", "in_channels": 1, "num_classes": 10}, "epochs": 3}
    scaling = {"num_workers": 2, "use_gpu": False, "cpus_per_worker": 1}
    document: Object = {
        "name": "digits",
        "data": {"source": "digits"},
        "train": train | {"global_batch_size": 64} | changes.pop("train", {}),
        "scaling": scaling | changes.pop("scaling", {}),
        "storage": {"path": "/mnt"},
    }
    return BuiltInConfig.model_validate(document | changes)


@pytest.mark.parametrize(
    ("changes", "is_the_same"),
    [
        ({}, True),
        ({"name": "other", "checkpoint": {"every_s": 5.0}, "faults": {"retries": 0}}, True),
        ({"train": {"seed": 1}}, False),
        ({"train": {"epochs": 4}}, False),
        ({"scaling": {"num_workers": 4}}, False),
    ],
)
def test_a_run_is_compared_with_one_that_has_learnt_the_same(
    changes: Object, is_the_same: bool
) -> None:
    before = config(**changes).model_dump(mode="json")
    folder = Kept(**{"run.json": before, "summary.json": {"outcome": "succeeded"}, "model.pt": 1})
    assert weights_of(folder, config()) == ("sum of model.pt" if is_the_same else None)


@pytest.mark.parametrize("outcome", [None, {"outcome": "failed"}])
def test_a_run_that_has_not_finished_is_nothing_to_compare_with(outcome: Object | None) -> None:
    summary = {} if outcome is None else {"summary.json": outcome}
    folder = Kept(**{"run.json": config().model_dump(mode="json"), "model.pt": 1}, **summary)
    assert weights_of(folder, config()) is None


@pytest.mark.parametrize(
    ("ends", "is_even"),
    [
        ([(1, 22, 1_408), (2, 44, 2_816), (3, 66, 4_224)], True),
        ([(1, 22, 1_408), (2, 44, 2_816), (3, 65, 4_224)], False),
        ([(1, 22, 1_408), (2, 44, 2_784), (3, 66, 4_192)], False),
        ([(1, 22, 1_408), (2, 44, 2_816), (2, 44, 2_816)], False),
        ([(1, 22, 1_408), (3, 66, 4_224)], False),
        ([(1, 22, 1_408), (2, 44, 2_816)], False),
        ([], False),
    ],
)
def test_epochs_are_even_that_are_all_there_once_and_of_as_many_steps_and_samples(
    ends: list[tuple[int, int, int]], is_even: bool
) -> None:
    metrics: list[Object] = [{"kind": "interval", "epoch": 1, "step": 3, "samples": 192}]
    for epoch, step, samples in ends:
        metrics.append({"kind": "epoch", "epoch": epoch, "step": step, "samples": samples})
    assert has_even_epochs(metrics, 3) is is_even


@pytest.mark.parametrize(
    ("files", "left"),
    [
        (["lease/a1.json", "lease/a1.1.json", "lease/a1.beat", "lease/a1.ended"], []),
        (["lease/a1.json", "lease/a1.ended", "lease/a2.json"], ["the lease of attempt 2"]),
        (["lease/a1.json", "lease/a2.json", "lease/a2.ended"], []),
        (["model.pt", "model.pt.1234.aside"], ["model.pt.1234.aside"]),
    ],
)
def test_a_lease_that_is_held_and_half_written_files_are_left_behind(
    files: list[str], left: list[str]
) -> None:
    assert left_in_folder(Kept(**dict.fromkeys(files))) == left


# What is told.


def test_the_sights_after_the_strike_are_told_once_each_with_what_was_before() -> None:
    starting = Observation(time=900.0, phase="starting")
    after = [
        Observation(time=1001.0, phase="running", step=101),
        Observation(time=1004.0, phase="retrying"),
    ]
    told = observations_around([starting, *BEFORE, *after], STRUCK)
    assert [(each.time, each.phase, each.step) for each in told] == [
        (-50.0, "running", 101),
        (4.0, "retrying", None),
    ]


@pytest.mark.parametrize(
    ("steps", "seconds"),
    [
        ({}, 0.0),
        ({1001.0: 101, 1002.0: 102}, 1.0),
        ({1001.0: 101, 1002.0: 101, 1031.0: 71, 1032.0: 72}, 30.0),
    ],
)
def test_progress_stands_still_while_its_step_stays(
    steps: dict[float, int], seconds: float
) -> None:
    after = [Observation(time=time, phase="running", step=step) for time, step in steps.items()]
    assert stood_still_s([*BEFORE, *after], STRUCK) == seconds


@pytest.mark.parametrize(
    ("step", "workers", "is_at_work"),
    [(0, 2, False), (1, 2, True), (50, 1, False), (51, 2, True)],
)
def test_a_drill_takes_aim_when_all_workers_are_known_to_train(
    step: int, workers: int, is_at_work: bool
) -> None:
    assert has_all_at_work({"step": step, "workers": workers}, 2) is is_at_work


@pytest.mark.parametrize(("is_too_late", "raised"), [(True, ConfigError), (False, ClusterError)])
def test_a_strike_that_the_run_has_escaped_says_so_and_any_other_what_stood_in_its_way(
    is_too_late: bool, raised: type[LauncherError]
) -> None:
    strike: Future[None] = Future()
    strike.set_exception(ClusterError("no pod"))
    with pytest.raises(raised) as told:
        require_landed(strike, "r", is_too_late=is_too_late)
    assert "no pod" in (told.value.what, *told.value.details)


@pytest.mark.parametrize("scenario", [*SCENARIOS, *FINAL_ERRORS])
def test_the_run_of_a_drill_has_a_name_of_its_own_that_a_run_may_have(scenario: str) -> None:
    for name in ("digits", "a-name-of-38-characters-as-long-as-any"):
        found = drill_name(name, scenario)
        assert found.endswith(f"-drill-{scenario}")
        assert found[0] == name[0]
        assert len(found) <= RUN_NAME_LIMIT
    assert drill_name("digits", "undisturbed") == "digits-undisturbed"


UNFELT = "the run had ended before its workers had to restart" + TOO_SHORT
OUTLASTED = "the run had ended before the fault was over" + TOO_SHORT
ANEW = "training was interrupted: 1 attempts, 2 worker groups"
NOT_THERE = "training stood still for 12 s, not 40 s: the fault had no effect"


def report(**changes: Any) -> DrillReport:
    recovery = {"noticed_s": 2.0, "noticed_by": "Ray Train", "again_s": 10.0, "phases": {}}
    lost = {"steps_lost": 5, "seconds_lost": 2.5}
    facts: Object = {
        "scenario": "worker-killed",
        "run": "digits-drill-worker-killed",
        "is_recovered": True,
        "why_not": "",
        "struck_at_step": 100,
        "attempts": 1,
        "worker_groups": 2,
        "has_equal_weights": True,
        "is_elastic": False,
        "has_even_epochs": True,
        "left_behind": [],
        "seen": [],
        "stood_still_s": 12.0,
        "outlasted": True,
    }
    for key in [*recovery, *lost]:
        if key in changes:
            (recovery if key in recovery else lost)[key] = changes.pop(key)
    return DrillReport(**facts | changes, recovery=Recovery(**recovery, **lost))


@pytest.mark.parametrize(
    ("scenario", "changes", "words"),
    [
        ("worker-killed", {}, []),
        ("worker-killed", {"again_s": 46.0}, ["training continued after 46 s, not 45 s"]),
        ("driver-killed", {"again_s": 46.0}, []),
        ("worker-killed", {"seconds_lost": 11.0}, ["11 s of training lost, not 10 s"]),
        ("worker-deleted", {}, ["5 steps lost, not 0"]),
        ("worker-killed", {"left_behind": ["Pod a"]}, ["left behind: Pod a"]),
        ("worker-killed", {"has_even_epochs": False}, [UNEVEN]),
        ("worker-killed", {"again_s": None}, [UNFELT]),
        ("worker-killed", {"again_s": None, "is_recovered": False}, []),
    ],
)
def test_a_bound_that_is_not_held_is_said_with_its_numbers(
    scenario: str, changes: Object, words: list[str]
) -> None:
    assert missed(report(**changes), SCENARIOS[scenario], every_s=5.0) == tuple(words)


UNSTRUCK: Object = {"worker_groups": 1, "again_s": None, "steps_lost": 0}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (UNSTRUCK, []),
        (UNSTRUCK | {"worker_groups": 2}, [ANEW]),
        (UNSTRUCK | {"outlasted": False}, [OUTLASTED]),
        (UNSTRUCK | {"outlasted": False, "is_recovered": False}, []),
    ],
)
def test_where_training_is_to_go_on_nobody_may_start_anew_nor_the_run_end_before_the_fault(
    changes: Object, words: list[str]
) -> None:
    scenario = replace(SCENARIOS["worker-killed"], restarts="never")
    assert missed(report(**changes), scenario, every_s=5.0) == tuple(words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"worker_groups": 1}, []),
        ({}, ["all workers restarted: 1 attempts, 2 worker groups"]),
    ],
)
def test_where_one_worker_is_replaced_the_others_may_not_restart(
    changes: Object, words: list[str]
) -> None:
    scenario = replace(SCENARIOS["worker-killed"], restarts="one")
    assert missed(report(**changes), scenario, every_s=5.0) == tuple(words)


def test_a_fault_that_was_not_there_shows_nothing() -> None:
    scenario = replace(SCENARIOS["worker-killed"], stands_still_s=40.0)
    assert missed(report(), scenario, every_s=5.0) == (NOT_THERE,)


@pytest.mark.parametrize(
    ("noticed_s", "again_s", "words"),
    [
        (60.0, 250.0, []),
        (60.0, 290.0, ["training continued after 50 s, not 45 s"]),
        (310.0, 40.0, []),
    ],
)
def test_what_keeps_workers_from_starting_counts_from_its_end(
    noticed_s: float, again_s: float, words: list[str]
) -> None:
    scenario = replace(SCENARIOS["worker-killed"], lasts_s=300.0)
    shown = report(noticed_s=noticed_s, again_s=again_s)
    assert missed(shown, scenario, every_s=5.0) == tuple(words)


@pytest.mark.parametrize(
    "changes",
    [
        {"is_recovered": False},
        {"has_equal_weights": False},
        {"has_equal_weights": None},
        {"missed": ("x",)},
    ],
)
def test_a_drill_passes_if_the_run_recovers_with_equal_weights_within_its_bounds(
    changes: Object,
) -> None:
    assert report().is_passed
    assert not report(**changes).is_passed


def test_a_drill_of_an_elastic_run_needs_no_equal_weights() -> None:
    assert report(is_elastic=True, has_equal_weights=None).is_passed


# A soak.


def sizes(head: list[int], checkpoints: int = 10) -> list[RunSize]:
    return [
        RunSize(
            after_s=100.0 * number,
            head_bytes=each,
            worker_bytes=7,
            checkpoint_bytes=checkpoints,
            other_bytes=number,
        )
        for number, each in enumerate(head)
    ]


def test_growth_is_of_the_last_third_over_the_first_one() -> None:
    found = growth(sizes([100, 900, 110, 500, 1, 1, 130, 132, 140]))
    assert found["the head's memory"] == pytest.approx(132 / 110)
    assert found["a worker's memory"] == 1.0
    assert growth(sizes([1, 2, 3, 4])) == {}


def test_a_soak_injects_each_fault_into_the_run_as_the_run_file_describes_it() -> None:
    assert sorted(each.name for each in STRIKES) == [
        "driver-killed",
        "head-deleted",
        "head-lost",
        "head-oom",
        "resubmitted",
        "suspended",
        "worker-deleted",
        "worker-hangs",
        "worker-killed",
        "worker-lost",
        "worker-oom",
        "worker-oom-by-ray",
    ]
    assert {setting.partition("=")[0] for setting in SOAK_SETTINGS} == {
        "faults.hang_timeout_s",
        "faults.retries",
        "faults.worker_failures",
        "train.schedule",
    }


def test_each_strike_has_its_turn_before_one_comes_again() -> None:
    turns = in_turn(random.Random(1))
    rounds = [[next(turns).name for _ in STRIKES] for _ in range(3)]
    assert all(sorted(each) == sorted(one.name for one in STRIKES) for each in rounds)
    assert rounds[0] != rounds[1]


@pytest.mark.parametrize(
    ("summary", "goodput"),
    [(None, None), ('{"outcome": "failed"}', None), ('{"goodput": {"share": 0.9}}', 0.9)],
)
def test_a_soak_tells_the_goodput_of_its_run(summary: str | None, goodput: float | None) -> None:
    assert goodput_of(summary) == goodput


def a_soak(**changes: Any) -> SoakReport:
    landed = SoakStrike(after_s=70.0, step=30, scenario="worker-killed")
    facts: Object = {
        "run": "digits", "minutes": 5, "seed": 7, "epochs": 40, "steps": 880, "rounds": 2, "attempts": 3,
        "worker_groups": 6, "strikes": [landed], "steps_lost": 40, "goodput": 0.9, "why_not": "",
        "has_equal_weights": True, "has_even_epochs": True, "left_behind": [], "sizes": [], "grown": {},
    }  # fmt: skip
    return SoakReport(**facts | changes)


def test_a_soak_passes_that_ended_as_if_nobody_had_struck() -> None:
    assert a_soak().is_passed
    assert a_soak(grown={"a worker's memory": 1.2}).is_passed


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({"why_not": "failed: x", "has_equal_weights": None}, "failed: x"),
        ({"has_equal_weights": False}, "the weights differ from those of the undisturbed run"),
        ({"has_even_epochs": False}, UNEVEN),
        ({"left_behind": ["Pod x"]}, "left behind: Pod x"),
        ({"grown": {"a worker's memory": 2.0}}, "a worker's memory grew by a factor of 2.00"),
        ({"strikes": [SoakStrike(after_s=1, step=1, scenario="x", why_not="y")]}, "no fault was injected"),
    ],
)  # fmt: skip
def test_a_soak_says_what_it_has_missed(changes: Object, missed: str) -> None:
    report = a_soak(**changes)
    assert report.missed == [missed]
    assert not report.is_passed


# Errors that a retry cannot cure.


def test_pods_are_held_until_they_are_gone_or_the_run_has_failed() -> None:
    pods = [
        PodLife(name="head", kind="head", created=100.0),
        PodLife(name="worker-1", kind="worker", created=110.0, gone=130.0),
        PodLife(name="worker-2", kind="worker", created=120.0, gone=190.0),
        PodLife(name="late", kind="worker", created=160.0),
    ]
    assert pod_seconds(pods, until=150.0) == 50.0 + 20.0 + 30.0


def test_a_pod_that_is_no_longer_listed_is_gone_at_that_time() -> None:
    labels = {"ray.io/cluster": "digits-1", "ray.io/node-type": "worker"}
    pods = {name: {"metadata": {"name": name, "labels": labels}} for name in ("a", "b")}
    recorder = DrillRecorder()
    recorder.note_pods(pods)
    recorder.note_pods({"a": pods["a"]})
    gone = recorder.pods["b"].gone
    recorder.note_pods({"a": pods["a"]})
    assert gone is not None
    assert gone >= recorder.pods["b"].created
    assert (recorder.pods["a"].gone, recorder.pods["b"].gone) == (None, gone)
    assert recorder.clusters == {"digits-1"}


def final_report(**changes: Any) -> FinalErrorReport:
    facts: Object = {
        "scenario": "final-config",
        "run": "digits-drill-final-config",
        "phase": "failed",
        "message": "data.source = /no-such-data: there is no such folder",
        "clusters": 1,
        "pods": 3,
        "held_s": 91.0,
        "ended_s": 42.0,
        "left_behind": (),
    }
    return FinalErrorReport(**facts | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"phase": "succeeded"}, ["the run has succeeded, although it has an error"]),
        ({"message": "no room"}, ["the run has failed with another error: no room"]),
        ({"clusters": 3}, ["3 clusters were made, not 1"]),
        ({"left_behind": ("Pod a",)}, ["left behind: Pod a"]),
    ],
)
def test_a_final_error_costs_one_cluster(changes: Object, words: list[str]) -> None:
    report = final_report(**changes)
    assert missed_by(report, FINAL_ERRORS["final-config"]) == tuple(words)
    assert replace(report, missed=words).is_passed == (not words)
    assert json.loads(json.dumps(report.to_json()))["held_s"] == 91.0


@pytest.mark.parametrize("name", FINAL_ERRORS)
def test_a_run_file_may_have_the_error_of_each_final_drill(name: str) -> None:
    settings = [*SETTINGS, *FINAL_ERRORS[name].settings]
    plan = plan_run(load_run(DIGITS, settings, workers="1"), load_platform(None), "team")
    assert isinstance(plan.trainer, TrainerConfig)
    if name == "final-nan":
        assert plan.trainer.train.optimizer.learning_rate == 1e30


def test_the_table_of_faults_has_a_section_for_final_errors() -> None:
    result = {"fault": "a wrong path"} | final_report().to_json()
    page = fault_table.page({"final-config": result})
    assert "| `final-config` | a wrong path | 1 | 3 | 91 s | 42 s |" in page
    assert fault_table.FINAL_HEAD not in fault_table.page({})


def test_the_list_of_drills_has_the_final_errors(capsys: pytest.CaptureFixture[str]) -> None:
    drill_command(list_all=True, as_json=True)
    rows = json.loads(capsys.readouterr().out)
    assert {row["scenario"] for row in rows} == {*SCENARIOS, *FINAL_ERRORS}
