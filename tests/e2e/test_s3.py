"""Runs whose only storage is a bucket: a real S3 server behind a proxy with faults, and real pods."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from bucket import USER, Bucket, canary, keys, secret
from conftest import Ended, Object, Team, get, kubectl, run, set_options, wait_for

from tests.trainer.s3_server import ALL

DIGITS = "examples/digits.yaml"
EPOCHS = 20
SETTINGS = ("train.model.image_size=16", f"train.epochs={EPOCHS}")
OPTIONS = ("--workers", "2", *set_options(SETTINGS))
"""The options of both the undisturbed run on a volume and the disturbed run in the bucket."""


@pytest.fixture(scope="module")
def password() -> str:
    """The password of a registry. The cluster's own registry requires none."""
    return canary()


@pytest.fixture(scope="module")
def team(
    make_team: Callable[[str], Team],
    bucket: Bucket,
    password: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Team:
    team = make_team("s3")
    login = base64.b64encode(f"ada:{password}".encode()).decode()
    auths = json.dumps({"auths": {"127.0.0.1:5000": {"auth": login, "password": password}}})
    secret(team, "registry", **{".dockerconfigjson": auths})
    bucket.give_to(team, tmp_path_factory.mktemp("values"), imagePullSecrets=[{"name": "registry"}])
    return team


def reaches(bucket: Bucket, name: str, more: int) -> Object:
    """Wait until the run has made the given number of further steps, and return its progress."""
    before = bucket.progress(name)["step"]

    def reached() -> Object | None:
        found = bucket.progress(name)
        return found if found["step"] >= before + more else None

    found: Object = wait_for(f"{name} makes {more} more steps", reached)
    return found


def log(team: Team, name: str) -> str:
    ended = team.trainyard("logs", name)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def sha256(team: Team, name: str, folder: Path) -> str:
    """Return the SHA-256 of the model of a run, copied with `cp`."""
    ended = team.trainyard("cp", f"{name}:model.pt", str(folder / f"{name}.pt"))
    assert ended.returncode == 0, ended.stderr
    return hashlib.sha256((folder / f"{name}.pt").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def undisturbed(make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The SHA-256 of the model of the same run on a shared volume."""
    team = make_team("s3-volume")
    folder = tmp_path_factory.mktemp("volume")
    team.install(folder)
    ended = team.trainyard("submit", DIGITS, *OPTIONS, "--name", "same")
    assert ended.returncode == 0, ended.stderr
    found = sha256(team, "same", folder)
    kubectl("delete", "rayjobs.ray.io", "--all", "-n", team.namespace)
    return found


@dataclass
class Story:
    """The traces of the disturbed run outside of its folder, in which secrets are searched."""

    token: str
    texts: dict[str, str]


@pytest.fixture(scope="module")
def story(team: Team, bucket: Bucket) -> Story:
    """The active run in the bucket, and all that can be read of it during training."""
    submitted = team.trainyard("submit", DIGITS, *OPTIONS, "--name", "same", "--detach")
    assert submitted.returncode == 0, submitted.stderr
    reaches(bucket, "same", 1)
    (job,) = team.rayjobs()
    token = get("secret", team.namespace, job["status"]["rayClusterName"])["data"]["auth_token"]
    return Story(base64.b64decode(token).decode(), {"submit": submitted.stdout + submitted.stderr})


def everything(team: Team) -> dict[str, str]:
    """Return all that a reader of the namespace can see: objects except Secrets, events, logs and outputs."""
    kinds = kubectl("api-resources", "--verbs=list", "--namespaced", "-o", "name").split()
    readable = sorted(set(kinds) - {"secrets"})
    seen = {"objects": kubectl("get", ",".join(readable), "-n", team.namespace, "-o", "yaml")}
    for pod in get("pods", team.namespace)["items"]:
        for container in pod["status"].get("containerStatuses", []):
            name, place = container["name"], pod["metadata"]["name"]
            seen[f"log of {place}/{name}"] = run(
                "kubectl", "logs", place, "-c", name, "-n", team.namespace
            ).stdout
    for command in (
        ("explain", "same"), ("explain", "same", "--json"), ("status", "same", "-o", "json"),
        ("status", "same", "-o", "yaml"), ("logs", "same"), ("list", "-o", "wide"),
        ("platform", "get"), ("render", DIGITS, "--from-cluster"),
        ("submit", DIGITS, "--name", "same", "--dry-run=server", "--traceback"),
        ("cp", "same:no-such-file", "/tmp/nowhere", "--traceback"),
        ("preflight", DIGITS, *OPTIONS, "--json"),
    ):  # fmt: skip
        ended = team.trainyard(*command)
        seen[" ".join(command)] = ended.stdout + ended.stderr
    return seen


def test_the_pods_write_into_the_bucket_and_mount_no_volume(
    team: Team, bucket: Bucket, story: Story
) -> None:
    names = {path.name for path in bucket.files("same")}
    assert {"run.json", "progress.json", "a1.json", "a1.beat"} <= names
    pods = team.pods(is_ray_node="yes")
    assert len(pods) == 3
    for pod in pods:
        assert not [volume for volume in pod["spec"]["volumes"] if "emptyDir" not in volume]
    story.texts |= everything(team)


@pytest.mark.full
def test_a_bucket_that_answers_503_or_late_and_resets_lines_does_not_stop_a_run(
    team: Team, bucket: Bucket, story: Story
) -> None:
    under_way = {pod["metadata"]["uid"] for pod in team.pods(is_ray_node="yes")}
    for fault in ("503", "reset", "cut", "slow"):
        struck = bucket.proxy.struck
        bucket.proxy.fail(fault)  # type: ignore[arg-type]
        bucket.proxy.await_struck(struck + 6)
        bucket.proxy.heal()
        assert reaches(bucket, "same", 10)["attempt"] == 1
    assert {pod["metadata"]["uid"] for pod in team.pods(is_ray_node="yes")} == under_way


@pytest.mark.full
def test_a_run_outlives_keys_that_expire_and_are_renewed(
    team: Team, bucket: Bucket, story: Story
) -> None:
    under_way = {pod["metadata"]["uid"] for pod in team.pods(is_ray_node="yes")}
    bucket.server.change_secret(USER, canary())
    wait_for("the run says so", lambda: "storage: trying again for" in log(team, "same"))
    bucket.server.change_secret(USER, bucket.secret)
    assert reaches(bucket, "same", 10)["attempt"] == 1
    assert {pod["metadata"]["uid"] for pod in team.pods(is_ray_node="yes")} == under_way


def test_a_run_is_stopped_and_looked_at_in_a_bucket(
    team: Team, story: Story, tmp_path: Path
) -> None:
    stopped = team.trainyard("stop", "same")
    assert stopped.returncode == 0, stopped.stderr
    assert "SIGTERM: the workers save a checkpoint" in log(team, "same")
    checkpoint = newest_checkpoint(team)
    assert team.trainyard("cp", f"same:{checkpoint}", str(tmp_path / "c")).returncode == 0
    told = json.loads((tmp_path / "c/manifest.json").read_text())["files"]["model.pt"]["sha256"]
    assert hashlib.sha256((tmp_path / "c/model.pt").read_bytes()).hexdigest() == told


def newest_checkpoint(team: Team) -> str:
    """Return the path of the newest checkpoint in the run's folder."""
    listed = team.trainyard("cp", "same:checkpoints").stdout.splitlines()
    manifest = next(name for name in reversed(listed) if name.endswith("manifest.json"))
    return manifest.removesuffix("/manifest.json")


@pytest.mark.full
def test_a_stopped_run_goes_on_in_its_bucket(team: Team, bucket: Bucket, story: Story) -> None:
    checkpoint = newest_checkpoint(team)
    resumed = team.trainyard("submit", DIGITS, *OPTIONS, "--name", "same")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    summary = team.status("same")["summary"]
    assert (summary["outcome"], summary["epochs"], summary["attempts"]) == ("succeeded", EPOCHS, 2)
    assert summary["resumed_from"] == checkpoint.removeprefix("checkpoints/")
    assert "report.html" in {path.name for path in bucket.files("same")}
    story.texts |= {"submit again": resumed.stdout + resumed.stderr} | everything(team)


@pytest.mark.full
def test_nothing_is_lost_and_nothing_is_counted_twice(
    team: Team, bucket: Bucket, undisturbed: str, tmp_path: Path
) -> None:
    assert sha256(team, "same", tmp_path) == undisturbed
    assert team.trainyard("cp", "same:metrics.jsonl", str(tmp_path / "m")).returncode == 0
    records = [json.loads(line) for line in (tmp_path / "m").read_text().splitlines()]
    epochs = [record["epoch"] for record in records if record["kind"] == "epoch"]
    assert epochs == list(range(1, EPOCHS + 1))
    assert team.trainyard("cp", "same:report.html", str(tmp_path / "r")).returncode == 0


def test_no_secret_is_to_be_seen_anywhere(
    team: Team, bucket: Bucket, story: Story, password: str
) -> None:
    """Search for known secrets in objects, events, logs, outputs and the run's folder with its report."""
    texts = dict(story.texts)
    files = bucket.files("same")
    assert {"metrics.jsonl", "run.json", "attempt-1.log"} <= {path.name for path in files}
    contents = {str(path): path.read_bytes() for path in files}
    contents |= {name: text.encode() for name, text in texts.items()}
    login = base64.b64encode(f"ada:{password}".encode()).decode()
    for what in (bucket.secret, story.token, password, login):
        for form in (what, base64.b64encode(what.encode()).decode()):
            found = [name for name, text in contents.items() if form.encode() in text]
            assert found == [], f"a secret stands in {found}"
    # The search finds secrets that are present.
    assert b"AWS_SECRET_ACCESS_KEY" in contents["objects"]
    assert b"same" in contents["explain same"]


@pytest.mark.full
def test_a_run_reads_data_from_a_bucket_and_its_folder_goes_on_request(
    team: Team, bucket: Bucket, story: Story
) -> None:
    """Train with the data set that the first run has prepared for itself."""
    settings = ("data.source=s3://runs/team/same/data", "train.epochs=1", SETTINGS[0])
    options = set_options(settings)
    ended = team.trainyard("submit", DIGITS, "--name", "reads", "--workers", "1", *options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    folders = {str(path.parent.name) for path in bucket.files("reads")}
    assert {"reads", "lease", "logs"} <= folders
    assert "train" not in folders, "what was prepared is read where it lies"
    assert team.trainyard("delete", "reads", "--folder", "--yes").returncode == 0
    assert bucket.files("reads") == []
    assert team.trainyard("cp", "reads:").returncode == 2
    assert bucket.files("same") != []


TALKING = """
import ray.train
from ray.experimental.internal_kv import _internal_kv_put

def train(config):
    rank = ray.train.get_context().get_world_rank()
    if rank == 1 and not _internal_kv_put(b"has-failed", b"yes", overwrite=False):
        print("words of the first group")
        raise RuntimeError("rank 1 fails once")
    print(f"words of rank {rank}")
"""
"""A training function whose rank 1 fails in the first worker group."""


def test_the_logs_of_both_worker_groups_are_in_the_bucket_when_the_cluster_is_gone(
    team: Team, tmp_path: Path
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code/talking.py").write_text(TALKING)
    talks = {"name": "talks", "resources": {"workers": 2}, "code": "code"}
    (tmp_path / "talks.yaml").write_text(json.dumps(talks | {"function": "talking:train"}))
    ended = team.trainyard("submit", str(tmp_path / "talks.yaml"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    selector = "trainyard.io/run=talks"
    kubectl("delete", "rayjobs.ray.io", "-l", selector, "-n", team.namespace)
    wait_for(
        "no pod of the run is left",
        lambda: not get("pods", team.namespace, "-l", selector)["items"],
    )

    def said(*options: str) -> str:
        read = team.trainyard("logs", "talks", "--worker", *options)
        assert read.returncode == 0, read.stderr
        return read.stdout

    before = said("1", "--previous")
    assert "words of the first group" in before
    assert "rank 1 fails once" in before
    assert "words of rank 1" not in before
    assert "words of rank 1" in said("1")
    assert "words of rank 0" in said("0")


@dataclass(frozen=True, kw_only=True)
class Wrong:
    keys: dict[str, str]
    bucket: str
    step: str
    """The step of the preflight's pod that fails."""
    said: str
    failure: str
    """The name of the failure in `explain`."""
    cause: str
    remedy: str


@pytest.fixture(scope="module")
def wrongs(bucket: Bucket, team: Team) -> dict[str, Wrong]:
    """Four defects of the storage, each with its own Secret or bucket."""
    refuses = "the bucket refuses the run"
    denied: dict[str, Any] = {"failure": "s3-denied", "remedy": "storage.s3.secretName"}
    found = {
        "wrong-key": Wrong(
            keys=keys(USER, canary()), bucket="runs", step="write", said="SIGNATURE_DOES_NOT_MATCH",
            cause=refuses, **denied,
        ),
        "no-bucket": Wrong(
            keys=keys(USER, bucket.secret), bucket="nowhere", step="write", said="NO_SUCH_BUCKET",
            failure="s3-no-bucket", cause="bucket nowhere does not exist", remedy="storage.s3.path",
        ),
        "no-delete": Wrong(
            keys=keys("bob", canary()), bucket="keeps", step="delete", said="Access Denied",
            cause=f"{refuses} DeleteObject", **denied,
        ),
        "no-list": Wrong(
            keys=keys("eve", canary()), bucket="hides", step="list", said="ACCESS_DENIED",
            cause=f"{refuses} ListObjectsV2", **denied,
        ),
    }  # fmt: skip
    for name, missing in (("no-delete", "s3:DeleteObject"), ("no-list", "s3:ListBucket")):
        wrong = found[name]
        user, password = wrong.keys.values()
        bucket.server.add_user(user, password)
        bucket.server.make_bucket(wrong.bucket)
        allowed = [action for action in ALL if action != missing]
        bucket.server.allow(wrong.bucket, user, *allowed)
    for name, wrong in found.items():
        secret(team, name, **wrong.keys)
    return found


NAMES = ("wrong-key", "no-bucket", "no-delete", "no-list")


@pytest.fixture(scope="module")
def platforms(
    team: Team, wrongs: dict[str, Wrong], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """The team's platform with the Secret and the bucket of each defect."""
    text = team.trainyard("platform", "get").stdout
    folder = tmp_path_factory.mktemp("platforms")
    for name, wrong in wrongs.items():
        platform = yaml.safe_load(text)
        platform["storage"]["path"] = f"s3://{wrong.bucket}/team"
        changed = json.dumps(platform).replace('"name": "bucket"', f'"name": "{name}"')
        assert changed.count(f'"{name}"') == 8  # two variables of head, both pools and reader
        (folder / f"{name}.yaml").write_text(changed)
    return {name: folder / f"{name}.yaml" for name in wrongs}


@pytest.fixture(scope="module")
def failed(team: Team, platforms: dict[str, Path]) -> dict[str, Ended]:
    """The results of `watch` for all four runs, which run at the same time."""
    for name, platform in platforms.items():
        submitted = team.trainyard(
            "submit", DIGITS, "--name", name, "--workers", "1", "--platform", str(platform),
            "--set", "faults.retries=0", "--detach",
        )  # fmt: skip
        assert submitted.returncode == 0, submitted.stderr
    return {name: team.trainyard("watch", name) for name in platforms}


@pytest.mark.parametrize("name", NAMES)
def test_preflight_tells_what_is_wrong_with_a_bucket(
    team: Team, wrongs: dict[str, Wrong], platforms: dict[str, Path], name: str
) -> None:
    wrong = wrongs[name]
    ended = team.trainyard("preflight", "--platform", str(platforms[name]), "--json")
    (check,) = [one for one in json.loads(ended.stdout) if one["name"] == "storage"]
    assert (check["state"], ended.returncode) == ("failed", 1)
    assert wrong.said in check["seen"]
    assert wrong.step in check["seen"]
    assert check["remedy"]
    assert wrong.keys["AWS_SECRET_ACCESS_KEY"] not in ended.stdout + ended.stderr


@pytest.mark.parametrize("name", NAMES)
def test_a_run_says_what_is_wrong_with_its_bucket_and_explain_knows_the_remedy(
    team: Team, wrongs: dict[str, Wrong], failed: dict[str, Ended], name: str
) -> None:
    wrong = wrongs[name]
    watched = failed[name]
    assert watched.returncode == 1
    assert wrong.cause in watched.stderr
    ended = team.trainyard("explain", name, "--json")
    found = json.loads(ended.stdout)["finding"]
    assert found["failure"] == wrong.failure
    assert wrong.cause in found["cause"]
    assert wrong.remedy in found["remedy"]
    assert wrong.keys["AWS_SECRET_ACCESS_KEY"] not in ended.stdout + watched.stderr
