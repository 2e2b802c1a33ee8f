"""`trainyard data inspect` on tables: rows, columns, values, and what no samples can be made of."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from trainyard_trainer.tools.data import main
from trainyard_trainer.tools.inspection.columns import describe_column
from trainyard_trainer.tools.inspection.tables import look_at_table

TABLE = pa.table({"size": [3, 1, 2, 2], "kind": ["b", "a", "a", "a"], "share": [0.5, None, 1.5, 1]})


def as_json(folder: Path, table: pa.Table) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in table.to_pylist()))
    return path


def as_csv(folder: Path, table: pa.Table) -> Path:
    csv.write_csv(table, folder / "rows.csv")
    return folder / "rows.csv"


def as_parquet(folder: Path, table: pa.Table) -> Path:
    pq.write_table(table, folder / "rows.parquet", row_group_size=3)
    return folder / "rows.parquet"


def as_arrow(folder: Path, table: pa.Table) -> Path:
    path = folder / "rows.arrow"
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)
    return path


@pytest.mark.parametrize("write", [as_json, as_csv, as_parquet, as_arrow])
def test_columns_are_described_alike_in_all_kinds_of_files(
    tmp_path: Path, write: Callable[[Path, pa.Table], Path]
) -> None:
    found = look_at_table(str(write(tmp_path, TABLE)), None)
    assert found.splits == {"all": {"rows": 4, "files": 1}}
    size, kind, share = found.columns
    assert (size.least, size.largest, size.mean, size.distinct) == (1, 3, 2, 3)
    assert (kind.lengths, kind.distinct, kind.values) == ((1, 1), 2, ("'a'", "'b'"))
    assert (share.missing, share.least, share.largest, share.mean) == (1, 0.5, 1.5, 1)
    assert found.refused == ("column share has no value in row 1",)
    assert found.rows[1] == {"size": "1", "kind": "a", "share": "-"}


@pytest.mark.parametrize(
    ("values", "known", "text"),
    [
        ([True, False, True, True], {"mean": 0.75}, "0 to 1; mean 0.75; 2 different"),
        ([1.0, float("nan")], {"nan": 1, "least": 1.0}, "1; mean 1; 1 NaN"),
        ([float("nan")], {"nan": 1, "least": None}, "1 NaN"),
        ([[1, 2], [3]], {"lengths": (1, 2), "largest": 3}, "length 1 to 2; 1 to 3; mean 2"),
        ([[], []], {"lengths": (0, 0)}, "length 0"),
        ([b"\xff\xd8\xff..", b"."], {"lengths": (1, 5)}, "length 1 B to 5 B; JPEG"),
        (
            ["a\n" + "b" * 58],
            {"distinct": 1},
            f"length 60; 1 different; 'a\\n{'b' * 21}…'",
        ),
        ([None, None], {"missing": 2}, ""),
        ([{"bytes": b"\x89PNG", "path": "x"}], {"values": ("PNG",)}, "length 4 B; PNG"),
        ([{"other": 1}], {}, ""),
        (pa.array(["x", "x"]).dictionary_encode(), {"distinct": 1}, "length 1; 1 different; 'x'"),
        (
            pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12.0).reshape(2, 3, 2)),
            {"shape": (3, 2), "lengths": None},
            "shape 3 x 2; 0 to 11; mean 5.5",
        ),
    ],
)
def test_a_column_is_described_by_its_type(values: Any, known: dict[str, Any], text: str) -> None:
    column = pa.chunked_array([values if isinstance(values, pa.Array) else pa.array(values)])
    found = describe_column("it", column, str(column.type))
    assert {name: getattr(found, name) for name in known} == known
    assert found.contents() == text


def test_arrays_and_files_of_shards_have_columns(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((5, 2, 2)), y=np.arange(5))
    x, y = look_at_table(str(tmp_path / "a.npz"), None).columns
    assert (x.shape, y.largest) == ((2, 2), 4)
    with tarfile.open(tmp_path / "b.tar", "w") as shard:
        for row in range(3):
            stream = io.BytesIO()
            np.save(stream, np.full(3, row))
            for column, data in (("cls", b"%d" % row), ("txt", b"t"), ("npy", stream.getvalue())):
                member = tarfile.TarInfo(f"{row}.{column}")
                member.size = len(data)
                shard.addfile(member, io.BytesIO(data))
    label, array, text = look_at_table(str(tmp_path / "b.tar"), None).columns
    assert (label.name, label.distinct, array.shape, array.largest) == ("cls", 3, (3,), 2)
    assert text.values == ("'t'",)


def test_splits_are_counted_and_the_first_rows_of_each_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainyard_trainer.tools.inspection.tables.READ_ROWS", 5)
    for name in ("train-0", "train-1", "valid-0"):
        pq.write_table(TABLE, tmp_path / f"{name}.parquet", row_group_size=3)
    found = look_at_table(str(tmp_path), None)
    assert found.splits == {"train": {"rows": 8, "files": 2}, "valid": {"rows": 4, "files": 1}}
    assert found.read_rows == 9
    assert "3 columns, of the first 9 rows" in found.to_text()


def test_a_source_without_images_is_shown_as_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = as_parquet(tmp_path, TABLE)
    assert main(["inspect", str(path)]) == 0
    assert f"{path}: a table (Parquet)" in capsys.readouterr().out
    assert main(["inspect", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["columns"][0]["name"] == "size"
    assert main(["inspect", str(path), "--grid", "x.png"]) == 2
    assert "--grid draws images" in capsys.readouterr().err


def test_a_table_with_images_is_shown_as_images_unless_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = pa.array([b"no image", b"no image"])
    path = as_parquet(tmp_path, pa.table({"image": image, "label": [0, 1]}))
    assert main(["inspect", str(path), "--table"]) == 0
    assert "2 columns" in capsys.readouterr().out
    main(["inspect", str(path)])
    assert "a table" not in capsys.readouterr().out
