"""The git revision of a run: read from its folder, sent with the RayJob, and no part of its name."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from trainyard.cli.app import app
from trainyard.errors import ConfigError
from trainyard.planning.comparison.run_diff import diff_jobs
from trainyard.planning.merge import with_source
from trainyard.planning.objects import run_objects
from trainyard.platform import load_platform
from trainyard.run_file.code.source import GitState, git_state, source_of
from trainyard.run_file.load import load_run
from trainyard_trainer.run_files.standing_cluster import driver_variables
from trainyard_trainer.run_files.submission import SOURCE_VARIABLE

DIGITS = Path(__file__).resolve().parents[2] / "examples/digits.yaml"
AUTHOR = ("-c", "user.name=a", "-c", "user.email=a@example.org")


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *AUTHOR, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "code").mkdir()
    (tmp_path / "code/train.py").write_text("pass\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "one")
    return tmp_path


def test_a_folder_that_equals_its_commit_is_clean(repository: Path) -> None:
    revision = git(repository, "rev-parse", "HEAD")
    assert git_state(repository / "code") == GitState(revision=revision, is_dirty=False)


@pytest.mark.parametrize(
    ("file", "is_dirty"),
    [("code/train.py", True), ("code/new.py", True), ("elsewhere.txt", False)],
)
def test_only_changes_in_the_folder_make_it_dirty(
    repository: Path, file: str, is_dirty: bool
) -> None:
    (repository / file).write_text("1\n")
    state = git_state(repository / "code")
    assert state is not None
    assert state.is_dirty == is_dirty


def test_a_folder_without_git_has_no_revision(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    git(tmp_path, "init", "--quiet")
    assert git_state(tmp_path) is None, "nothing is committed"


def test_the_code_comes_before_the_run_file_and_that_before_the_current_folder(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    run_file = outside / "run.yaml"
    run_file.write_text(
        f"name: own\ncommand: [python, train.py]\ncode: {repository}/code\nresources: {{workers: 1}}\n"
    )
    assert source_of(load_run(run_file), run_file) == git_state(repository / "code")
    recipe = load_run(DIGITS, workers="1")
    assert source_of(recipe, run_file) is None
    assert source_of(recipe, repository / "run.yaml") == git_state(repository)
    monkeypatch.chdir(repository)
    assert source_of(recipe) == git_state(repository)


def test_a_commit_changes_neither_the_name_of_a_submission_nor_what_diff_shows() -> None:
    job = run_objects(load_run(DIGITS, workers="2"), load_platform(None), "team").job
    source = GitState(revision="1" * 40, is_dirty=True)
    sent = with_source(job, source)
    assert sent["metadata"] == job["metadata"]
    assert json.loads(driver_variables(sent)[SOURCE_VARIABLE]) == {
        "revision": "1" * 40,
        "is_dirty": True,
    }
    assert SOURCE_VARIABLE not in driver_variables(job)
    for one, other in ((job, sent), (sent, job)):
        assert diff_jobs(one, other, live=True) == ()
    assert with_source(job, None) == job


def rendered_with_git(folder: Path) -> Result:
    run_file = folder / "digits.yaml"
    run_file.write_text(DIGITS.read_text())
    return CliRunner().invoke(app, ["render", str(run_file), "--git", "-n", "team"])


def test_render_writes_the_git_revision_on_request(repository: Path) -> None:
    ended = rendered_with_git(repository)
    job = yaml.safe_load(ended.stdout)
    source = git_state(repository)
    assert source is not None
    assert source.is_dirty, "the run file is not committed"
    plain = run_objects(load_run(DIGITS), load_platform(None), "team").job
    assert job == with_source(plain, source)


def test_render_with_a_git_revision_is_refused_where_git_knows_none(tmp_path: Path) -> None:
    ended = rendered_with_git(tmp_path)
    assert isinstance(ended.exception, ConfigError)
    assert "--git: git knows no commit" in str(ended.exception)
