"""User code on the cluster: it is transferred, the workers can import it, and a retry resumes."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bucket import USER, keys, running_bucket, secret
from conftest import Team

EXAMPLE = "examples/command.yaml"


@pytest.fixture(scope="module")
def team(make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory) -> Team:
    team = make_team("own-code")
    team.install(tmp_path_factory.mktemp("values"))
    return team


@pytest.fixture(params=["claim", "s3"])
def where(
    request: pytest.FixtureRequest, team: Team, make_team: Callable[[str], Team], tmp_path: Path
) -> Iterator[Team]:
    """A team whose runs are stored on a claim, and a team whose runs are stored in a bucket."""
    if request.param == "claim":
        yield team
        return
    with running_bucket(tmp_path / "server") as bucket:
        on_s3 = make_team("own-code-s3")
        secret(on_s3, "bucket", **keys(USER, bucket.secret))
        on_s3.install(tmp_path, storage={"claim": None, "s3": bucket.values})
        yield on_s3


@pytest.mark.full
def test_a_script_with_ray_train_runs_as_it_is_and_goes_on_where_it_stopped(team: Team) -> None:
    first = team.trainyard("submit", EXAMPLE)
    assert first.returncode == 0, first.stderr
    assert "succeeded: python ray_train.py --num-workers 2 --epochs 3 ended well" in first.stdout
    assert re.search(r"accuracy 0\.\d+ after 3 epochs", team.trainyard("logs", "own").stdout)
    more = ["python", "ray_train.py", "--num-workers", "{workers}", "--epochs", "4"]
    again = team.trainyard("submit", EXAMPLE, "--set", f"command={more}")
    assert again.returncode == 0, again.stderr
    log = team.trainyard("logs", "own").stdout
    assert "going on with epoch 3" in log
    assert "after 4 epochs" in log
    assert team.status("own")["summary"]["attempts"] == 2


def test_a_function_and_a_plain_ddp_script_run_on_the_cluster(team: Team) -> None:
    files = ("examples/function.yaml", "examples/torchrun.yaml")
    # At the same time, because runs mostly wait for their pods.
    function, plain = team.at_once(*(("submit", file) for file in files))
    assert function.returncode == 0, function.stderr
    assert "succeeded: loop:train ended well" in function.stdout
    assert "epoch 5, loss" in function.stdout
    assert plain.returncode == 0, plain.stderr
    assert "epoch 3 of 2 workers" in team.trainyard("logs", "ddp").stdout


RAY_TRAIN = ("--num-workers", "{workers}", "--epochs", "2", "--storage-path", "{storage}/{run}")


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        ("mnist.py", RAY_TRAIN, "after 2 epochs"),
        ("resnet18.py", RAY_TRAIN, "after 2 epochs"),
        ("ray_data.py", RAY_TRAIN, "after 2 epochs"),
        ("single.py", ("3",), "epoch 3: loss"),
    ],
    ids=["mnist", "resnet18", "ray-data", "no-ray"],
)
def test_a_script_that_knows_nothing_of_us_runs_as_it_is(
    team: Team, script: str, arguments: tuple[str, ...], said: str
) -> None:
    command = json.dumps(["python", script, *arguments])
    name = f"own-{Path(script).stem.replace('_', '-')}"
    ended = team.trainyard("submit", EXAMPLE, "--name", name, "--set", f"command={command}")
    assert ended.returncode == 0, ended.stderr
    assert f"succeeded: python {script}" in ended.stdout
    assert said in team.trainyard("logs", name).stdout


def large_code(folder: Path) -> str:
    """Return a run file whose code is an archive of 20 MiB and checks itself."""
    noise = random.Random(7).randbytes(20 * 2**20)
    (folder / "src").mkdir()
    (folder / "src/noise").write_bytes(noise)
    read = "hashlib.sha256(open('noise', 'rb').read()).hexdigest()"
    script = f"import hashlib, sys; sys.exit({read} != sys.argv[1])"
    document = {
        "name": "large",
        "resources": {"workers": 2},
        "code": "src",
        "command": ["python", "-c", script, hashlib.sha256(noise).hexdigest()],
    }
    (folder / "large.yaml").write_text(json.dumps(document))
    return str(folder / "large.yaml")


@pytest.mark.full
def test_large_code_goes_through_the_run_s_folder(where: Team, tmp_path: Path) -> None:
    file = large_code(tmp_path)
    assert (
        "Use `trainyard submit`, which uploads the code" in where.trainyard("render", file).stderr
    )
    first = where.trainyard("submit", file)
    assert first.returncode == 0, first.stderr
    assert "MiB uploaded to the folder of run large" in first.stderr
    assert "succeeded: python -c" in first.stdout
    (archive,) = (
        name for name in where.trainyard("cp", "large:").stdout.split() if "code/" in name
    )
    again = where.trainyard("submit", file)
    assert again.returncode == 0, again.stderr
    assert "uploaded" not in again.stderr
    fresh = where.trainyard("submit", file, "--fresh")
    assert fresh.returncode == 0, fresh.stderr
    # Setting the folder aside also uses an attempt's number.
    assert where.status("large")["summary"]["attempts"] == 4
    assert archive in where.trainyard("cp", "large-old-1:").stdout
    other = where.trainyard("reproduce", "large", "--name", "larger", "--submit")
    assert other.returncode == 0, other.stderr
    assert archive in where.trainyard("cp", "larger:").stdout
    assert not [pod for pod in where.pods() if "reader" in pod["metadata"]["name"]]


@pytest.mark.full
def test_a_program_that_fails_is_tried_again_and_explained(team: Team) -> None:
    settings = ("--set", "command=[sh, -c, 'echo \"attempt {attempt}\"; exit 7']")
    ended = team.trainyard(
        *("submit", EXAMPLE, "--name", "failing", "--set", "faults.retries=1"), *settings
    )
    assert ended.returncode == 1
    assert "the program ended with exit code 7" in ended.stderr
    assert team.status("failing")["summary"]["attempts"] == 2
    explained = team.trainyard("explain", "failing").stdout
    assert "exit code 7" in explained
