"""Runs of a team in a queue of Kueue: how they are submitted, what is said of them, and their Workloads."""

from __future__ import annotations

import json
from pathlib import Path

from conftest import Object, Team, get, set_options, wait_for

LIMIT_S = 180.0
ENDLESS = 100000
"""A number of epochs with which no run ends before it is stopped."""


def submit(team: Team, name: str, *options: str, workers: str = "1", epochs: int = ENDLESS) -> None:
    settings = set_options(("train.model.image_size=16", f"train.epochs={epochs}"))
    run = ("examples/digits.yaml", "--workers", workers, "--detach", "--name", name)
    done(team, "submit", *run, *settings, *options)


def state(team: Team, name: str) -> Object:
    (found,) = team.status(name)["submissions"]
    return dict(found)


def await_phase(team: Team, name: str, *phases: str) -> Object:
    found: Object = wait_for(
        f"{name} is {phases}",
        lambda: (row := state(team, name))["phase"] in phases and row,
        LIMIT_S,
        seen=lambda: state(team, name),
    )
    return found


def await_message(team: Team, name: str, words: str, limit_s: float = 30) -> str:
    """Wait until `status` says these words of a run, and return the whole message."""
    found: str = wait_for(
        f"status says {words!r} of {name}",
        lambda: words in (message := state(team, name)["message"]) and message,
        limit_s,
        seen=lambda: state(team, name),
    )
    return found


def await_admission(team: Team, name: str) -> None:
    await_phase(team, name, "starting", "submitting", "running")


def done(team: Team, *command: str) -> str:
    """Run a command that must succeed, and return its output without line breaks."""
    ended = team.trainyard(*command)
    assert ended.returncode == 0, ended.stderr
    return " ".join((ended.stdout + ended.stderr).split())


def workloads(team: Team, name: str) -> list[Object]:
    """Return the Workloads of a run, oldest first. An elastic run has one for each of its sizes."""
    found: list[Object] = get("workloads.kueue.x-k8s.io", team.namespace)["items"]
    own = [
        each
        for each in found
        if each["metadata"]["ownerReferences"][0]["name"].startswith(f"{name}-")
    ]
    return sorted(own, key=lambda each: str(each["metadata"]["creationTimestamp"]))


def records(folder: Path, file: str) -> list[Object]:
    path = folder / file
    return list(map(json.loads, path.read_text().splitlines())) if path.exists() else []
