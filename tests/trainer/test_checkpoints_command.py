"""Looking at the checkpoints of a run, and clearing them up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.saved_run import damage, open_small, save
from trainyard_trainer.checkpointing.checkpoint import (
    MODEL,
    Checkpoints,
)
from trainyard_trainer.errors import ConfigError, RunError
from trainyard_trainer.recipes.saved_model import deliver
from trainyard_trainer.run_files.names import CHECKPOINT_MANIFEST
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.ownership.lease import Lease
from trainyard_trainer.tools.checkpoints import age_text, main


def run(folder: RunFolder, name: str, *options: str) -> int:
    path, _, run_name = folder.root.rpartition("/")
    return main([name, *options, "--storage", path, "--", run_name])


def listed(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    run(folder, "ls", "--json")
    return {record["name"]: record for record in json.loads(capsys.readouterr().out)}


def test_a_table_shows_the_newest_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = open_small(tmp_path)
    save(folder, 1, accuracy=0.9)
    save(folder, 2, accuracy=0.8)
    assert run(folder, "ls") == 0
    head, newest, best = capsys.readouterr().out.splitlines()
    assert head.split() == [
        *("checkpoint", "epoch", "step", "samples", "size", "age"),
        *("val_accuracy", "val_loss", "marks"),
    ]
    assert newest.split()[:4] == ["s000000000200-a1.1", "2", "20", "200"]
    assert newest.split()[-3:] == ["0.8000", "0.2000", "newest"]
    assert best.split()[-3:] == ["0.9000", "0.1000", "best"]


def test_marks_tell_what_a_checkpoint_is_good_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = open_small(tmp_path)
    best, delivered, newest = (save(folder, n, accuracy=1 - n / 10) for n in (1, 2, 3))
    cut = save(folder, 4)
    begun = save(folder, 5)
    checkpoints = Checkpoints(folder)
    deliver(folder, checkpoints, checkpoints.read_manifest(delivered))
    folder.write(checkpoints.path(cut, MODEL), b"")
    folder.delete(checkpoints.path(begun, CHECKPOINT_MANIFEST))

    found = listed(folder, capsys)
    assert {name: record["marks"] for name, record in found.items()} == {
        begun: ["uncommitted"],
        cut: ["damaged"],
        newest: ["newest"],
        delivered: ["delivered"],
        best: ["best"],
    }
    assert found[cut]["problem"].startswith("model.pt is 0 bytes long, its manifest says")
    assert found[begun]["samples"] is None
    assert found[newest]["bytes"] > 200


def test_in_mid_epoch_no_accuracy_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = open_small(tmp_path)
    name = save(folder, 3, steps_in_epoch=4, accuracy=0.9)
    record = listed(folder, capsys)[name]
    assert (record["epoch"], record["samples"], record["val_accuracy"]) == (3, 340, None)
    assert record["marks"] == ["newest"]


def test_intact_checkpoints_are_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = open_small(tmp_path)
    name = save(folder, 1)
    assert run(folder, "verify") == 0
    assert capsys.readouterr().out.splitlines()[1].split() == [name, "intact"]


def test_a_changed_byte_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = open_small(tmp_path)
    first, second = save(folder, 1), save(folder, 2)
    damage(folder, first)
    with pytest.raises(RunError, match=rf"damaged in .*: {first}\n"):
        run(folder, "verify", "--json")
    assert json.loads(capsys.readouterr().out) == [
        {"name": second, "state": "intact", "problem": None},
        {
            "name": first,
            "state": "damaged",
            "problem": "model.pt is not what was written: its SHA-256 differs",
        },
    ]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (["--keep", "1"], [4]),
        (["--keep", "2"], [4, 3]),
        (["--keep", "9"], [4, 3, 2, 1]),
        (["--keep", "1", "--keep-best"], [4, 2]),
        (["--keep", "3", "--keep-best"], [4, 3, 2]),
        (["--keep", "1", "--keep-every-epochs", "3"], [4, 3]),
        (["--keep", "1", "--dry-run"], [4, 3, 2, 1]),
    ],
)
def test_the_newest_and_the_best_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], kept: list[int]
) -> None:
    folder = open_small(tmp_path)
    names = {n: save(folder, n, accuracy=0.9 if n == 2 else 0.1) for n in range(1, 5)}
    assert run(folder, "prune", *options) == 0
    assert Checkpoints(folder).names() == [names[n] for n in kept]
    deleted = [line for line in capsys.readouterr().out.splitlines() if "delete" in line]
    assert len(deleted) == (3 if "--dry-run" in options else 4 - len(kept))


def test_what_cannot_be_used_goes_and_does_not_count(tmp_path: Path) -> None:
    folder = open_small(tmp_path)
    names = [save(folder, n) for n in range(1, 6)]
    damage(folder, names[4])
    damage(folder, names[2])
    folder.delete(Checkpoints(folder).path(names[0], CHECKPOINT_MANIFEST))
    run(folder, "prune", "--keep", "2")
    assert Checkpoints(folder).names() == [names[3], names[1]]


def test_what_an_overtaken_attempt_wrote_is_not_the_newest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = open_small(tmp_path)
    first = save(folder, 1)
    folder.append(folder.starts, '{"attempt": 2, "group": 1, "samples": 100}\n')
    late = save(folder, 9)
    assert listed(folder, capsys)[late]["marks"] == ["overtaken"]
    run(folder, "prune", "--keep", "1")
    assert Checkpoints(folder).names() == [first]


def test_a_damaged_best_makes_room_for_the_next_best(tmp_path: Path) -> None:
    folder = open_small(tmp_path)
    names = [save(folder, n, accuracy=1 - n / 10) for n in range(1, 5)]
    damage(folder, names[0])
    run(folder, "prune", "--keep", "1", "--keep-best")
    assert Checkpoints(folder).names() == [names[3], names[1]]


def test_before_the_first_epoch_has_ended_none_is_the_best(tmp_path: Path) -> None:
    folder = open_small(tmp_path)
    _, newest = (save(folder, 0, steps_in_epoch=step) for step in (2, 4))
    run(folder, "prune", "--keep", "1", "--keep-best")
    assert Checkpoints(folder).names() == [newest]


def test_nothing_goes_where_nothing_is_intact(tmp_path: Path) -> None:
    folder = open_small(tmp_path)
    name = save(folder, 1)
    damage(folder, name)
    with pytest.raises(RunError, match="none was deleted"):
        run(folder, "prune", "--keep", "1")
    assert Checkpoints(folder).names() == [name]


def test_checkpoints_of_another_version_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = open_small(tmp_path)
    old, new = save(folder, 1), save(folder, 2)
    folder.write(Checkpoints(folder).path(old, CHECKPOINT_MANIFEST), '{"format": 0}')
    run(folder, "prune", "--keep", "1")
    assert Checkpoints(folder).names() == [new, old]
    assert run(folder, "verify") == 0
    capsys.readouterr()
    assert listed(folder, capsys)[old]["marks"] == ["other version"]


def test_nothing_is_deleted_while_the_run_is_trained(tmp_path: Path) -> None:
    folder = open_small(tmp_path)
    names = [save(folder, n) for n in (1, 2)]
    with Lease.acquire(folder), pytest.raises(RunError, match="is being trained"):
        run(folder, "prune", "--keep", "1")
    assert Checkpoints(folder).names() == names[::-1]
    assert run(folder, "prune", "--keep", "1") == 0


def test_a_run_is_found_by_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = save(open_small(tmp_path), 1)
    main(["ls", f"{tmp_path}/small/"])
    assert name in capsys.readouterr().out


def test_on_every_storage_all_commands_do_the_same(
    storage: tuple[str, str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    path, endpoint = storage
    folder = RunFolder.open(path, "small", endpoint)
    names = [save(folder, n, accuracy=0.9) for n in (1, 2, 3)]
    damage(folder, names[1])
    options = ["--storage", path, *(["--endpoint", endpoint] if endpoint else []), "small"]
    main(["ls", "--json", *options])
    records = json.loads(capsys.readouterr().out)
    assert [record["name"] for record in records] == names[::-1]
    assert [record["marks"] for record in records] == [["newest"], [], ["best"]]
    assert all(record["time"] for record in records)
    with pytest.raises(RunError, match=names[1]):
        main(["verify", *options])
    main(["prune", "--keep", "9", *options])
    assert Checkpoints(folder).names() == [names[2], names[0]]


def test_an_unknown_run_is_told_with_those_there_are(tmp_path: Path) -> None:
    save(open_small(tmp_path), 1)
    with pytest.raises(ConfigError, match=r"no run large in .*\n +Runs there: small\."):
        main(["ls", "large", "--storage", str(tmp_path)])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds neither checkpoints nor a model"):
        main(["ls", f"{tmp_path}/empty"])


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (61, "1 min"), (7200, "2 h"), (400_000, "4 d")]
)
def test_ages_are_told_in_the_largest_unit(seconds: int, text: str) -> None:
    from datetime import datetime, timedelta, timezone

    now = datetime(2026, 1, 30, tzinfo=timezone.utc)
    assert age_text((now - timedelta(seconds=seconds)).isoformat(), now) == text
