"""The command line as a user types it: data on standard output, two or three lines on an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from trainyard.planning.merge import merge
from trainyard.planning.plan import plan_run
from trainyard.planning.render import render_job
from trainyard.platform import load_platform
from trainyard.run_file.load import load_run

ROOT = Path(__file__).resolve().parents[2]
DIGITS = "examples/digits.yaml"


def trainyard(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trainyard", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["plan", DIGITS, "--gpus", "0"], 2, "resources.gpus = 0"),
        (["plan", DIGITS, "--gpus", "-1"], 2, "resources.gpus = -1"),
        (["plan", DIGITS, "--gpus", "many"], 2, "resources.gpus = 'many'"),
        (["render", DIGITS, "--gpus", "12"], 2, "Use 8 or 16"),
        (["render", DIGITS, "--set", "train.epoch=3"], 2, "did you mean epochs?"),
        (["render", DIGITS, "--name", "Digits"], 2, "at most 38 characters"),
        (["render", DIGITS, "--set", "image=trainyard"], 2, "must have a tag"),
        (["render", "none.yaml"], 2, "cannot read none.yaml"),
        (["render", DIGITS, "--platform", "none.yaml"], 2, "cannot read none.yaml"),
        (["render", DIGITS, "--nodes", "3"], 2, "No such option: --nodes"),
        (["train", DIGITS, "--workers", "3"], 2, "cannot be shared equally by 3 workers"),
        (["submit", DIGITS], 3, "no usable kubeconfig"),
        (["status"], 3, "no usable kubeconfig"),
        (["status", "Digits"], 2, "NAME = 'Digits': must be at most 38 characters"),
        (["submit", DIGITS, "--dry-run=maybe"], 2, "must be client or server"),
        (["list", "-A"], 3, "no usable kubeconfig"),
        (["logs", "digits", "--since", "soon"], 2, "--since = 'soon': must be a number and s, m"),
        (["logs", "digits", "-p", "--attempt", "1"], 2, "--attempt and --previous exclude"),
        (
            ["logs", "digits", "--worker", "1", "--since", "5m"],
            2,
            "--since is only for the log of a running",
        ),
        (["logs", "digits", "--tail", "5", "--since", "5m"], 2, "--since and --tail exclude each"),
        (["logs", "digits", "--tail", "-1"], 2, "Invalid value for '--tail'"),
        (["cp", "digits", "x"], 2, "'digits' is not RUN:PATH"),
        (["shell", "digits", "first"], 2, "Invalid value for 'RANK'"),
        (["drill"], 2, "SCENARIO and RUN.yaml are needed"),
        (["drill", "flood", DIGITS], 2, "There are: worker-killed, "),
        (["drill", "worker-killed", DIGITS, "--at-step", "0"], 2, "--at-step = 0: must be a step"),
        (["drill", "worker-killed", DIGITS], 3, "no usable kubeconfig"),
        (["soak", DIGITS, "--minutes", "5", "--workers", "1:2"], 2, "is elastic: a soak compares"),
        (["stop", "none.yaml"], 2, "cannot read none.yaml"),
        (["render", DIGITS, "-n", "Team A"], 2, "--namespace = 'Team A'"),
    ],
)
def test_bad_input_has_its_exit_code_and_a_short_error(
    tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    ended = trainyard(*arguments, KUBECONFIG=str(tmp_path / "none"))
    assert ended.returncode == code
    assert ended.stdout == ""
    error = ended.stderr[ended.stderr.index("error: ") :]
    assert message in error
    assert len(error.splitlines()) <= 3
    assert "Traceback" not in error


@pytest.mark.parametrize("place", [0, 1, 4])
def test_traceback_shows_the_rest(place: int) -> None:
    arguments = ["plan", DIGITS, "--gpus", "0"]
    ended = trainyard(*arguments[:place], "--traceback", *arguments[place:])
    assert "Traceback" in ended.stderr
    assert "resources.gpus = 0: must be greater than 0" in ended.stderr.splitlines()[-1]
    assert ended.returncode == 2


def test_render_writes_one_yaml_stream_and_nothing_else() -> None:
    ended = trainyard("render", DIGITS, "--gpus", "16", "-n", "team")
    (job,) = yaml.safe_load_all(ended.stdout)
    assert (job["kind"], job["metadata"]["namespace"]) == ("RayJob", "team")
    assert ended.stderr == "platform: packaged (the chart at its default values)\n"


def test_render_prints_what_submit_sends() -> None:
    platform = load_platform(None)
    plan = plan_run(load_run(ROOT / DIGITS, gpus="16"), platform, "team")
    printed = yaml.safe_load(trainyard("render", DIGITS, "--gpus", "16", "-n", "team").stdout)
    assert printed == merge(render_job(plan), platform, plan)


def test_rendering_twice_gives_the_same_bytes() -> None:
    first, second = (trainyard("render", DIGITS, PYTHONHASHSEED=seed) for seed in "12")
    assert first.stdout == second.stdout


def test_the_scenarios_of_drills_are_listed_with_what_they_need() -> None:
    listed = {
        row["scenario"]: row for row in json.loads(trainyard("drill", "--list", "--json").stdout)
    }
    assert listed["worker-killed"]["needs"] == "the chart's Role"
    assert listed["node-drained"]["needs"] == "patch nodes, create pods/eviction"
    table = trainyard("drill", "--list").stdout
    assert all(name in table for name in listed)


def test_the_plan_is_a_table_or_json() -> None:
    printed = trainyard("plan", DIGITS, "--gpus", "16").stdout
    assert "16 GPUs / 8 per node" in printed
    rows = json.loads(trainyard("plan", DIGITS, "--gpus", "16", "--json").stdout)
    assert {"name": "workers", "value": "16", "why": "one per GPU"} in rows


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--help"],
        ["platform"],
        ["submit", "--help"],
        ["checkpoints"],
        ["data", "prepare", "--help"],
    ],
)
def test_help_is_there_without_heavy_imports(arguments: list[str]) -> None:
    script = (
        "import sys; from trainyard.__main__ import run; code = run(sys.argv[1:]); "
        "heavy = {'kubernetes', 'jinja2', 'yaml', 'torch', 'ray', 'trainyard.run_file.load'}; "
        "sys.exit(code or sorted(heavy & sys.modules.keys()) or 0)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, *arguments], cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "Usage: trainyard" in ended.stdout
