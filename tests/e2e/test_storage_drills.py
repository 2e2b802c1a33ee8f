"""Storage that fails for a while during a run: nothing is lost, and no attempt is used up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from bucket import USER, Bucket, canary, in_bucket
from conftest import Team
from drilling import drill, volume_of
from fault_folder import Fault, fault_folder

from tests.trainer.s3_proxy import Fault as ProxyFault
from tests.trainer.s3_server import ALL
from trainyard.drills.scenarios import SCENARIOS, WORKER_S, Scenario
from trainyard.drills.strikes import Target

pytestmark = pytest.mark.drills

FAULT_S = 45.0
STANDS_STILL_S = 0.8 * FAULT_S
"""The minimum time without progress. Training continues until the next save, and waits there."""
LATE_S = 0.1
LONGER = ("train.epochs=30",)
"""The length for faults during which training continues. The faults must end before the run."""
WAITS = "training waits, and the save is retried"
SLOWER = "saves take longer"
ON_A_VOLUME = {
    "storage-full": ("full", "the storage is full for 45 s", WAITS),
    "storage-read-only": ("read-only", "the storage is read-only for 45 s", WAITS),
    "storage-slow": (
        f"slow {LATE_S:g}s",
        "for 45 s each access to the storage takes 0.1 s",
        SLOWER,
    ),
}


@pytest.fixture(scope="module")
def team(make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory) -> Team:
    team = make_team("storage")
    team.install(tmp_path_factory.mktemp("values"))
    return team


@pytest.fixture(scope="module")
def fault(volume: Path) -> Iterator[Fault]:
    """The fault of the folder that is the team's volume."""
    with fault_folder(volume) as fault:
        yield fault


@pytest.fixture(scope="module")
def volume(team: Team) -> Path:
    return volume_of(team.namespace)


@pytest.mark.parametrize("name", ON_A_VOLUME)
def test_a_run_outlasts_what_its_volume_suffers_from(
    team: Team, volume: Path, fault: Fault, name: str, tmp_path: Path
) -> None:
    words, what, answer = ON_A_VOLUME[name]

    @contextmanager
    def suffering() -> Iterator[None]:
        fault.begin(words)
        began = time.monotonic()
        list(volume.iterdir())
        assert answer != SLOWER or time.monotonic() - began > LATE_S
        yield
        fault.end()

    drill(team, scenario(name, what, answer, suffering), tmp_path)


@pytest.fixture(scope="module")
def bucket_team(
    make_team: Callable[[str], Team], bucket: Bucket, tmp_path_factory: pytest.TempPathFactory
) -> Team:
    team = make_team("bucket")
    bucket.give_to(team, tmp_path_factory.mktemp("values"))
    return team


Suffering = Callable[[Bucket], AbstractContextManager[None]]


def failing(fault: ProxyFault) -> Suffering:
    """Return a fault of the proxy between the pods and the bucket."""

    @contextmanager
    def suffering(bucket: Bucket) -> Iterator[None]:
        struck = bucket.proxy.struck
        bucket.proxy.fail(fault)
        yield
        bucket.proxy.heal()
        assert bucket.proxy.struck > struck

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
    drill(bucket_team, scenario(name, what, answer, lambda: suffering(bucket)), tmp_path)


@pytest.mark.parametrize("name", ["worker-lost", "head-lost", "suspended"])
def test_a_run_in_a_bucket_survives_what_one_on_a_volume_does(
    bucket_team: Team, name: str, tmp_path: Path
) -> None:
    drill(bucket_team, in_bucket(SCENARIOS[name]), tmp_path)


def scenario(
    name: str, fault: str, answer: str, suffering: Callable[[], AbstractContextManager[None]]
) -> Scenario:
    """Return the scenario of a storage fault that lasts FAULT_S seconds."""

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
        restarts="never",
        stands_still_s=STANDS_STILL_S if answer == WAITS else 0.0,
        settings=LONGER if answer == SLOWER else (),
    )
