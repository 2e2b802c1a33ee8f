"""A submission once more, from what it left in its run's folder."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_cluster import FakeCluster, FakeProcess
from hypothesis import given
from random_runs import Made, plausible

from trainyard.cli.commands.cluster_runs.reproduce import reproduce
from trainyard.cli.options import yaml_text
from trainyard.errors import ConfigError
from trainyard.local.training import local_config
from trainyard.planning.merge import with_source
from trainyard.planning.objects import pack_code, run_objects
from trainyard.planning.plan import plan_run
from trainyard.planning.trainer_input import LAUNCH_KEYS
from trainyard.platform import Platform, load_platform
from trainyard.run_file.code.code_archive import pack
from trainyard.run_file.code.source import GitState
from trainyard.run_file.load import load_run
from trainyard.run_file.models import RUN_MODELS, RunConfig
from trainyard.run_file.validation import validate
from trainyard.submission.run_folder.reproduce import (
    changed_parts,
    code_of_archive,
    read_config,
    read_submission,
    renamed,
    render_again,
    run_file,
)
from trainyard_trainer.config.trainer_config import CONFIG_VARIABLE
from trainyard_trainer.run_files import names, submission
from trainyard_trainer.run_files.standing_cluster import driver_variables
from trainyard_trainer.run_files.submission import code_file
from trainyard_trainer.run_folder.submission import record_submission

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
DIGITS = ROOT / "examples/digits.yaml"
ON_DATA_NODES = ("data.loader=ray", "resources.data={nodes: 2}")


def rendered(run: RunConfig, platform: Platform) -> dict[str, Any]:
    return run_objects(run, platform, "team").job


def left_by(job: dict[str, Any]) -> str:
    """The submission.json that the driver of a RayJob writes."""
    folder = Kept()
    record_submission(folder, None, driver_variables(job))
    return str(folder.files[f"{folder.root}/{names.SUBMISSION}"])


class Kept:
    """A run's folder that only keeps."""

    root = "/runs/digits"

    def __init__(self, **files: str) -> None:
        self.files: dict[str, Any] = {f"{self.root}/{name}": text for name, text in files.items()}

    def write(self, path: str, data: bytes | str) -> None:
        self.files[path] = data

    def delete(self, path: str) -> None:
        self.files.pop(path, None)

    def file_names(self, path: str) -> list[str]:
        return [name.rpartition("/")[2] for name in self.files if name.startswith(f"{path}/")]


def again(job: dict[str, Any], run: RunConfig, platform: Platform) -> dict[str, Any]:
    """The same from what its driver would leave: a file, and the code as bytes."""
    kept = read_submission(left_by(job), "test")
    travelled = pack_code(run)
    code = None
    if kept.code_sha256 is not None:
        assert travelled is not None
        code = code_of_archive(travelled.archive, kept.code_sha256)
    return render_again(kept.run, code, platform, "team").job


@pytest.mark.parametrize(
    ("resources", "settings"),
    [
        ({"workers": "2"}, ()),
        ({"workers": "1:2"}, ON_DATA_NODES),
        ({"gpus": "16"}, ON_DATA_NODES),
        ({"gpus": "8:16"}, ()),
        ({"gpus": "4"}, ("image=mine:2", "checkpoint.every_s=null")),
        ({"gpus": "16"}, ("network.preset=efa", "network.devices_per_node=32")),
        ({"workers": "2"}, ("train.model.name='$(HOME)$'",)),
    ],
)
def test_on_the_same_platform_it_is_byte_for_byte_what_was_rendered(
    platform: Platform, resources: dict[str, str], settings: tuple[str, ...]
) -> None:
    run = load_run(DIGITS, settings, **resources)
    job = rendered(run, platform)
    assert yaml_text(again(job, run, platform)) == yaml_text(job)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_each_example_is_rendered_again_with_its_code(platform: Platform, example: Path) -> None:
    run = load_run(example)
    job = rendered(run, platform)
    assert yaml_text(again(job, run, platform)) == yaml_text(job)
    assert str(ROOT) not in yaml_text(job)  # a folder of this machine does not travel


@given(plausible())
def test_with_image_and_pools_as_they_were_chosen_the_plan_is_the_same(made: Made) -> None:
    document, platform = made
    try:
        run = validate(RUN_MODELS["train"], document, "run.yaml")
        plan = plan_run(run, platform, "team")
    except ConfigError:
        return
    settled = document | plan.launch
    assert plan_run(validate(RUN_MODELS["train"], settled, "settled"), platform, "team") == plan


def test_image_and_pools_stay_as_they_were_chosen(platform: Platform) -> None:
    run = load_run(DIGITS, ON_DATA_NODES, gpus="16")
    kept = read_submission(left_by(rendered(run, platform)), "test")
    assert kept.run.image == platform.image
    assert kept.run.resources.pool == "gpu"
    assert kept.run.resources.data is not None
    assert kept.run.resources.data.pool == "cpu"
    moved_on = platform.model_copy(update={"image": "other:2"})
    assert again(rendered(run, platform), run, moved_on) == rendered(run, platform)


@pytest.mark.parametrize(
    ("pool", "parts"),
    [
        ("gpu", ["head", "group gpu"]),  # the head is told how many CPUs a worker has
        ("cpu", []),
    ],
)
def test_another_platform_is_told_by_the_parts_that_it_changes(
    platform: Platform, platform_with: Any, pool: str, parts: list[str]
) -> None:
    job = rendered(load_run(DIGITS, gpus="16"), platform)
    kept = read_submission(left_by(job), "test")
    now = render_again(kept.run, None, platform_with(**{pool: {"cpus": 72}}), "team")
    told = list(changed_parts(kept.parts, now.parts))
    assert sorted(part.partition(" (")[0] for part in told) == sorted(parts)
    assert (now.job == job) == (parts == [])


def test_two_namespaces_of_one_platform_differ_in_the_namespace_and_the_name_alone(
    platform: Platform,
) -> None:
    one, other = (run_objects(load_run(DIGITS), platform, name).job for name in ("team", "other"))
    assert one["metadata"].pop("name") != other["metadata"].pop("name")
    assert one["metadata"].pop("namespace") != other["metadata"].pop("namespace")
    assert one == other


def test_parts_that_come_and_go_are_told_too() -> None:
    assert list(changed_parts({"a": "1", "b": "2"}, {"b": "3", "c": "4"})) == [
        "a (1 -> -)",
        "b (2 -> 3)",
        "c (- -> 4)",
    ]


def test_another_name_is_another_run(platform: Platform) -> None:
    run = load_run(DIGITS)
    kept = read_submission(left_by(rendered(run, platform)), "test")
    job = render_again(renamed(kept.run, "second"), None, platform, "team").job
    assert job == rendered(load_run(DIGITS, name="second"), platform)
    assert renamed(kept.run, None) == kept.run


def test_code_that_is_not_what_was_submitted_is_refused() -> None:
    code = pack(ROOT / "examples/byo")
    assert code_of_archive(code.archive, code.sha256) == code
    with pytest.raises(ConfigError, match="SHA-256"):
        code_of_archive(code.archive + b"x", code.sha256)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must hold a mapping"),
        ('{"config": {}, "launch": {}}', "parts: is required"),
        (
            '{"config": {"name": "x"}, "launch": {"resources": {"workers": 2, "gpu": 3}}, "parts": {}}',
            "resources.gpu: unknown key; did you mean gpus?",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_file(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_submission(text, "digits:submission.json")
    assert "digits:submission.json" in str(raised.value)
    assert message in str(raised.value)


def test_what_the_trainer_is_told_already_is_not_told_twice(platform: Platform) -> None:
    run = load_run(ROOT / "examples/command.yaml", gpus="16")
    environment = driver_variables(rendered(run, platform))
    told = json.loads(environment[submission.VARIABLE])
    assert told["launch"].keys() == LAUNCH_KEYS
    # The trainer's receiver of messages may be the platform's.
    assert told["launch"].keys() & json.loads(environment[CONFIG_VARIABLE]).keys() == {"notify"}
    assert len(environment[submission.VARIABLE]) < 2**10


def test_an_attempt_that_nobody_submitted_leaves_no_submission() -> None:
    folder = Kept(**{names.SUBMISSION: "{}"})
    record_submission(folder, None, {CONFIG_VARIABLE: "{}"})
    assert folder.files == {}


@pytest.mark.parametrize(("sha256", "left"), [("b", ["code/b.tar.gz"]), (None, [])])
def test_code_that_the_last_submission_does_not_need_goes(
    sha256: str | None, left: list[str]
) -> None:
    folder = Kept(**{submission.code_file(each): "" for each in "abc"})
    record_submission(folder, sha256, {CONFIG_VARIABLE: "{}"})
    assert [path.removeprefix(f"{folder.root}/") for path in folder.files] == left


# The command, on a cluster.


def sent(name: str, content: bytes) -> FakeProcess:
    """What the folder's program says when it sends a file."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w|") as tar:
        entry = tarfile.TarInfo(name)
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    whole = packed.getvalue()
    return FakeProcess(whole, f"sha256 {hashlib.sha256(whole).hexdigest()} {len(whole)}\n")


MISSING = FakeProcess(errors="no such file", exit_code=4)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """A cluster with the packaged platform and the head of a run that goes on."""
    cluster = FakeCluster()
    text = (ROOT / "launcher/trainyard/platform.yaml").read_text()
    cluster.objects["ConfigMap", "trainyard-platform"] = {"data": {"platform.yaml": text}}
    for run in ("digits", "own"):
        cluster.add_job(f"{run}-0", status="SUCCEEDED", run=run)
        cluster.add_head(f"{run}-0-abc", "")
    monkeypatch.setattr(
        "trainyard.cluster.cluster.Cluster", lambda namespace, context=None: cluster
    )
    return cluster


@pytest.mark.parametrize("example", ["digits", "command"])
def test_the_command_prints_what_render_printed(
    cluster: FakeCluster, platform: Platform, capsys: pytest.CaptureFixture[str], example: str
) -> None:
    run = load_run(ROOT / f"examples/{example}.yaml")
    job = rendered(run, platform)
    cluster.processes = [sent("submission.json", left_by(job).encode())]
    if (code := pack_code(run)) is not None:
        cluster.processes.append(sent("code.tar.gz", code.archive))
    reproduce(run.name, namespace="team")
    printed = capsys.readouterr()
    assert printed.out == yaml_text(job)
    assert f"it equals what was submitted: RayJob {job['metadata']['name']}" in printed.err
    assert f"run {run.name} resumes; --name NEW starts from the beginning" in printed.err


@pytest.mark.parametrize("new_name", [None, "second"])
def test_the_command_keeps_the_git_revision_of_what_was_submitted(
    cluster: FakeCluster,
    platform: Platform,
    capsys: pytest.CaptureFixture[str],
    new_name: str | None,
) -> None:
    source = GitState(revision="1" * 40, is_dirty=True)
    submitted = with_source(rendered(load_run(DIGITS), platform), source)
    cluster.processes = [sent("submission.json", left_by(submitted).encode())]
    reproduce("digits", namespace="team", new_name=new_name)
    printed = capsys.readouterr()
    run = load_run(DIGITS, name=new_name or "digits")
    assert printed.out == yaml_text(with_source(rendered(run, platform), source))


def test_large_code_is_under_its_own_name_alone_until_it_is_submitted_under_another(
    cluster: FakeCluster, platform: Platform, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "noise").write_bytes(random.Random(1).randbytes(100_000))
    run = load_run(ROOT / "examples/command.yaml", (f"code={tmp_path}",))
    job, code = rendered(run, platform), pack_code(run)
    assert code is not None
    for _ in range(2):
        cluster.processes.append(sent("submission.json", left_by(job).encode()))
        cluster.processes.append(sent("code.tar.gz", code.archive))
    reproduce("own", namespace="team")
    assert capsys.readouterr().out == yaml_text(job)
    with pytest.raises(ConfigError, match="Use `trainyard submit`, which uploads the code"):
        reproduce("own", namespace="team", new_name="second")


def test_with_another_platform_the_command_tells_what_differs(
    cluster: FakeCluster, platform: Platform, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job = rendered(load_run(DIGITS), platform)
    document = yaml.safe_load((ROOT / "launcher/trainyard/platform.yaml").read_text())
    document["job"]["ttlSecondsAfterFinished"] = 7
    file = tmp_path / "platform.yaml"
    file.write_text(yaml.safe_dump(document))
    cluster.processes = [sent("submission.json", left_by(job).encode())]
    reproduce("digits", namespace="team", platform_file=file, new_name="second")
    printed = capsys.readouterr()
    assert (
        "it differs from what was submitted: platform or launcher have changed since, in job ("
        in printed.err
    )
    now = yaml.safe_load(printed.out)
    assert now == rendered(load_run(DIGITS, name="second"), load_platform(file))
    assert now["metadata"]["name"].startswith("second-")


@pytest.mark.parametrize(
    ("files", "message"),
    [(b"run.json\n", "has left no submission.json"), (b"", "there is no run digits")],
)
def test_a_run_that_left_no_submission_is_told(
    cluster: FakeCluster, files: bytes, message: str
) -> None:
    cluster.processes = [MISSING, FakeProcess(files, exit_code=0 if files else 4)]
    with pytest.raises(ConfigError, match=message):
        reproduce("digits", namespace="team")


# The command, on this machine.


def left_locally(folder: Path, run: RunConfig) -> None:
    """What an attempt on this machine leaves of its start."""
    code = pack_code(run)
    place = folder / run.name
    place.mkdir(parents=True)
    config = local_config(run, folder, 4, code=code)
    (place / "run.json").write_text(config.model_dump_json(indent=2))
    if code is not None:
        file = place / code_file(code.sha256)
        file.parent.mkdir()
        file.write_bytes(code.archive)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_run_file_of_a_local_run_makes_the_same_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    example: Path,
) -> None:
    def kept(storage: str, endpoint: str | None, run: str, file: str) -> str | None:
        path = Path(storage, run, file)
        return path.read_text() if path.exists() else None

    monkeypatch.setattr("trainyard.cli.commands.cluster_runs.reproduce._kept", kept)
    run = load_run(example)
    left_locally(tmp_path, run)
    reproduce(run.name, storage=str(tmp_path))
    printed = capsys.readouterr()
    file = tmp_path / "again.yaml"
    file.write_text(printed.out)
    if pack_code(run) is not None:
        (told,) = [line for line in printed.err.splitlines() if line.startswith("its code: ")]
        subprocess.run(["sh", "-c", told.removeprefix("its code: ")], cwd=tmp_path, check=True)
    made = load_run(file)
    before, after = (local_config(each, tmp_path, 4, code=pack_code(each)) for each in (run, made))
    assert after == before


def test_a_run_file_is_made_of_a_folder_that_the_trainer_reads(tmp_path: Path) -> None:
    left_locally(tmp_path, load_run(DIGITS))
    command = [sys.executable, "-m", "trainyard", "reproduce", "digits", "--name", "second"]
    ended = subprocess.run(
        [*command, "--storage", str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert yaml.safe_load(ended.stdout)["name"] == "second"
    assert yaml.safe_load(ended.stdout)["resources"] == {"workers": 2}


@pytest.mark.parametrize("locale", [{}, {"LC_ALL": "POSIX", "PYTHONUTF8": "0"}], ids=["own", "C"])
def test_a_config_is_read_as_utf_8_and_a_damaged_one_is_refused_in_words(
    tmp_path: Path, locale: dict[str, str]
) -> None:
    run = load_run(DIGITS)
    run = run.model_copy(update={"data": run.data.model_copy(update={"source": "/größe-日本"})})
    left_locally(tmp_path, run)
    file = tmp_path / "digits" / "run.json"
    config = file.read_bytes()
    command = [sys.executable, "-m", "trainyard", "reproduce", "digits", "--storage", str(tmp_path)]
    environment = os.environ | {"PYTHONIOENCODING": "utf-8"} | locale
    ended = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert yaml.safe_load(ended.stdout.decode())["data"]["source"] == "/größe-日本"
    file.write_bytes(config.replace(b'"name"', b'"na\xff\xfe"', 1))
    ended = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith(b"error: digits/run.json")
    assert b"Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"submit": True}, "--storage excludes --submit and --platform"),
        ({"new_name": "No Name"}, "--name = 'No Name'"),
        ({}, "there is no run digits in"),
    ],
)
def test_what_cannot_be_reproduced_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr("trainyard.cli.commands.cluster_runs.reproduce._kept", lambda *where: None)
    with pytest.raises(ConfigError, match=message):
        reproduce("digits", storage=str(tmp_path), **options)


def test_an_elastic_run_keeps_its_range() -> None:
    config = {
        "name": "digits",
        "data": {"source": "digits"},
        "train": yaml.safe_load(DIGITS.read_text())["train"],
        "scaling": {"num_workers": 16, "min_workers": 8, "use_gpu": True},
    }
    kept = read_config(json.dumps(config), "digits/run.json")
    assert run_file(kept.run, None)["resources"] == {"gpus": {"min": 8, "max": 16}}
