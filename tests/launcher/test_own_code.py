"""A program of one's own: what a run file may say of it, and the code that travels with it."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import tarfile
from pathlib import Path

import pytest
import yaml

from trainyard.api import render_run
from trainyard.cli.commands.run_files.plan import render
from trainyard.cli.record_lines import log_line, progress_text, summary_text
from trainyard.errors import ConfigError
from trainyard.local.training import local_config
from trainyard.planning.comparison.run_diff import diff_jobs
from trainyard.planning.objects import pack_code, run_objects
from trainyard.planning.plan import plan_run
from trainyard.planning.reasons import explain_plan
from trainyard.platform import load_platform
from trainyard.run_file.code.code_archive import pack
from trainyard.run_file.load import load_run
from trainyard.run_file.models import CommandRun, RunConfig
from trainyard_trainer.config.trainer_config import (
    CODE_VARIABLE,
    CONFIG_VARIABLE,
    CommandConfig,
    FunctionConfig,
    read_config,
)
from trainyard_trainer.config.user_code import fill_command

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/command.yaml"
MINE = {"name": "mine", "resources": {"workers": 2}, "command": ["python", "train.py"]}


def write(path: Path, **changes: object) -> Path:
    path.write_text(yaml.safe_dump(MINE | changes))
    return path


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"command": ["python", "--n={worker}"]}, "{worker} is none of {workers}, {gpus}"),
        ({"command": []}, "at least 1 item"),
        ({"command": "python train.py"}, "command = 'python train.py'"),
        ({"command": ["python", 3]}, "command.1 = 3"),
        ({"train": {}}, "has train and command"),
        ({"data": {"source": "digits"}}, "data: unknown key"),
        ({"resources": {"workers": {"min": 1, "max": 2}}}, "resources.workers must be a number"),
        ({"resources": {"workers": 2, "data": {"nodes": 1}}}, "resources.data is for"),
        ({"faults": {"collective_timeout_s": 60.0}}, "faults.collective_timeout_s is for"),
        ({"faults": {"hang_timeout_s": 60.0}}, "faults.hang_timeout_s is for"),
        ({"faults": {"replace_workers": True}}, "faults.replace_workers is for"),
        ({"faults": {"keep_state": True}}, "faults.keep_state is for"),
    ],
)
def test_what_a_command_cannot_have_is_refused(
    tmp_path: Path, changes: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load_run(write(tmp_path / "run.yaml", **changes))
    assert problem in str(error.value)


def test_names_in_braces_are_filled_and_doubled_ones_are_text() -> None:
    values = {"workers": "2", "run": "mine"}
    command = ("--n={workers}", "{{epoch}}-{run}.pt", '{"a": {}}')
    assert fill_command(command, values) == ["--n=2", "{epoch}-mine.pt", '{"a": {}}']


def test_a_command_is_planned_without_a_batch() -> None:
    run = load_run(EXAMPLE, gpus="16")
    code, platform = pack_code(run), load_platform(None)
    plan = plan_run(run, platform, "team", code)
    rows = {row.name: row for row in explain_plan(plan, run, platform)}
    assert rows["command"].value == "once, on the head"
    assert rows["command"].why == "python ray_train.py --num-workers '{workers}' --epochs 3"
    assert code is not None
    assert rows["code"].value == code.sha256[:8]
    assert "batch per worker" not in rows
    with pytest.raises(ConfigError) as error:
        plan_run(load_run(EXAMPLE, gpus="17"), platform, "team")
    assert "Use 16 or 24 GPUs on pool gpu." in str(error.value)


def test_the_code_travels_in_one_variable_of_the_head_alone() -> None:
    run = load_run(EXAMPLE)
    job = run_objects(run, load_platform(None), "team").job
    shape = job["spec"]["rayClusterSpec"]
    (head,) = shape["headGroupSpec"]["template"]["spec"]["containers"]
    (variable,) = [one for one in head["env"] if one["name"] == CODE_VARIABLE]
    code = pack_code(run)
    assert code is not None
    assert variable["value"] == code.text
    assert CODE_VARIABLE not in str(shape["workerGroupSpecs"])
    assert job["spec"]["entrypoint"] == "python -I -u -m trainyard_trainer"


def test_changed_code_and_command_take_effect_at_the_next_attempt_and_a_recipe_is_refused(
    tmp_path: Path,
) -> None:
    platform = load_platform(None)
    folder_of(tmp_path / "src", main_py="print()")
    file = write(tmp_path / "run.yaml", code="src")
    before = run_objects(load_run(file), platform, "team").job
    folder_of(tmp_path / "src", main_py="print(1)")
    write(file, code="src", command=["python", "main.py"])
    after = run_objects(load_run(file), platform, "team").job
    assert {change.path: change.effect for change in diff_jobs(before, after, live=True)} == {
        "config.code_sha256": "next attempt",
        "config.command": "next attempt",
    }
    digits = load_run(ROOT / "examples/digits.yaml", name="mine")
    other = run_objects(digits, platform, "team").job
    assert "refused" in {change.effect for change in diff_jobs(before, other, live=False)}


def test_code_counts_from_the_run_file_s_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    run = load_run(write(tmp_path / "run.yaml", code="src"))
    assert isinstance(run, CommandRun)
    assert run.code == str(tmp_path / "src")
    with pytest.raises(ConfigError, match="the folder does not exist"):
        pack_code(run)


def test_a_command_on_this_machine_has_its_number_of_workers_and_no_other_way(
    tmp_path: Path,
) -> None:
    run = load_run(EXAMPLE)
    config = local_config(run, tmp_path, 4, code=pack_code(run))
    assert isinstance(config, CommandConfig)
    assert config.scaling.num_workers == 2
    with pytest.raises(ConfigError, match="for built-in recipes"):
        local_config(run, tmp_path, 4, "torchrun")


def test_its_end_is_told_with_its_folder() -> None:
    summary = {"outcome": "succeeded", "program": "python x.py", "run_s": 61, "folder": "/runs/x"}
    text = summary_text(summary | {"metrics": {"epoch": 3, "loss": 0.12345}})
    assert text == (
        "succeeded: python x.py ended well after 1:01 (epoch 3, loss 0.1235); folder /runs/x"
    )


def test_what_own_code_reports_is_its_progress() -> None:
    progress = {"attempt": 2, "reports": 7, "metrics": {"loss": 0.5, "note": "well"}}
    assert progress_text(progress) == "report 7  loss 0.5  note well  attempt 2"
    assert log_line(f"progress {json.dumps(progress)}") == progress_text(progress)


@pytest.mark.parametrize("function", ["train", "a b:c", "mod:", ":f", "../x:f"])
def test_a_function_is_a_module_and_a_name(tmp_path: Path, function: str) -> None:
    file = tmp_path / "run.yaml"
    mine = {key: value for key, value in MINE.items() if key != "command"}
    file.write_text(yaml.safe_dump(mine | {"function": function}))
    with pytest.raises(ConfigError, match="function = "):
        load_run(file)


def test_a_function_travels_with_what_it_is_called_with() -> None:
    run = load_run(ROOT / "examples/function.yaml", ["datasets.train=s3://b/train"], gpus="16")
    plan = plan_run(run, load_platform(None), "team", pack_code(run))
    config = read_config({CONFIG_VARIABLE: plan.trainer.model_dump_json()})
    assert config == plan.trainer
    assert isinstance(config, FunctionConfig)
    assert config.train_loop_config == {"epochs": 5, "learning_rate": 0.5}
    assert config.datasets == {"train": "s3://b/train"}


# The archive.


def folder_of(path: Path, **texts: str) -> Path:
    for name, text in texts.items():
        file = path / name.replace("__", "/").replace("_py", ".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return path


def names(text: str) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(text))) as archive:
        return archive.getnames()


def test_what_gitignore_names_stays_behind(tmp_path: Path) -> None:
    folder_of(tmp_path, main_py="", data__big="", data__keep="", deep__own_py="", deep__cache__x="")
    folder_of(tmp_path, __pycache____a="", deep__b_py="")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/config").write_text("")
    (tmp_path / ".gitignore").write_text("data/*\n!data/keep\ncache/\nown.py\n")
    (tmp_path / "deep/.gitignore").write_text("!own.py\nb.py\n")
    assert names(pack(tmp_path).text) == [
        *(".gitignore", "data/keep", "deep/.gitignore", "deep/own.py", "main.py")
    ]


def test_equal_code_is_an_equal_archive_whenever_it_was_written(tmp_path: Path) -> None:
    one = folder_of(tmp_path / "one", main_py="print()", lib__a_py="1")
    two = folder_of(tmp_path / "two", lib__a_py="1", main_py="print()")
    os.utime(two / "main.py", (0, 0))
    assert pack(one) == pack(two)
    (two / "main.py").chmod(0o755)
    assert pack(one) != pack(two)


def test_code_that_is_too_large_is_refused_with_what_is_large(tmp_path: Path) -> None:
    folder_of(tmp_path, main_py="print()")
    (tmp_path / "weights.bin").write_bytes(os.urandom(1_500_000))
    with pytest.raises(ConfigError) as error:
        pack(tmp_path, limit_mib=1)
    assert "its 2 files are more than 1 MiB packed" in str(error.value)
    assert "weights.bin (1.4 MiB), main.py (7 B)" in str(error.value)
    assert len(pack(tmp_path, limit_mib=None).archive) > 1_500_000  # as on this machine


def test_code_that_no_driver_would_unpack_is_refused_when_it_is_packed(tmp_path: Path) -> None:
    folder_of(tmp_path, main_py="print()")
    with (tmp_path / "zeros.bin").open("wb") as file:
        file.truncate(65 * 2**20)
    with pytest.raises(
        ConfigError, match=r"are 65.0 MiB, more than the limit of 64.0 MiB for an archive of"
    ):
        pack(tmp_path)


# Code that is too large for a variable.


def large_run(folder: Path, size: int = 100_000) -> RunConfig:
    folder_of(folder / "src", main_py="print()")
    (folder / "src/weights.bin").write_bytes(random.Random(size).randbytes(size))
    return load_run(write(folder / "run.yaml", code="src"))


def test_large_code_is_in_the_rayjob_by_its_sum_alone(tmp_path: Path) -> None:
    platform = load_platform(None)
    objects = run_objects(large_run(tmp_path), platform, "team")
    plan, job = objects.plan, objects.job
    assert plan.code is not None
    assert plan.code.is_uploaded
    assert CODE_VARIABLE not in str(job)
    assert plan.code.sha256 in str(job)
    assert run_objects(large_run(tmp_path), platform, "team").job == job
    other = run_objects(large_run(tmp_path, 100_001), platform, "team").job
    assert other["metadata"]["name"] != job["metadata"]["name"]
    (row,) = [
        row for row in explain_plan(plan, large_run(tmp_path), platform) if row.name == "code"
    ]
    assert (
        row.why
        == "131 KiB of packed text, more than the 96 KiB that a RayJob may hold: `submit` uploads the "
        "code to the run's folder"
    )


def test_large_code_is_not_rendered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large_run(tmp_path)
    with pytest.raises(ConfigError) as error:
        render(tmp_path / "run.yaml")
    assert "its 2 files are 131 KiB in base64, more than the limit of 96 KiB in a RayJob" in str(
        error.value
    )
    assert "The largest files: weights.bin (98 KiB), main.py (7 B)." in str(error.value)
    assert "Use `trainyard submit`, which uploads the code" in str(error.value)
    assert capsys.readouterr().out == ""
    with pytest.raises(ConfigError, match="96 KiB in a RayJob"):
        render_run(load_run(tmp_path / "run.yaml"))


# What an archive holds.


def test_a_link_is_refused_unless_it_stays_behind(tmp_path: Path) -> None:
    folder_of(tmp_path, main_py="")
    (tmp_path / "link").symlink_to("/etc")
    with pytest.raises(ConfigError, match="link is a symbolic link"):
        pack(tmp_path)
    (tmp_path / ".gitignore").write_text("link\n")
    assert names(pack(tmp_path).text) == [".gitignore", "main.py"]


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe is a special file, which cannot be packed"):
        pack(tmp_path)


def test_a_folder_that_cannot_be_read_is_not_left_out_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_of(tmp_path, main_py="", deep__own_py="")
    scandir = os.scandir

    def refusing(place: str) -> object:  # rights would not keep root out
        if Path(place).name == "deep":
            raise PermissionError(13, "Permission denied", place)
        return scandir(place)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(ConfigError, match=r"cannot be read: .*deep"):
        pack(tmp_path)


def test_an_empty_folder_is_no_code(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no files to pack"):
        pack(tmp_path)
