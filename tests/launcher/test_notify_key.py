"""`notify`: who is told comes from the run file or the platform, and the address only from a Secret."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from test_permissions import EXAMPLES, PLATFORM, permitting, refusal, rows, with_keys

from trainyard.errors import ConfigError
from trainyard.planning.objects import run_objects
from trainyard.planning.plan import plan_run
from trainyard.platform import Platform
from trainyard.submission.run_folder.reproduce import read_submission, run_file
from trainyard_trainer.config.notify import NOTIFY_VARIABLE, Notify
from trainyard_trainer.run_files import submission
from trainyard_trainer.run_files.standing_cluster import driver_variables

CHAT = {"secret": {"name": "chat", "key": "url"}}
HOOK = {"url": "https://hooks.example.com/runs"}
each_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)


def told(platform: Platform, **notify: Any) -> Platform:
    return platform.model_copy(update={"notify": Notify.model_validate(notify)})


@each_example
def test_the_address_is_a_reference_of_the_head_alone(example: Any) -> None:
    run = with_keys(example, notify=CHAT)
    shape = run_objects(run, permitting(secrets=["chat"]), "team").job["spec"]["rayClusterSpec"]
    head, *workers = (
        group["template"]["spec"]["containers"][0]["env"]
        for group in (shape["headGroupSpec"], *shape["workerGroupSpecs"])
    )
    reference = {"name": "chat", "key": "url", "optional": True}
    assert [each for each in head if each["name"] == NOTIFY_VARIABLE] == [
        {"name": NOTIFY_VARIABLE, "valueFrom": {"secretKeyRef": reference}}
    ]
    assert NOTIFY_VARIABLE not in json.dumps(workers)


def test_the_platform_tells_its_receiver_unless_the_run_file_has_another() -> None:
    platform = told(PLATFORM, **CHAT)
    assert plan_run(with_keys(), platform, "team").trainer.notify == platform.notify
    own = with_keys(notify=HOOK)
    assert plan_run(own, platform, "team").trainer.notify == own.notify
    silent = plan_run(with_keys(notify={"outcomes": []}), platform, "team").trainer.notify
    assert silent is not None
    assert silent.outcomes == ()
    assert plan_run(with_keys(), PLATFORM, "team").trainer.notify is None


def test_the_plan_shows_who_is_told() -> None:
    assert rows(with_keys(), told(PLATFORM, **CHAT))["notify"] == (
        "succeeded, failed, stopped",
        "a message to chat/url when it has ended; from the platform",
    )
    silent = with_keys(notify={"outcomes": []})
    assert rows(silent)["notify"] == ("nothing", "no messages; from the run file")


def test_a_secret_is_refused_unless_the_administrator_names_it() -> None:
    run = with_keys(notify=CHAT)
    assert "notify.secret.name = chat: runs.secrets permits none" in refusal(run)
    assert plan_run(run, told(PLATFORM, **CHAT), "team")


@pytest.mark.parametrize(
    ("notify", "words"),
    [
        ({"url": "https://hooks.slack.com/services/T/B/x"}, "the token of a chat"),
        ({"url": "ntfys://topic"}, "ntfys is no scheme of notify.url"),
        ({"outcomes": ["failed"]}, "must have url or secret"),
        (CHAT | {"on": ["failed"]}, "on"),
    ],
)
def test_what_is_no_receiver_is_refused_in_words(notify: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        with_keys(notify=notify)


@pytest.mark.parametrize("notify", [None, HOOK, CHAT, {"outcomes": []}], ids=str)
def test_a_run_is_reproduced_with_its_own_receiver(notify: dict[str, Any] | None) -> None:
    platform = told(permitting(secrets=["chat"]), url="https://platform.example.com/")
    run = with_keys(**({} if notify is None else {"notify": notify}))
    job = run_objects(run, platform, "team").job
    variables = driver_variables(job)
    written = json.loads(variables[submission.VARIABLE]) | {
        "config": json.loads(variables["TRAINYARD_CONFIG"])
    }
    again = read_submission(json.dumps(written), "submission.json").run
    assert run_objects(again, platform, "team").job == job
    document = yaml.safe_load(yaml.safe_dump(run_file(again, None)))
    assert (document.get("notify") or {}).keys() == ({*notify, "outcomes"} if notify else set())
