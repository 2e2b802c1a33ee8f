"""The same from Python as on the command line: equal runs, equal objects, and results from a run's folder."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_cluster import FakeCluster, LocalProcess
from stand_in import stand_in_for_trainer

import trainyard
from trainyard import Run, load_run, plan_run, render_run, submit_run, train_run, watch_run
from trainyard.__main__ import run as run_command
from trainyard.cli.options import yaml_text
from trainyard.errors import ConfigError, LauncherError, RunFailed
from trainyard.local import training
from trainyard.local.results import KeptCheckpoint, Result
from trainyard.platform import Platform
from trainyard.run import OnThisMachine
from trainyard.submission.status import RunStatus
from trainyard_trainer.run_files.record_text import GOODPUT_PARTS

Object = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "examples/digits.yaml"
PAGE = ROOT / "docs/guides/python.md"

PLATFORM_TEXT = (ROOT / "launcher/trainyard/platform.yaml").read_text()
STORAGE = "/mnt/trainyard"
"""Where the packaged platform's pods see the folders of runs."""


class LaptopCluster(FakeCluster):
    """A cluster in memory with a platform, whose pods run the trainer's programs here, on a folder of
    this machine; `ends` is what becomes of a RayJob that is created."""

    def __init__(self, storage: Path, ends: str = "SUCCEEDED") -> None:
        super().__init__()
        self.storage = storage
        self.ends = {"SUCCEEDED": "Complete", "STOPPED": "Complete", "FAILED": "Failed"}[ends], ends
        config_map = {"metadata": {}, "data": {"platform.yaml": PLATFORM_TEXT}}
        self.objects["ConfigMap", "trainyard-platform"] = config_map

    def create(self, body: Object, *, dry_run: bool = False) -> Object:
        stored = super().create(body, dry_run=dry_run)
        if body["kind"] == "RayJob":
            stored["status"] = {"rayClusterName": f"{body['metadata']['name']}-abc"}
            self.script = [("Running", "RUNNING"), self.ends]
        else:
            state: Object = {"running": {}}
            stored["status"] = {"containerStatuses": [{"name": "reader", "state": state}]}
        return stored

    def execute(
        self, pod: str, container: str, command: Sequence[str], *, stdin: bool = False
    ) -> LocalProcess:
        here = [str(self.storage) if word == STORAGE else word for word in command[1:]]
        self.commands.append((pod, *here))
        return LocalProcess([sys.executable, *here])


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LaptopCluster:
    """The cluster that is in use."""
    made = LaptopCluster(tmp_path / "runs")
    monkeypatch.setattr("trainyard.cluster.cluster.Cluster", lambda namespace, context=None: made)
    return made


# Imports.


def test_the_package_alone_imports_nothing() -> None:
    script = (
        "import sys; before = set(sys.modules); import trainyard; dir(trainyard); "
        "sys.exit(sorted(set(sys.modules) - before - {'trainyard', '__future__'}) or 0)"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("from trainyard import Run", "kubernetes pydantic yaml jinja2 typer rich"),
        (
            "from trainyard import load_run, plan_run",
            "kubernetes typer rich torch ray pandas jinja2 jsonschema",
        ),
        ("from trainyard.cli.show import say, table", "kubernetes pydantic yaml rich"),
        ("from trainyard.cluster.cluster import Cluster", "kubernetes google jsonschema rich"),
    ],
)
def test_what_is_not_asked_for_is_not_imported(statement: str, heavy: str) -> None:
    script = (
        f"{statement}\nimport sys; sys.exit(sorted({set(heavy.split())} & sys.modules.keys()) or 0)"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_a_program_that_imports_the_client_of_kubernetes_after_us_gets_all_of_it() -> None:
    script = (
        "from trainyard.cluster.connection import ApiException; import kubernetes; "
        "kubernetes.config.load_kube_config, kubernetes.stream.stream, kubernetes.watch.Watch; "
        "assert kubernetes.client.ApiException is ApiException"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_the_names_of_the_package_are_those_it_offers() -> None:
    assert set(trainyard.__all__) <= set(dir(trainyard))
    assert all(getattr(trainyard, name).__doc__ for name in trainyard.__all__)
    with pytest.raises(AttributeError, match="no attribute 'submit_runs'"):
        _ = trainyard.submit_runs  # type: ignore[attr-defined]


# Runs.


def test_a_mapping_is_the_same_run_as_its_file() -> None:
    document = yaml.safe_load(DIGITS.read_text())
    before = json.dumps(document)
    changes: Any = {"settings": ["train.seed=7"], "gpus": 16, "name": "mine"}
    assert load_run(document, **changes) == load_run(DIGITS, **changes)
    assert load_run(str(DIGITS)) == load_run(document)
    assert json.dumps(document) == before


@pytest.mark.parametrize(
    ("given", "ends"), [({"gpus": 16}, (16, 16)), ({"gpus": "8:16"}, (8, 16)), ({"workers": 3}, (3, 3))]
)  # fmt: skip
def test_resources_are_numbers_or_what_the_command_line_takes(
    given: Any, ends: tuple[int, int]
) -> None:
    assert load_run(DIGITS, **given).resources.bounds == ends


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trian": {}}, "trian: unknown key; did you mean train?"),
        ({"resources": {"workers": "8"}}, "workers = '8': must be a valid integer"),
        ({"name": "Digits"}, "name = 'Digits': must be at most 38 characters"),
        (
            {"image": Path("a:1")},
            "image: is a PosixPath, which JSON cannot represent",
        ),
        ({"data": {"source": "digits", 1: 2}}, "data.1: the key must be text"),
        ({"resources": 2}, "resources = 2: must be a mapping"),
        (
            {"queue": ({"token": "ghp_" + "a1B2c3D4e5F6" * 3},)},  # a tuple hides nothing
            "the mapping has a plain credential",
        ),
    ],
)
def test_a_mapping_is_taken_as_strictly_as_a_file(changes: Object, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_run(yaml.safe_load(DIGITS.read_text()) | changes)
    assert message in str(raised.value)


def test_code_of_a_mapping_counts_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/loop.py").write_text("def train(config): ...")
    monkeypatch.chdir(tmp_path)
    document = {"name": "own", "resources": {"workers": 2}, "code": "src", "function": "loop:train"}
    plan = plan_run(load_run(document))
    assert plan.code is not None


# Plans and objects.


@pytest.mark.parametrize("example", ["digits", "command"])
def test_a_rendered_run_is_byte_for_byte_what_the_command_prints(example: str) -> None:
    file = f"examples/{example}.yaml"
    command = [sys.executable, "-m", "trainyard", "render", file, "-n", "team"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert yaml_text(render_run(load_run(ROOT / file), namespace="team")) == printed


def test_a_platform_is_packaged_a_file_itself_or_the_cluster_s(
    cluster: LaptopCluster, platform: Platform, tmp_path: Path
) -> None:
    run = load_run(DIGITS, gpus=16)
    file = tmp_path / "platform.yaml"
    file.write_text(PLATFORM_TEXT.replace(platform.image, "registry/mine:1"))
    jobs = [render_run(run, which) for which in (None, platform, "cluster", file, str(file))]
    assert jobs[0] == jobs[1] == jobs[2]
    assert jobs[3] == jobs[4] == render_run(run.model_copy(update={"image": "registry/mine:1"}))
    assert plan_run(run).nodes == 2
    assert cluster.calls == []


def test_what_may_fail_later_is_warned_of() -> None:
    run = load_run(DIGITS, ["image=rayproject/ray:2.54.0"])
    with pytest.warns(UserWarning, match=r"image of the head, 2\.54\.0") as warned:
        render_run(run)
    assert warned[0].filename == __file__


@pytest.mark.parametrize(
    "call",
    [
        lambda run: plan_run(run, namespace="Team A"),
        lambda run: render_run(run, namespace="Team A"),
        lambda run: submit_run(run, "Team A"),
        lambda run: Run("digits", namespace="Team A"),
    ],
)
def test_a_namespace_that_cannot_be_is_refused(call: Callable[[Any], Any]) -> None:
    with pytest.raises(ConfigError, match="namespace = 'Team A': must be at most 63"):
        call(load_run(DIGITS))


# Runs on a cluster.


def created(cluster: FakeCluster, kind: str = "RayJob") -> list[str]:
    return [name for verb, its_kind, name in cluster.calls if (verb, its_kind) == ("create", kind)]


def test_submitting_twice_changes_nothing_and_what_ended_goes_on(cluster: LaptopCluster) -> None:
    run = load_run(DIGITS)
    submitted = submit_run(run, "team")
    assert repr(submitted) == "Run('digits', namespace='team')"
    assert created(cluster) == [render_run(run, namespace="team")["metadata"]["name"]]
    submit_run(run, "team")
    assert len(created(cluster)) == 1
    assert [run_status.phase for run_status in watch_run("digits", "team")][-1] == "succeeded"
    submit_run(run, "team")
    assert len(created(cluster)) == 2


def test_a_fresh_run_sets_its_old_folder_aside(cluster: LaptopCluster, tmp_path: Path) -> None:
    made_run(tmp_path / "runs/digits")
    submit_run(load_run(DIGITS), "team")
    assert (tmp_path / "runs/digits/summary.json").exists()
    for _ in watch_run("digits", "team"):
        pass
    submit_run(load_run(DIGITS), "team", fresh=True)
    assert not (tmp_path / "runs/digits/summary.json").exists()


def test_wide_status_shows_where_and_with_what_a_run_has_run(
    cluster: LaptopCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    goodput = dict.fromkeys(GOODPUT_PARTS, 0.0) | {
        "total_s": 100.0,
        "steps_s": 75.0,
        "starts_s": 25.0,
    }
    goodput["starts"] = {"imports": 5.0, "workers": 20.0}
    made_run(tmp_path / "runs/digits", outcome="failed", error="no luck", goodput=goodput)
    submit_run(load_run(DIGITS), "team")
    for _ in watch_run("digits", "team"):
        pass
    gpus = [{"model": "H100", "id": "GPU-1"}]
    attempt = {
        "attempt": 1,
        "began": "2026-01-01T00:00:00+00:00",
        "ended": "2026-01-01T01:00:00+00:00",
        "image": "trainyard:1",
        "image_digests": ["sha256:0123456789abcdef"],
        "code_sha256": None,
        "git": {"revision": "fedcba9876543210", "is_dirty": False},
        "nodes": [{"name": "pod-a", "id": "0a", "gpus": gpus, "gpu_driver": "550"}],
        "gpu_hours": 1.0,
        "cpu_hours": 8.0,
    }
    (tmp_path / "runs/digits/run.json").write_text(json.dumps({"record": [attempt]}))
    command = ["status", "digits", "-n", "team"]
    assert run_command([*command, "-o", "wide"]) == 0
    printed = capsys.readouterr().out
    for shown in ("pod-a", "1 x H100", "trainyard:1 (0123456789ab)", "fedcba987654"):
        assert shown in printed
    rows = [" ".join(line.split()) for line in printed.splitlines()]
    for row in ("steps that were kept 75.0 75.0%", "starts 25.0 25.0%", "- imports 5.0 5.0%"):
        assert row in rows
    assert not any(row.startswith("validation") for row in rows)
    assert run_command(command) == 0
    assert "pod-a" not in capsys.readouterr().out


def test_large_code_is_in_the_folder_before_its_rayjob_is_created(
    cluster: LaptopCluster, tmp_path: Path
) -> None:
    (tmp_path / "src").mkdir()
    document = {"name": "own", "resources": {"workers": 2}, "command": ["true"]}
    document |= {"code": str(tmp_path / "src")}

    def submit(noise: int, *, fresh: bool = False) -> list[str]:
        """Sent twice, which changes nothing: the archives in the folder, and how often one was put there."""
        (tmp_path / "src/noise").write_bytes(random.Random(noise).randbytes(100_000))
        cluster.commands.clear()
        run = submit_run(load_run(document), "team", fresh=fresh)
        assert cluster.calls[-1][:2] == ("create", "RayJob")
        submit_run(load_run(document), "team")
        assert [run_status.phase for run_status in watch_run(run)][-1] == "succeeded"
        (job,) = (key for key in cluster.objects if key[0] == "RayJob")
        del cluster.objects[job]
        put = [word for command in cluster.commands for word in command if word == "--put"]
        folder = tmp_path / "runs/own/code"
        for file in folder.iterdir():
            assert file.name == f"{hashlib.sha256(file.read_bytes()).hexdigest()}.tar.gz"
        return [*sorted(file.name for file in folder.iterdir()), *put]

    one = submit(1)
    assert len(one) == 2
    assert submit(1) == one[:1]  # what lies there is not sent again
    assert len(submit(2)) == 3  # the old one goes when a driver has taken the run over
    write(tmp_path / "runs/own/run.json", "{}")
    assert len(submit(3, fresh=True)) == 4
    assert (tmp_path / "runs/own-old-1/code" / one[0]).exists()
    assert [name for kind, name in cluster.objects if kind == "Pod"] == []


@pytest.mark.slow
def test_large_code_runs_on_this_machine_from_the_run_s_folder(tmp_path: Path) -> None:
    noise = random.Random(3).randbytes(300_000)
    write(
        tmp_path / "src/main.py", "import sys; sys.exit(len(open('noise', 'rb').read()) != 300_000)"
    )
    (tmp_path / "src/noise").write_bytes(noise)
    document = {"name": "own", "resources": {"workers": 1}, "command": ["python", "main.py"]}
    run = train_run(load_run(document | {"code": str(tmp_path / "src")}), tmp_path / "runs")
    assert run.result().summary["outcome"] == "succeeded"
    (archive,) = (tmp_path / "runs/own/code").iterdir()
    assert archive.name == f"{hashlib.sha256(archive.read_bytes()).hexdigest()}.tar.gz"


def test_a_run_is_watched_to_its_end(cluster: LaptopCluster) -> None:
    run = submit_run(load_run(DIGITS), "team")
    phases = [run_status.phase for run_status in watch_run(run)]
    assert phases == ["accepted", "running", "succeeded"]


def test_a_run_that_nobody_knows_is_named(cluster: LaptopCluster) -> None:
    for ask in (Run("none").status, Run("none").result, lambda: list(watch_run("none"))):
        with pytest.raises(ConfigError, match="there is no run none in namespace"):
            ask()


def test_a_failed_run_raises_what_explain_says(cluster: LaptopCluster) -> None:
    cluster.ends = ("Failed", "FAILED")
    run = submit_run(load_run(DIGITS), "team")
    cluster.objects["RayJob", created(cluster)[0]]["status"].update(
        reason="AppFailed", message="error: the program ended with exit code 7"
    )
    with pytest.raises(RunFailed, match="run digits failed") as raised:
        run.result()
    assert "exit code 7" in str(raised.value)
    assert "`trainyard explain digits -n team`" in str(raised.value)


def test_a_stopped_run_has_no_result(cluster: LaptopCluster) -> None:
    cluster.ends = ("Complete", "STOPPED")
    with pytest.raises(RunFailed, match="was stopped"):
        submit_run(load_run(DIGITS), "team").result()


# Results.

LAST, BEST = "s000000002816-a2.1", "s000000001408-a1.1"


def made_run(folder: Path, **summary: Any) -> None:
    """A run's folder after two epochs, the second of them trained twice; its best one is the first."""
    told = {"name": folder.name, "outcome": "succeeded", "error": None, "attempts": 2} | summary
    told |= {"epochs": 2, "best_epoch": 1, "steps": 44}
    lines = [
        {"kind": "interval", "epoch": 1, "step": 12, "samples": 768, "loss": 1.0, "attempt": 1},
        {"kind": "epoch", "epoch": 1, "step": 22, "samples": 1408, "val_accuracy": 0.9, "attempt": 1},
        {"kind": "epoch", "epoch": 2, "step": 44, "samples": 2816, "val_accuracy": 0.7, "attempt": 1},
        {"kind": "epoch", "epoch": 2, "step": 44, "samples": 2816, "val_accuracy": 0.8, "attempt": 2},
    ]  # fmt: skip
    for name in (BEST, "s000000002816-a1.10", LAST):
        write(folder / f"checkpoints/{name}/manifest.json", "{}")
    write(folder / "checkpoints/s000000002816-a3.1/model.pt", "never committed")
    write(folder / "summary.json", json.dumps(told))
    write(folder / "progress.json", json.dumps({"percent": 100.0}))
    write(folder / "metrics.jsonl", "".join(f"{json.dumps(line)}\n" for line in lines) + '{"cut')


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture(params=["this machine", "cluster"])
def result(request: pytest.FixtureRequest, cluster: LaptopCluster, tmp_path: Path) -> Result:
    """Of a made run."""
    made_run(tmp_path / "runs/digits")
    if request.param == "cluster":
        return submit_run(load_run(DIGITS), "team").result()
    return Run("digits", storage=tmp_path / "runs").result()


def test_a_result_is_the_same_wherever_the_run_was_trained(result: Result, tmp_path: Path) -> None:
    assert result.path in (str(tmp_path / "runs/digits"), f"{STORAGE}/digits")
    assert (result.metrics["epoch"], result.metrics["val_accuracy"]) == (2, 0.8)
    assert result.last_checkpoint is not None
    assert (result.last_checkpoint.name, result.last_checkpoint.step) == (LAST, 44)
    assert result.best_checkpoint is not None
    assert result.best_checkpoint.name == BEST
    assert result.best_checkpoint.metrics["val_accuracy"] == 0.9
    assert len(result.records) == 4
    (manifest,) = result.download(tmp_path / "here", result.best_checkpoint.path)
    assert manifest == tmp_path / "here/manifest.json"
    with pytest.raises(ConfigError, match=r"run digits has no model\.pt"):
        result.download(tmp_path / "model.pt")


def test_all_that_was_reported_is_a_data_frame(tmp_path: Path) -> None:
    made_run(tmp_path / "digits")
    frame = Run("digits", storage=tmp_path).result().metrics_dataframe
    assert list(frame[frame.kind == "epoch"].attempt) == [1, 1, 2]
    assert frame.val_accuracy.isna().sum() == 1


def test_without_pandas_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_run(tmp_path / "digits")
    result = Run("digits", storage=tmp_path).result()
    monkeypatch.setattr("trainyard.local.tools.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="not installed: pandas") as raised:
        _ = result.metrics_dataframe
    assert "trainyard[train]" in str(raised.value)


def test_code_of_one_s_own_has_what_it_reported_to_ray_train(tmp_path: Path) -> None:
    told = {"outcome": "succeeded", "attempts": 1, "error": None, "metrics": {"loss": 0.3}}
    latest = {"checkpoint_dir_name": "checkpoint_1", "metrics": {"loss": 0.3}}
    write(tmp_path / "own/summary.json", json.dumps(told))
    write(
        tmp_path / "own/metrics.jsonl", '{"attempt": 1, "reports": 1, "metrics": {"loss": 0.3}}\n'
    )
    write(
        tmp_path / "own/checkpoint_manager_snapshot.json",
        json.dumps({"latest_checkpoint_result": latest}),
    )
    write(tmp_path / "own/checkpoint_1/state.pt", "weights")
    result = Run("own", storage=tmp_path).result()
    assert result.metrics == {"loss": 0.3}
    assert result.metrics_dataframe.to_dict("records") == [{"loss": 0.3, "attempt": 1}]
    assert result.best_checkpoint is None
    assert result.last_checkpoint == KeptCheckpoint(
        name="checkpoint_1", path="checkpoint_1", step=None, metrics={"loss": 0.3}
    )
    assert [path.name for path in result.download(tmp_path / "here", "checkpoint_1")] == [
        "state.pt"
    ]


# Runs of this machine.


@pytest.mark.parametrize(
    ("files", "beat_age_s", "phase"),
    [
        ({"lease/a1.json": "{}", "lease/a1.beat": "1"}, 0, "running"),
        ({"lease/a1.json": "{}", "lease/a1.beat": "1"}, 60, "stopped"),
        ({"lease/a1.json": "{}", "lease/a1.beat": "1", "lease/a1.ended": ""}, 0, "stopped"),
        (
            {"summary.json": '{"outcome": "succeeded", "attempts": 1, "error": null}'},
            0,
            "succeeded",
        ),
        ({"summary.json": '{"outcome": "failed", "attempts": 1, "error": "no room"}'}, 0, "failed"),
        (
            {"summary.json": '{"outcome": "stopped", "attempts": 1, "error": "at its limit"}'},
            0,
            "stopped",
        ),
        ({"run.json": "{}"}, 0, "stopped"),
    ],
)
def test_a_run_of_this_machine_stands_as_its_folder_says(
    tmp_path: Path, files: dict[str, str], beat_age_s: float, phase: str
) -> None:
    for name, text in files.items():
        write(tmp_path / "digits" / name, text)
    for beat in tmp_path.rglob("*.beat"):
        os.utime(beat, (time.time() - beat_age_s,) * 2)
    run = Run("digits", storage=tmp_path)
    assert run.status().phase == phase
    if phase in ("failed", "stopped"):
        with pytest.raises(RunFailed, match=r"no room|at its limit|resumes from its last"):
            run.result()


def test_a_run_of_this_machine_is_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "digits"
    write(folder / "lease/a1.json", "{}")
    write(folder / "lease/a1.beat", "1")
    write(folder / "progress.json", '{"percent": 5}')
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            made_run(folder)

    statuses = list(OnThisMachine(tmp_path, "digits").statuses(sleep))
    assert [(run_status.phase, run_status.progress) for run_status in statuses] == [
        ("running", {"percent": 5}),
        ("succeeded", {"percent": 100.0}),
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Run("none", storage=ROOT / "tests").status(), "Runs there: "),
        (lambda: Run("digits", storage="s3://bucket/runs"), "must be a folder of this machine"),
        (lambda: Run("digits", storage="runs", namespace="team"), "has both namespace = team and"),
        (lambda: Run("Digits", storage="runs"), "name = 'Digits': must be at most 38"),
    ],
)
def test_a_run_that_cannot_be_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make()
    assert message in str(raised.value)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that is run in place of the trainer."""
    monkeypatch.setattr(training, "NEEDED", ())
    monkeypatch.chdir(tmp_path)
    return stand_in_for_trainer(tmp_path, monkeypatch)


def test_training_here_gives_a_run_and_tells_how_it_stands(program: Path, tmp_path: Path) -> None:
    program.write_text("print('hello'); print('progress {\"percent\": 5}')")
    heard: list[RunStatus | str] = []
    run = train_run(load_run(DIGITS), on_status=heard.append)
    assert repr(run) == f"Run('digits', storage='{tmp_path}/runs')"
    assert [
        run_status if isinstance(run_status, str) else run_status.progress for run_status in heard
    ] == [
        None,
        "hello",
        {"percent": 5},
    ]


def test_a_pipeline_may_train_in_a_thread_of_its_own(program: Path) -> None:
    program.write_text("import sys; print('error: no room', file=sys.stderr); sys.exit(1)")
    raised: list[LauncherError] = []

    def train() -> None:
        try:
            train_run(load_run(DIGITS))
        except LauncherError as error:
            raised.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert isinstance(raised[0], RunFailed)
    assert "no room" in str(raised[0])


# Models.


def made_model(storage: Path) -> None:
    """The same, with a small model that the run has delivered."""
    from tests.trainer.saved_run import save, weights_of
    from trainyard_trainer.checkpointing.checkpoint import (
        Checkpoints,
    )
    from trainyard_trainer.recipes.saved_model import deliver
    from trainyard_trainer.run_folder.folder import RunFolder

    made_run(storage / "digits")
    folder = RunFolder.open(str(storage), "digits")
    name = save(folder, 9, weights=weights_of(1))
    deliver(folder, Checkpoints(folder), Checkpoints(folder).read_manifest(name))


@pytest.fixture
def delivered(cluster: LaptopCluster, tmp_path: Path) -> Result:
    """The result, read from a cluster, of a run whose folder has a model."""
    made_model(tmp_path / "runs")
    return submit_run(load_run(DIGITS), "team").result()


def test_arrays_and_files_get_the_labels_that_validation_gives(
    delivered: Result, cluster: LaptopCluster, tmp_path: Path
) -> None:
    import numpy as np
    import torch
    from PIL import Image

    from tests.trainer.saved_run import IMAGES
    from trainyard_trainer.recipes.image_classification.on_device import ToInput

    pixels = np.random.default_rng(0).integers(0, 256, (5, 8, 8), dtype=np.uint8)
    Image.fromarray(pixels[4]).save(tmp_path / "last.png")
    with torch.inference_mode():
        inputs = ToInput(IMAGES, 16, torch.device("cpu"))(torch.from_numpy(pixels[:, None]))
        sure, labels = delivered.model()(inputs).softmax(dim=1).max(dim=1)
    readers = created(cluster, "Pod")
    told = delivered.predict([*pixels[:3], pixels[3][..., None], tmp_path / "last.png"])
    assert [each.label for each in told] == [IMAGES.classes[label] for label in labels.tolist()]
    assert [each.confidence for each in told] == pytest.approx(sure.tolist(), abs=1e-5)
    assert len(delivered.predict(pixels, top=2)[0].top) == 2
    assert delivered.predict([]) == []
    assert created(cluster, "Pod") == readers  # the model is copied once


def test_images_that_cannot_be_used_are_told(delivered: Result, tmp_path: Path) -> None:
    import numpy as np

    for image, message in [
        (np.zeros((8, 8)), r"image 0 has an unsupported type: float64 \(8, 8\)"),
        (np.zeros((3, 8, 8), np.uint8), r"image 0 has an unsupported type: uint8 \(3, 8, 8\)"),
        (7, "image 0 has an unsupported type: int"),
        (tmp_path / "none.png", "1 of 1 files cannot be used"),
    ]:
        with pytest.raises(ConfigError, match=message):
            delivered.predict([image])
    with pytest.raises(ConfigError, match=r"Use predict\(\['a\.png'\]\)"):
        delivered.predict("a.png")


def test_a_run_without_a_model_and_a_damaged_one_are_told(
    delivered: Result, tmp_path: Path
) -> None:
    (tmp_path / "runs/digits/model.pt").write_bytes(b"no weights")
    with pytest.raises(RunFailed, match="holds no weights that may be loaded"):
        delivered.model()
    (tmp_path / "runs/digits/model.pt").unlink()
    with pytest.raises(ConfigError, match=r"run digits has no model\.pt"):
        delivered.predict([tmp_path / "a.png"])


def test_without_torch_the_extra_is_named(
    delivered: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = util.find_spec
    monkeypatch.setattr(
        "trainyard.local.tools.find_spec", lambda name: None if name == "torch" else spec(name)
    )
    with pytest.raises(ConfigError, match="not installed: torch") as raised:
        delivered.predict(["a.png"])
    assert "trainyard[train]" in str(raised.value)


# The guide.

TINY = {
    '"name": "resnet18"': '"name": "shufflenet_v2_x0_5", "image_size": 8',
    '"epochs": 3': '"epochs": 2',
    '"global_batch_size": 64': '"global_batch_size": 256',
}


@pytest.mark.parametrize(
    "trained", ["made", pytest.param("here", marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_each_block_of_the_guide_does_what_it_says(
    trained: str, cluster: LaptopCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def train_locally(config: Any, code: Any, source: Any) -> Iterator[RunStatus]:
        made_model(Path(config.storage.path))
        yield RunStatus(submission=config.name, phase="succeeded")

    if trained == "made":
        monkeypatch.setattr(training, "train_locally", train_locally)
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text()
    for said, tiny in TINY.items():
        assert said in text
        text = text.replace(said, tiny)
    blocks = re.findall(r"(?ms)^```python\n(.*?)^```", text)
    assert len(blocks) == text.count("```") // 2
    names: Object = {}
    for number, block in enumerate(blocks, start=1):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert names["result"].metrics["epoch"] == 2
    assert "2 nodes of 8 workers" in printed
    assert "did you mean epochs?" in printed
    assert (tmp_path / "digits.pt").exists()
