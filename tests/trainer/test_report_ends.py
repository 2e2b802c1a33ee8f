"""The CronJob of `notify.watch`: it reports the ends of runs that no driver has reported, once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from pod_api import pod_api
from test_notify import cluster, config_of, end_with
from webhook import Webhook, webhook

from trainyard_trainer.config.notify import Notify
from trainyard_trainer.errors import Diverged, RunError
from trainyard_trainer.notices.api_server import ApiServer
from trainyard_trainer.notices.rayjobs import EndedRayJob, ended_rayjobs
from trainyard_trainer.run_folder.stop_signals import StoppedBySignal
from trainyard_trainer.tools.pods.report_ends import RETRY_S, SETTLE_S, report_ends

NAME = "digits-1a2b3c4d"
CHAT = Notify.model_validate({"secret": {"name": "chat", "key": "url"}})
FAILED = {"jobDeploymentStatus": "Failed", "reason": "SubmissionFailed"}
SUCCEEDED = {"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}
STOPPED = {"jobDeploymentStatus": "Complete", "jobStatus": "STOPPED"}


@pytest.fixture
def hook() -> Iterator[Webhook]:
    with webhook() as server:
        yield server


def stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def rayjob(
    storage: Path, notify: Notify | None, status: dict[str, Any], **metadata: Any
) -> dict[str, Any]:
    """A RayJob that was created an hour ago and has ended now."""
    config = config_of(storage, Notify(url="http://a/")).model_copy(update={"notify": notify})
    env = [{"name": "TRAINYARD_CONFIG", "value": config.model_dump_json().replace("$", "$$")}]
    head = {"template": {"spec": {"containers": [{"env": env}]}}}
    now = time.time()
    return {
        "metadata": {
            "name": NAME,
            "uid": "u-1",
            "creationTimestamp": stamp(now - 3600),
            **metadata,
        },
        "spec": {"rayClusterSpec": {"headGroupSpec": head}},
        "status": {"endTime": stamp(now), **status},
    }


def jobs_of(*objects: dict[str, Any]) -> list[EndedRayJob]:
    return [*ended_rayjobs(lambda path: {"items": objects, "metadata": {}}, "team")]


def report(hook: Webhook, *objects: dict[str, Any], later_s: float = 600.0) -> list[str]:
    return [*report_ends(jobs_of(*objects), hook.url, "chat/url", time.time() + later_s)]


def test_a_run_whose_driver_is_gone_is_reported_once(tmp_path: Path, hook: Webhook) -> None:
    job = rayjob(tmp_path, CHAT, FAILED)
    assert report(hook, job) == [f"{NAME} failed: the message was delivered"]
    assert report(hook, job) == []
    (document,) = hook.received
    assert document["outcome"] == "failed"
    assert document["error"] == "SubmissionFailed"
    assert document["submission"] == NAME


@pytest.mark.parametrize(
    ("status", "error"),
    [(SUCCEEDED, None), (STOPPED, StoppedBySignal()), (FAILED, Diverged("NaN"))],
    ids=["succeeded", "stopped", "failed"],
)
def test_what_a_driver_has_reported_is_not_reported_again(
    tmp_path: Path, hook: Webhook, status: dict[str, Any], error: BaseException | None
) -> None:
    end_with(config_of(tmp_path, Notify(url=hook.url)), error, **cluster(1))
    if error is not None:
        end_with(config_of(tmp_path, Notify(url=hook.url)), error, **cluster(2))
    before = list(hook.received)
    assert report(hook, rayjob(tmp_path, Notify(url=hook.url), status)) == []
    assert hook.received == before


def test_the_error_of_the_last_driver_is_told_where_the_others_were_killed(
    tmp_path: Path, hook: Webhook
) -> None:
    config = config_of(tmp_path, Notify(url=hook.url), faults__retries=2)
    end_with(config, RunError("a node is gone"), **cluster(3))
    assert hook.received == []
    report(hook, rayjob(tmp_path, CHAT, FAILED))
    assert [document["error"] for document in hook.received] == ["a node is gone"]


def test_a_message_is_sent_again_where_the_receiver_was_down(tmp_path: Path, hook: Webhook) -> None:
    with webhook(503) as down:
        end_with(config_of(tmp_path, Notify(url=down.url)), None, **cluster(1))
    job = rayjob(tmp_path, CHAT, SUCCEEDED)
    report(hook, job)
    report(hook, job)
    assert hook.outcomes() == ["succeeded"]


def test_a_rayjob_of_the_same_name_is_reported_by_itself(tmp_path: Path, hook: Webhook) -> None:
    report(hook, rayjob(tmp_path, CHAT, FAILED))
    later = {"uid": "u-2", "creationTimestamp": stamp(time.time() + 1000)}
    again = rayjob(tmp_path, CHAT, FAILED, **later)
    again["status"]["endTime"] = stamp(time.time() + 2000)
    report(hook, again, later_s=3000)
    assert hook.outcomes() == ["failed", "failed"]


@pytest.mark.parametrize(
    ("job", "later_s"),
    [
        ({"status": {"jobDeploymentStatus": "Retrying"}}, 600.0),
        ({"status": {"jobDeploymentStatus": "Suspended"}}, 600.0),
        ({"status": FAILED}, SETTLE_S / 2),
        ({"status": FAILED}, RETRY_S + 60),
        ({"status": FAILED, "notify": None}, 600.0),
        ({"status": FAILED, "notify": Notify(outcomes=())}, 600.0),
        ({"status": SUCCEEDED, "notify": CHAT.model_copy(update={"outcomes": ("failed",)})}, 600.0),
    ],
    ids=["retrying", "suspended", "just now", "long ago", "no receiver", "silent", "not asked for"],
)
def test_what_is_not_reported(
    tmp_path: Path, hook: Webhook, job: dict[str, Any], later_s: float
) -> None:
    made = rayjob(tmp_path, job.get("notify", CHAT), job["status"])
    assert report(hook, made, later_s=later_s) == []
    assert hook.received == []


def test_a_receiver_of_another_secret_is_named_and_left_alone(
    tmp_path: Path, hook: Webhook
) -> None:
    other = Notify.model_validate({"secret": {"name": "mine", "key": "url"}})
    (line,) = report(hook, rayjob(tmp_path, other, FAILED))
    assert line == f"{NAME} failed: its receiver is in a Secret that is not the platform's"
    assert hook.received == []


def test_a_foreign_rayjob_is_passed_over(tmp_path: Path, hook: Webhook) -> None:
    foreign, old = (rayjob(tmp_path, CHAT, FAILED) for _ in range(2))
    container = foreign["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    container[0] = {}
    old["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["env"] = [
        {"name": "TRAINYARD_CONFIG", "value": '{"name": "old", "keys": "of another version"}'}
    ]
    assert report(hook, foreign, old) == []


def test_rayjobs_come_from_the_api_server_page_by_page(tmp_path: Path) -> None:
    jobs = {"2": ("b-1", STOPPED), "": ("a-1", FAILED)}

    def page(path: str) -> dict[str, Any]:
        number = "2" if "continue=2" in path else ""
        name, status = jobs[number]
        metadata = {} if number else {"continue": "2"}
        return {"items": [rayjob(tmp_path, CHAT, status, name=name)], "metadata": metadata}

    with pod_api(tmp_path, page) as api:
        server = ApiServer.of(api.environment, api.account)
        found = [(job.name, job.outcome) for job in ended_rayjobs(server.get, server.namespace)]
    assert found == [("a-1", "failed"), ("b-1", "stopped")]
    assert api.tokens == {"Bearer t0ken"}
    assert api.asked[0][1].startswith(
        "/apis/ray.io/v1/namespaces/team/rayjobs?labelSelector=trainyard.io"
    )
