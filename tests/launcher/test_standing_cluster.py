"""Runs on the platform's standing RayCluster: their plan and RayJob, what is refused, how they wait."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainyard.errors import ClusterError, ConfigError
from trainyard.planning.comparison.run_diff import diff_jobs, require_same_identity
from trainyard.planning.merge import with_source
from trainyard.planning.objects import run_objects
from trainyard.planning.reasons import explain_plan
from trainyard.platform import Platform, StandingCluster
from trainyard.run_file.code.source import GitState
from trainyard.run_file.load import load_run
from trainyard.run_file.models import RunConfig
from trainyard.submission.driver_log import lines_of_driver, lines_that_hold, log_of_driver
from trainyard.submission.place_wait import with_place
from trainyard.submission.status import RunStatus
from trainyard_trainer.config.trainer_config import read_config
from trainyard_trainer.notices.rayjobs import config_of
from trainyard_trainer.run_files import submission
from trainyard_trainer.run_files.standing_cluster import PLACES_VARIABLE, driver_variables

ROOT = Path(__file__).resolve().parents[2]
Object = dict[str, Any]


@pytest.fixture
def standing(platform: Platform) -> Platform:
    """A platform with a standing cluster of two nodes, with a place for one worker each."""
    cluster = StandingCluster(name="trainyard", pool="cpu", nodes=2)
    permitted = {"env": {"deny": []}, "secrets": ["hub"], "labels": ["example.com/*"]}
    runs = type(platform.runs).model_validate(permitted)
    return platform.model_copy(update={"standing_cluster": cluster, "runs": runs})


def warm_run(*settings: str, workers: str = "2", **options: Any) -> RunConfig:
    return load_run(
        ROOT / "examples/digits.yaml", settings, workers=workers, **{"warm": True, **options}
    )


def job_of(run: RunConfig, platform: Platform) -> Object:
    return run_objects(run, platform, "team").job


def test_the_rayjob_selects_the_cluster_and_brings_the_config(standing: Platform) -> None:
    job = job_of(warm_run(), standing)
    assert job["spec"].pop("runtimeEnvYAML").isascii()
    assert job["spec"] == {
        "clusterSelector": {"ray.io/cluster": "trainyard"},
        "submissionMode": "HTTPMode",
        "entrypoint": "python -I -u -m trainyard_trainer",
        "preRunningDeadlineSeconds": standing.job.pre_running_deadline_seconds,
        "shutdownAfterJobFinishes": False,
    }


def test_no_text_of_a_run_file_is_expanded_by_ray(standing: Platform) -> None:
    command = ["echo", "$HOME ${{HOME}} $(HOME) $$", "\N{SNOWMAN} \U0001f600 \x7f"]
    document = {"name": "words", "command": command, "resources": {"workers": 1}}
    job = job_of(load_run(document, warm=True), standing)
    variables = driver_variables(job)
    assert not any("$" in value for value in variables.values())
    for config in (read_config(variables), config_of(job)):
        assert config is not None
        assert [*config.command] == command  # type: ignore[union-attr]


def test_every_worker_takes_a_place_of_a_whole_node(standing: Platform) -> None:
    pool = standing.pool("cpu").model_copy(update={"workers_per_node": 4, "cpus": 9.0})
    large = standing.model_copy(update={"pools": (pool, standing.pool("gpu"))})
    own = run_objects(warm_run(workers="2", warm=False), large, "team").plan
    plan = run_objects(warm_run(workers="2"), large, "team").plan
    assert (plan.nodes, plan.workers_per_node) == (1, 2)
    # Two workers on half a node of their own would have the CPU of Ray Data less between them.
    assert (own.cpus_per_worker, plan.cpus_per_worker) == (2, 2)
    rows = {row.name: row for row in explain_plan(plan, warm_run(), large)}
    assert "has 8 places: 2 nodes of pool cpu with 4 workers each" in rows["cluster"].why
    assert not {"head", "nodes", "after success"} & rows.keys()


@pytest.mark.parametrize(
    ("settings", "workers", "problem"),
    [
        (
            (),
            "4",
            "needs 4 nodes, and the standing cluster trainyard has 2 of pool cpu, with 1 worker",
        ),
        (("resources.pool=gpu",), "2", "resources.pool = gpu: its workers are of pool cpu"),
        (("image=registry/other:1",), "2", "image = registry/other:1: its pods have the image"),
        (("secrets.HF_TOKEN={name: hub, key: token}",), "2", "secrets (HF_TOKEN)"),
        (("notify={secret: {name: hub, key: chat}}",), "2", "notify.secret.name = hub"),
        (("queue={name: team}",), "2", "queue: a queue system admits pods"),
        (("faults.spares=1",), "2", "faults.spares = 1: its free places are the spare ones"),
        (("resources.data={nodes: 1}", "data.loader=ray"), "2", "there are no data nodes"),
        ((), "1:2", "the number of workers is fixed"),
        (("resources.cluster=other",), "2", "is no standing cluster of the platform"),
    ],
)
def test_what_its_pods_cannot_give_is_refused_with_the_reason(
    standing: Platform, settings: tuple[str, ...], workers: str, problem: str
) -> None:
    is_named = any(each.startswith("resources.cluster") for each in settings)
    with pytest.raises(ConfigError) as raised:
        job_of(warm_run(*settings, workers=workers, warm=not is_named), standing)
    assert problem in str(raised.value)


def test_gpus_and_a_platform_without_a_standing_cluster_are_refused(
    platform: Platform, standing: Platform
) -> None:
    with pytest.raises(ConfigError, match="the platform has no standing cluster"):
        job_of(warm_run(), platform)
    with pytest.raises(ConfigError, match="pool cpu has no GPUs"):
        job_of(load_run(ROOT / "examples/digits.yaml", gpus=8, warm=True), standing)


def test_devices_of_a_network_are_refused_where_they_would_be_needed(standing: Platform) -> None:
    cluster = StandingCluster(name="trainyard", pool="gpu", nodes=2)
    platform = standing.model_copy(update={"standing_cluster": cluster})
    efa = ("network.preset=efa", "network.devices_per_node=32")
    one, two = (
        load_run(ROOT / "examples/digits.yaml", efa, gpus=gpus, warm=True) for gpus in (8, 16)
    )
    assert driver_variables(job_of(one, platform))["NCCL_DEBUG"] == "WARN"
    with pytest.raises(ConfigError, match=r"needs 32 vpc\.amazonaws\.com/efa"):
        job_of(two, platform)


def test_a_cluster_that_gives_nodes_back_tells_its_places(standing: Platform) -> None:
    document = {"name": "trainyard", "pool": "cpu", "nodes": 2, "idleMinutes": 15}
    cluster = StandingCluster.model_validate(document)
    idle = standing.model_copy(update={"standing_cluster": cluster})
    assert PLACES_VARIABLE not in driver_variables(job_of(warm_run(), standing))
    assert driver_variables(job_of(warm_run(), idle))[PLACES_VARIABLE] == "2"
    rows = explain_plan(run_objects(warm_run(), idle, "team").plan, warm_run(), idle)
    assert "idle for 15 min it deletes its worker pods" in rows[0].why


def test_a_platform_queue_has_no_part_in_it(standing: Platform) -> None:
    queue = type(standing.queue)(system="kueue", name="team")
    job = job_of(warm_run(), standing.model_copy(update={"queue": queue}))
    assert "suspend" not in job["spec"]
    assert not any("kueue" in label for label in job["metadata"]["labels"])


def test_code_that_is_too_large_for_a_ray_job_is_refused_with_its_size(
    standing: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainyard.planning.driver_variables.JOB_LIMIT_KIB", 1)
    with pytest.raises(
        ConfigError, match=r"take \d KiB, and a Ray job on a standing cluster may have 1"
    ):
        job_of(warm_run(), standing)


def test_the_git_revision_changes_no_name(standing: Platform) -> None:
    job = job_of(warm_run(), standing)
    source = GitState(revision="a" * 40, is_dirty=False)
    sent = with_source(job, source)
    assert sent["metadata"] == job["metadata"]
    found = json.loads(driver_variables(sent)[submission.SOURCE_VARIABLE])
    assert found == json.loads(source.model_dump_json())
    assert diff_jobs(sent, job, live=True) == ()


def test_the_config_is_compared_between_both_kinds_of_cluster(standing: Platform) -> None:
    before = job_of(warm_run(warm=False), standing) | {"status": {"jobStatus": "RUNNING"}}
    after = job_of(warm_run(), standing)
    require_same_identity([before], after)
    other = job_of(warm_run("train.model.name=resnet34"), standing)
    with pytest.raises(ConfigError, match="would train another model"):
        require_same_identity([before], other)
    changed = diff_jobs(
        after | {"status": {}}, job_of(warm_run("train.epochs=99"), standing), live=True
    )
    assert [(one.path, one.effect) for one in changed] == [("config.train.epochs", "next attempt")]


JOB: Object = {
    "metadata": {"name": "a-11111111", "labels": {"trainyard.io/run": "a"}},
    "spec": {"clusterSelector": {"ray.io/cluster": "trainyard"}},
    "status": {"jobId": "a-11111111-xxxxx"},
}
LOG = "[a-11111111-xxxxx] one\n[b-22222222-yyyyy] two\nthree\n[a-11111111-xxxxx] error: four\n"


def test_a_driver_reads_only_its_own_lines_of_a_shared_log() -> None:
    assert log_of_driver(JOB, LOG) == "one\nerror: four\n"
    assert [*lines_of_driver(JOB | {"status": {}}, LOG.splitlines())] == []
    own: Object = {"spec": {"rayClusterSpec": {}}}
    assert log_of_driver(own, LOG) == LOG


@pytest.mark.parametrize(("last", "held_by"), [(1, 1), (2, 4), (3, 4)])
def test_the_last_lines_of_a_driver_are_among_those_of_others(last: int, held_by: int) -> None:
    assert lines_that_hold(JOB, LOG.splitlines(), last) == held_by


def test_a_run_without_its_places_is_queued_behind_named_runs() -> None:
    status = RunStatus(submission="a-11111111", phase="running", ran=True)
    place = {"position": 2, "workers": 2, "places": 4, "behind": ["b", "c", "d", "e"]}
    queued = with_place(status, place, JOB)
    assert queued.phase == "queued"
    assert queued.message == (
        "waits for 2 of the 4 places of cluster trainyard at position 2, behind b, c, d and 1 more"
    )
    assert with_place(status, place | {"position": 0, "behind": []}, JOB) == status
    assert with_place(status, None, JOB) == status


def test_suspend_is_refused_in_words() -> None:
    from tests.launcher.fake_cluster import FakeCluster
    from trainyard.submission.control import suspend_job

    cluster: Any = FakeCluster()
    with pytest.raises(ClusterError, match="where KubeRay suspends no RayJob"):
        suspend_job(cluster, JOB)
