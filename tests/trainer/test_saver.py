"""Saving beside training: what is copied when, how much at once, and whose error is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from trainyard_trainer.checkpointing.saver import Saver, on_host

LIMIT_S = 30.0
"""A wait that takes longer has failed."""


class SlowStorage:
    """Takes each save, and ends it when the test says so."""

    def __init__(self) -> None:
        self.saved: list[Mapping[str, Any]] = []
        self.under_way = 0
        self.most = 0
        self.go_on = threading.Semaphore(0)

    def __call__(self, contents: Mapping[str, Any]) -> None:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        assert self.go_on.acquire(timeout=LIMIT_S)
        self.saved.append(contents)
        self.under_way -= 1


class FullDisk(Exception):
    """What a save fails with."""


def fail(contents: Mapping[str, Any]) -> None:
    raise FullDisk(f"no space for {contents['number']}")


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def aside(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_training_goes_on_while_a_save_is_under_way() -> None:
    storage = SlowStorage()
    with Saver(storage) as saver:
        assert not saver.is_busy
        saver.start(number=1)
        assert saver.is_busy
        assert storage.saved == []
        storage.go_on.release()
        saver.wait()
        assert not saver.is_busy
        assert storage.saved == [{"number": 1}]


def test_a_second_save_waits_for_the_first_and_never_more_than_one_is_under_way() -> None:
    storage = SlowStorage()
    with Saver(storage) as saver:
        saver.start(number=1)
        second = aside(lambda: saver.start(number=2))
        until(lambda: storage.under_way)
        second.join(0.05)
        assert second.is_alive()
        assert storage.saved == []
        storage.go_on.release()
        second.join(LIMIT_S)
        assert storage.saved == [{"number": 1}]
        storage.go_on.release()
    assert [saved["number"] for saved in storage.saved] == [1, 2]
    assert storage.most == 1


def test_leaving_waits_for_the_save_under_way() -> None:
    storage = SlowStorage()

    def train() -> None:
        with Saver(storage) as saver:
            saver.start(number=1)

    training = aside(train)
    until(lambda: storage.under_way)
    training.join(0.05)
    assert training.is_alive()
    storage.go_on.release()
    training.join(LIMIT_S)
    assert storage.saved == [{"number": 1}]


def test_what_training_changes_afterwards_does_not_reach_the_saved_copy() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        network(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()

    step()
    weights = {key: value.clone() for key, value in network.state_dict().items()}
    momentum = [state["momentum_buffer"].clone() for state in optimizer.state.values()]
    storage = SlowStorage()
    with Saver(storage) as saver:
        saver.start(model=network.state_dict(), state={"optimizer": optimizer.state_dict()})
        for _ in range(3):
            step()
        for group in optimizer.param_groups:
            group["lr"] = 7.0
        storage.go_on.release()
    (saved,) = storage.saved
    assert saved["model"].keys() == weights.keys()
    assert all(torch.equal(saved["model"][key], weights[key]) for key in weights)
    kept = saved["state"]["optimizer"]
    assert all(
        torch.equal(kept["state"][index]["momentum_buffer"], momentum[index])
        for index in range(len(momentum))
    )
    assert kept["param_groups"][0]["lr"] == 0.1


def test_a_copy_keeps_structure_and_shares_no_tensor() -> None:
    tensor = torch.arange(3)
    content = {"a": [tensor, (tensor, 1)], "b": {"c": tensor}, "d": "text", "e": None}
    copy = on_host(content)
    tensor.zero_()
    assert [copy["a"][0].tolist(), copy["a"][1][0].tolist(), copy["b"]["c"].tolist()] == [
        [0, 1, 2]
    ] * 3
    assert (copy["a"][1][1], copy["d"], copy["e"]) == (1, "text", None)
    assert isinstance(copy["a"][1], tuple)


def ask(saver: Saver) -> None:
    until(lambda: not saver.is_busy)


@pytest.mark.parametrize(
    "use", [ask, lambda saver: saver.start(number=2), Saver.wait], ids=["is_busy", "start", "wait"]
)
def test_the_error_of_a_save_surfaces_at_the_next_use(use: Callable[[Saver], object]) -> None:
    with Saver(fail) as saver:
        saver.start(number=1)
        with pytest.raises(FullDisk, match="no space for 1"):
            use(saver)
        # It is told once: what follows is a matter of its own.
        assert not saver.is_busy
        saver.wait()


def test_the_error_of_the_last_save_surfaces_at_the_end() -> None:
    def train() -> None:
        with Saver(fail) as saver:
            saver.start(number=1)

    with pytest.raises(FullDisk, match="no space for 1"):
        train()


def test_an_error_of_the_loop_is_not_replaced_by_that_of_the_save() -> None:
    def train() -> None:
        with Saver(fail) as saver:
            saver.start(number=1)
            raise ValueError("of the loop")

    with pytest.raises(ValueError, match="of the loop"):
        train()


def test_after_an_error_of_the_loop_the_save_under_way_still_ends() -> None:
    storage = SlowStorage()

    def train() -> None:
        with Saver(storage) as saver:
            saver.start(number=1)
            storage.go_on.release()
            raise ValueError("of the loop")

    with pytest.raises(ValueError, match="of the loop"):
        train()
    assert storage.saved == [{"number": 1}]
