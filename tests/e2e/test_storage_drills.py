"""Storage that fails under a run for a while: nothing is lost, and no attempt is spent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from bucket import USER, Bucket, canary, keys, running_bucket, secret
from conftest import Team, get, wait_for
from drilling import drill
from fault_folder import Fault, fault_folder

from launcher.drill.scenarios import WORKER_S, Scenario
from launcher.drill.strikes import Target
from tests.trainer.s3_proxy import Fault as ProxyFault
from tests.trainer.s3_server import ALL

pytestmark = pytest.mark.drills

FAULT_S = 45.0
WAITS = "training waits, and saving is tried again"
SLOWER = "saves take longer"
ON_A_VOLUME = {
    "storage-full": ("full", "the storage is full for 45 s", WAITS),
    "storage-read-only": ("read-only", "the storage is read-only for 45 s", WAITS),
    "storage-slow": ("slow 100ms", "for 45 s each access to the storage takes 0.1 s", SLOWER),
}


@pytest.fixture(scope="module")
def team(make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory) -> Team:
    team = make_team("storage")
    team.install(tmp_path_factory.mktemp("values"))
    return team


@pytest.fixture(scope="module")
def fault(team: Team) -> Iterator[Fault]:
    """Of the folder that is the team's volume."""
    name = wait_for("the claim is bound", lambda: volume_of(team))
    volume = get("pv", "default", name)
    if "hostPath" not in volume["spec"]:
        pytest.skip("only the volumes of tests/cluster are folders of this machine")
    with fault_folder(Path(volume["spec"]["hostPath"]["path"])) as fault:
        yield fault


def volume_of(team: Team) -> str:
    claim = get("pvc", team.namespace, "trainyard-storage")
    return str(claim["spec"].get("volumeName", ""))


@pytest.mark.parametrize("name", ON_A_VOLUME)
def test_a_run_outlasts_what_its_volume_suffers_from(
    team: Team, fault: Fault, name: str, tmp_path: Path
) -> None:
    words, what, answer = ON_A_VOLUME[name]

    @contextmanager
    def suffering() -> Iterator[None]:
        fault.begin(words)
        yield
        fault.end()

    outlast(team, scenario(name, what, answer, suffering), tmp_path)


# The same in a bucket.


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    with running_bucket(tmp_path_factory.mktemp("s3") / "server") as bucket:
        yield bucket


@pytest.fixture(scope="module")
def bucket_team(
    make_team: Callable[[str], Team], bucket: Bucket, tmp_path_factory: pytest.TempPathFactory
) -> Team:
    team = make_team("bucket")
    secret(team, "bucket", **keys(USER, bucket.secret))
    storage = {"claim": None, "s3": bucket.values}
    team.install(tmp_path_factory.mktemp("values"), storage=storage)
    return team


Suffering = Callable[[Bucket], AbstractContextManager[None]]


def failing(fault: ProxyFault) -> Suffering:
    """What lies between the pods and the bucket is at fault."""

    @contextmanager
    def suffering(bucket: Bucket) -> Iterator[None]:
        bucket.proxy.fail(fault)
        yield
        bucket.proxy.heal()

    return suffering


@contextmanager
def expired(bucket: Bucket) -> Iterator[None]:
    bucket.server.change_secret(USER, canary())
    yield
    bucket.server.change_secret(USER, bucket.secret)


@contextmanager
def read_only(bucket: Bucket) -> Iterator[None]:
    bucket.server.allow("runs", USER, *(set(ALL) - {"s3:PutObject", "s3:DeleteObject"}))
    yield
    bucket.server.allow("runs", USER, *ALL)


IN_A_BUCKET: dict[str, tuple[Suffering, str, str]] = {
    "s3-busy": (failing("503"), "S3 answers all requests with 503 for 45 s", WAITS),
    "s3-resets": (failing("reset"), "S3 resets all connections for 45 s", WAITS),
    "s3-slow": (failing("slow"), "for 45 s each answer of S3 is 0.5 s late", SLOWER),
    "s3-keys-expired": (
        expired,
        "the keys of the bucket expire, and are renewed after 45 s",
        WAITS,
    ),
    "s3-read-only": (read_only, "the bucket is read-only for 45 s", WAITS),
}


@pytest.mark.parametrize("name", IN_A_BUCKET)
def test_a_run_outlasts_what_its_bucket_suffers_from(
    bucket_team: Team, bucket: Bucket, name: str, tmp_path: Path
) -> None:
    suffering, what, answer = IN_A_BUCKET[name]
    outlast(bucket_team, scenario(name, what, answer, lambda: suffering(bucket)), tmp_path)


def scenario(
    name: str, fault: str, answer: str, suffering: Callable[[], AbstractContextManager[None]]
) -> Scenario:
    """Storage that suffers for FAULT_S."""

    def suffer(target: Target) -> None:
        with suffering():
            time.sleep(FAULT_S)  # the fault's own length

    return Scenario(
        name=name,
        fault=fault,
        answer=answer,
        actor="trainer",
        rights="the machine",
        strike=suffer,
        within_s=WORKER_S,
        has_notice=True,
        is_felt=False,
    )


def outlast(team: Team, scenario: Scenario, tmp_path: Path) -> None:
    result = drill(team, scenario, tmp_path)
    assert result["attempts"] == result["worker_groups"] == 1
