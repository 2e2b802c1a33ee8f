"""`notify`: one message when a run has ended, whatever ended it, and none before."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from attempts import Attempts, wait_for
from pydantic import ValidationError
from training import small_config
from webhook import Webhook, webhook

from trainyard_trainer.config.notify import NOTIFY_VARIABLE, OUTCOMES, Notify
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.errors import ConfigError, RunError
from trainyard_trainer.notices.ends import RETRY_S, DriverEnd, judge, notices
from trainyard_trainer.notices.message import message_of, without_secrets
from trainyard_trainer.notices.reporting import reported_end
from trainyard_trainer.notices.sender import send, webhook_address
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.ownership.lease import RunIsLive
from trainyard_trainer.run_folder.stop_signals import Leaving, StoppedBySignal

ALONE = ["--without-ray"]
MESSAGE = message_of("digits", "failed", error="no & data", summary={}, submission=None)


@pytest.fixture
def hook() -> Iterator[Webhook]:
    with webhook() as server:
        yield server


def cluster(number: int, submission: str = "digits-1a2b3c4d") -> dict[str, str]:
    """What a driver has in its environment, in the RayCluster of this number."""
    return {"RAY_CLUSTER_NAME": f"{submission}-c{number}"}


def config_of(storage: Path, notify: Notify, **changes: Any) -> TrainerConfig:
    return small_config(storage, **changes).model_copy(update={"notify": notify})


def end_with(config: TrainerConfig, error: BaseException | None, **environment: str) -> None:
    """What the driver does at its end."""
    expected = nullcontext() if error is None else pytest.raises(type(error))
    with expected, reported_end(config, environment):
        if error is not None:
            raise error


# Whole attempts.


@pytest.mark.ci
@pytest.mark.parametrize("environment", [{}, cluster(1)], ids=["laptop", "cluster"])
def test_a_run_that_succeeds_sends_one_message(
    attempts: Attempts, hook: Webhook, environment: dict[str, str]
) -> None:
    config = config_of(attempts.storage, Notify(url=hook.url))
    output = attempts.finish(config, 0, environment, ALONE)
    (document,) = hook.received
    assert document["outcome"] == "succeeded"
    assert document["run"] == config.name
    assert document["title"] == f"trainyard: {config.name} succeeded"
    assert "val_loss" in document["message"]
    assert "report.html" in document["message"]
    assert "notify: the message was delivered" in output


@pytest.mark.ci
def test_a_run_that_is_killed_and_resumed_sends_one_message(
    attempts: Attempts, hook: Webhook
) -> None:
    config = config_of(attempts.storage, Notify(url=hook.url), checkpoint__every_s=0.2)
    process = attempts.start(config, cluster(1), ALONE)
    assert wait_for(lambda: list(attempts.storage.glob("*/checkpoints/*/manifest.json")), 60)
    process.kill()
    process.wait()
    assert hook.received == []
    attempts.finish(config, 0, cluster(2), ALONE)
    assert hook.outcomes() == ["succeeded"]


@pytest.mark.ci
def test_a_run_that_is_stopped_sends_one_message(attempts: Attempts, hook: Webhook) -> None:
    config = config_of(attempts.storage, Notify(url=hook.url), train__epochs=500)
    process = attempts.start(config, cluster(1), ALONE)
    assert wait_for(lambda: attempts.read(config, "metrics.jsonl"), 60)
    process.terminate()
    process.communicate()
    assert hook.outcomes() == ["stopped"]
    assert "was stopped by SIGTERM" in hook.received[0]["message"]


@pytest.mark.ci
def test_a_wrong_config_is_reported_once_by_all_its_attempts(
    attempts: Attempts, hook: Webhook
) -> None:
    config = config_of(attempts.storage, Notify(url=hook.url), data__source="/there/is/no/data")
    for number in (1, 2, 3):
        attempts.finish(config, 2, cluster(number), ALONE)
    assert hook.outcomes() == ["failed"]
    assert "/there/is/no/data" in hook.received[0]["error"]


@pytest.mark.ci
def test_the_address_of_a_secret_is_in_no_file_and_no_output(
    attempts: Attempts, hook: Webhook
) -> None:
    notify = Notify.model_validate({"secret": {"name": "chat", "key": "url"}})
    config = config_of(attempts.storage, notify, data__source="/there/is/no/data")
    environment = {NOTIFY_VARIABLE: f"{hook.url}/T0KEN-T0KEN"}
    output = attempts.finish(config, 2, environment | cluster(1), ALONE)
    assert hook.outcomes() == ["failed"]
    files = [file for file in attempts.storage.rglob("*") if file.is_file()]
    assert len(files) > 4
    assert "T0KEN" not in output
    assert not any(b"T0KEN" in file.read_bytes() for file in files)
    # Nor where the receiver is away.
    environment = {NOTIFY_VARIABLE: "https://127.0.0.1:9/T0KEN-T0KEN"}
    output = attempts.finish(config, 2, environment | cluster(9, "digits-other"), ALONE)
    assert "notify: the message was not delivered" in output
    assert "T0KEN" not in output


# The end of a driver, in this process.


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "succeeded"),
        (StoppedBySignal(), "stopped"),
        (ConfigError("no such key"), "failed"),
        (ValueError("a bug"), "failed"),
    ],
    ids=["succeeded", "stopped", "config", "bug"],
)
def test_each_outcome_on_a_laptop(
    tmp_path: Path, hook: Webhook, error: BaseException | None, outcome: str
) -> None:
    end_with(config_of(tmp_path, Notify(url=hook.url)), error)
    assert hook.outcomes() == [outcome]
    assert not list(tmp_path.rglob("notices/*"))


@pytest.mark.parametrize("error", [Leaving(), RunIsLive("attempt 1 lives")], ids=repr)
def test_a_run_that_goes_on_in_another_process_sends_nothing(
    tmp_path: Path, hook: Webhook, error: BaseException
) -> None:
    end_with(config_of(tmp_path, Notify(url=hook.url)), error, **cluster(1))
    assert hook.received == []
    assert not list(tmp_path.rglob("notices/*"))


def test_only_the_last_of_the_attempts_that_fail_reports_it(tmp_path: Path, hook: Webhook) -> None:
    config = config_of(tmp_path, Notify(url=hook.url), faults__retries=2)
    for number in (1, 2):
        end_with(config, RunError("a node is gone"), **cluster(number))
    assert hook.received == []
    end_with(config, RunError("a node is gone"), **cluster(3))
    assert hook.outcomes() == ["failed"]
    # The same RayJob, created once more.
    end_with(config, RunError("a node is gone"), **cluster(4))
    end_with(config, None, **cluster(5))
    assert hook.outcomes() == ["failed", "succeeded"]


def test_a_second_driver_in_the_same_ray_cluster_sends_nothing(
    tmp_path: Path, hook: Webhook
) -> None:
    config = config_of(tmp_path, Notify(url=hook.url))
    end_with(config, None, **cluster(1))
    end_with(config, None, **cluster(1))
    assert hook.outcomes() == ["succeeded"]


def test_only_the_outcomes_that_are_asked_for(tmp_path: Path, hook: Webhook) -> None:
    config = config_of(tmp_path, Notify(url=hook.url, outcomes=("failed",)), faults__retries=0)
    end_with(config, None, **cluster(1))
    end_with(config, StoppedBySignal(), **cluster(2))
    end_with(config, None)
    assert hook.received == []
    end_with(config, RunError("a node is gone"), **cluster(3))
    assert hook.outcomes() == ["failed"]


@pytest.mark.parametrize("status", [404, 500])
def test_a_receiver_that_refuses_is_named_once_with_its_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    with webhook(status) as hook:
        end_with(config_of(tmp_path, Notify(url=hook.url)), None, **cluster(1))
        assert len(hook.received) == 1
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if "notify" in line] == said
    assert said[0].endswith(f"the receiver (http) answered {status}")
    ((_, end),) = notices(RunFolder.open(str(tmp_path), "small"))
    assert end.state == "not delivered"


def test_a_receiver_that_does_not_answer_costs_a_bounded_time() -> None:
    with webhook(delay_s=60) as hook:
        began = time.monotonic()
        assert send(hook.url, MESSAGE, limit_s=1.0) == "it has not answered in time"
        assert time.monotonic() - began < 5


def test_a_missing_address_is_said_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notify = Notify.model_validate({"secret": {"name": "chat", "key": "url"}})
    end_with(config_of(tmp_path, notify), None, **cluster(1))
    assert capsys.readouterr().out.splitlines() == [
        "notify: key url of Secret chat is missing: no message will be sent"
    ]


def test_the_processes_of_torchrun_send_one_message(tmp_path: Path, hook: Webhook) -> None:
    config = config_of(tmp_path, Notify(url=hook.url))
    for rank in "012":
        end_with(config, None, RANK=rank)
    assert hook.outcomes() == ["succeeded"]


# What an end means.

END: dict[str, Any] = {
    "submission": "a-1",
    "error": "x",
    "is_final": False,
    "retries": 2,
    "started": 1000.0,
    "now": 1100.0,
}
FIRST = judge(None, ray_cluster="c1", outcome="failed", **END)


def after(before: DriverEnd, **changes: Any) -> DriverEnd:
    return judge(before, **{"ray_cluster": "c2", "outcome": "failed", **END, **changes})


def test_the_first_failure_of_three_attempts_is_no_end() -> None:
    assert (FIRST.is_end, FIRST.retries_left) == (False, 2)
    second = after(FIRST)
    third = after(second, ray_cluster="c3")
    assert (second.is_end, second.retries_left) == (False, 1)
    assert (third.is_end, third.is_repeated, third.retries_left) == (True, False, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"submission": "a-2"},
        {"started": END["now"] + RETRY_S + 1},
        {"ray_cluster": "c1"},
    ],
    ids=["another submission", "long ago", "the same attempt"],
)
def test_what_does_not_continue_the_count(changes: dict[str, Any]) -> None:
    assert after(FIRST, **changes).failures == 1


def test_a_final_error_is_the_end_and_its_retries_repeat_it() -> None:
    first = judge(None, ray_cluster="c1", outcome="failed", **END | {"is_final": True})
    assert (first.is_end, first.is_repeated) == (True, False)
    second = after(first, is_final=True)
    third = after(second, ray_cluster="c3", is_final=True)
    assert [second.is_repeated, third.is_repeated] == [True, True]
    assert not after(third, ray_cluster="c4", is_final=True).is_repeated, "a new submission"


def test_a_rayjob_that_is_created_again_after_its_success_repeats_it() -> None:
    first = after(FIRST, outcome="succeeded")
    again = after(first, ray_cluster="c3", outcome="succeeded")
    assert (first.is_repeated, again.is_repeated, again.is_end) == (False, True, True)
    assert not after(first, submission="a-2", outcome="succeeded").is_repeated, "another submission"


@pytest.mark.parametrize("outcome", ["succeeded", "stopped"])
def test_an_end_that_is_no_failure_is_always_the_end(outcome: str) -> None:
    end = after(FIRST, outcome=outcome)
    assert (end.is_end, end.failures, end.retries_left) == (True, 0, 0)
    assert after(replace(end), ray_cluster="c3").failures == 1


# Addresses and messages.


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("slack://T/B/x", "slack is no scheme of notify.url"),
        ("https://hooks.slack.com/services/T/B/x", "the token of a chat"),
        ("https://prod-1.westeurope.logic.azure.com/workflows/x", "the token of a chat"),
        ("https://user:pass@example.com/", "must not contain a password"),
        ("example.com/hook", "must be an address such as"),
        ("https:///hook", "must be an address such as"),
        ("https://[::1/hook", "must be an address such as"),
    ],
)
def test_an_address_that_everybody_could_misuse_is_refused_in_words(url: str, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Notify(url=url)


@pytest.mark.parametrize(
    "document",
    [{}, {"outcomes": ["failed"]}, {"url": "http://a/", "secret": {"name": "a", "key": "b"}}],
)
def test_a_receiver_has_one_address(document: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="url"):
        Notify.model_validate(document)


def test_messages_can_be_turned_off() -> None:
    assert Notify.model_validate({"outcomes": []}).outcomes == ()
    assert Notify(url="http://a/").outcomes == OUTCOMES


def test_the_parameters_of_a_webhook_stay_its_own(hook: Webhook) -> None:
    assert webhook_address("https://a:8/p?x=1&y=", {"run": "b c"}) == (
        "jsons://a:8/p?-x=1&-y=&%3Arun=b%20c"
    )
    assert webhook_address("slack://a/b", {"run": "b"}) == "slack://a/b"
    assert send(f"{hook.url}?x=1", MESSAGE) is None
    assert hook.received[0]["error"] == "no & data"


def test_an_unknown_scheme_is_named_without_the_rest_of_the_address() -> None:
    problem = send("slakc://T0KEN/B/x", MESSAGE)
    assert problem is not None
    assert "'slakc'" in problem
    assert "T0KEN" not in problem


def test_values_of_secrets_are_left_out_of_the_message() -> None:
    assert (
        without_secrets("401 for token abc123 at hub", ["abc123", ""]) == "401 for token *** at hub"
    )


def test_values_of_secrets_are_in_no_notice_and_no_message(tmp_path: Path, hook: Webhook) -> None:
    secrets = {"HF_TOKEN": {"name": "hub", "key": "token"}}
    config = config_of(tmp_path, Notify(url=hook.url), secrets=secrets, faults__retries=0)
    end_with(config, RunError("401 for abc123"), HF_TOKEN="abc123", **cluster(1))
    assert hook.received[0]["error"] == "401 for ***"
    assert "abc123" not in str(hook.received)
    assert not any(b"abc123" in file.read_bytes() for file in tmp_path.rglob("*.json"))
