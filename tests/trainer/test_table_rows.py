"""Tables of any kind give the same rows, are divided into splits, and say what cannot be read."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from own_recipes import own_config
from pyarrow import parquet
from training import final_weights, open_folder, same, train_here

from trainyard_trainer.attempt.attempt import open_data
from trainyard_trainer.config.training.own_recipe import OwnData
from trainyard_trainer.data.loading.batch import BatchRequest
from trainyard_trainer.data.loading.user_dataset import TABLE, UserDataset, UserRows, stacked
from trainyard_trainer.data.sources.rows.find_rows import TableSplit, open_table
from trainyard_trainer.data.sources.rows.readers import FORMATS
from trainyard_trainer.errors import ConfigError, DatasetError

COUNT = 40
NUMBERS = np.arange(COUNT, dtype=np.int64)
VECTORS = np.arange(COUNT * 3, dtype=np.float32).reshape(COUNT, 3)
TEXTS = [f"row {number}" for number in range(COUNT)]


def arrow_table() -> pa.Table:
    lists = pa.FixedSizeListArray.from_arrays(pa.array(VECTORS.reshape(-1)), 3)
    return pa.table({"number": NUMBERS, "vector": lists, "text": TEXTS})


def write_csv(folder: Path) -> Path:
    lines = [f"{number},{text}" for number, text in zip(NUMBERS, TEXTS, strict=True)]
    (folder / "t.csv").write_text("\n".join(["number,text", *lines]))
    return folder / "t.csv"


def write_tsv(folder: Path) -> Path:
    (folder / "t.tsv").write_text(write_csv(folder).read_text().replace(",", "\t"))
    return folder / "t.tsv"


def write_jsonl(folder: Path) -> Path:
    rows = [
        {"number": int(number), "vector": vector.tolist(), "text": text}
        for number, vector, text in zip(NUMBERS, VECTORS, TEXTS, strict=True)
    ]
    (folder / "t.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder / "t.jsonl"


def write_parquet(folder: Path) -> Path:
    parquet.write_table(arrow_table(), folder / "t.parquet", row_group_size=7)
    return folder / "t.parquet"


def write_parts(folder: Path) -> Path:
    for start in (0, 15, 30):
        part = arrow_table().slice(start, 15)
        parquet.write_table(part, folder / f"part-{start:02}.parquet", row_group_size=4)
    return folder


def write_npz(folder: Path) -> Path:
    np.savez(folder / "t.npz", number=NUMBERS, vector=VECTORS)
    return folder / "t.npz"


def write_arrow(folder: Path) -> Path:
    file = folder / "data-00000-of-00001.arrow"
    with (
        pa.OSFile(str(file), "wb") as sink,
        pa.ipc.new_stream(sink, arrow_table().schema) as stream,
    ):
        stream.write_table(arrow_table())
    (folder / "state.json").write_text("{}")
    return folder


def write_tar(folder: Path, rows: int = COUNT) -> Path:
    with tarfile.open(folder / "shard-0.tar", "w") as shard:
        for number in range(rows):
            vector = io.BytesIO()
            np.save(vector, VECTORS[number])
            files = {
                "number.cls": str(number).encode(),
                "vector.npy": vector.getvalue(),
                "text.txt": TEXTS[number].encode(),
            }
            for name, data in files.items():
                entry = tarfile.TarInfo(f"{number:05}.{name}")
                entry.size = len(data)
                shard.addfile(entry, io.BytesIO(data))
    return folder


def write_lance(folder: Path) -> Path:
    lance = pytest.importorskip("lance")
    lance.write_dataset(arrow_table(), folder / "t.lance", max_rows_per_file=7)
    return folder / "t.lance"


WRITERS: dict[str, Callable[[Path], Path]] = {
    "CSV": write_csv,
    "TSV": write_tsv,
    "JSON lines": write_jsonl,
    "Parquet": write_parquet,
    "Parquet parts": write_parts,
    "Lance": write_lance,
    "NumPy": write_npz,
    "Arrow": write_arrow,
    "WebDataset": write_tar,
}


def split_of(source: Path, split: str = "train", **options: Any) -> TableSplit:
    known = {"endpoint": None, "columns": None, "valid_share": 0.2, "seed": 0}
    return open_table(split=split, source=str(source), **known | options)


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose columns have the names and the types that all kinds of tables can have."""
    row = {name.partition(".")[0]: value for name, value in row.items()}
    return {
        name: value.tolist() if hasattr(value, "tolist") else value for name, value in row.items()
    }


def test_each_kind_of_table_is_tried() -> None:
    assert {each.name for each in FORMATS} <= {*WRITERS}


@pytest.mark.parametrize("kind", WRITERS)
def test_all_kinds_of_tables_have_the_same_rows(tmp_path: Path, kind: str) -> None:
    source = WRITERS[kind](tmp_path)
    train, valid = split_of(source), split_of(source, "valid")
    assert (len(train), len(valid)) == (32, 8)
    numbers = [plain(row)["number"] for row in train.__getitems__([*range(32)])]
    held = [plain(row)["number"] for row in valid.__getitems__([*range(8)])]
    assert sorted(numbers + held) == [*range(COUNT)]
    row = plain(train.__getitems__([9, 3, 20])[1])
    expected = {
        "number": numbers[3],
        "vector": VECTORS[numbers[3]].tolist(),
        "text": TEXTS[numbers[3]],
    }
    assert row == {name: expected[name] for name in row}
    assert row == plain(train[3])


STREAMED = ("Parquet", "Parquet parts", "Lance")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {"memory_bytes": 1e9}) for kind in WRITERS),
        *((kind, {"groups_at_once": 3}) for kind in STREAMED),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_batch_of_columns_has_the_tensors_of_its_stacked_rows(
    tmp_path: Path, kind: str, options: dict[str, int]
) -> None:
    source = WRITERS[kind](tmp_path)
    names = [name for name in split_of(source).columns if not name.startswith("text")]
    known = {"endpoint": None, "columns": names, "valid_share": 0.2, "seed": 0, "versions": {}}
    data = UserDataset.open(TABLE, {"source": str(source), **known, **options}, table="t")
    request = BatchRequest(np.array([9, 3, 30, 3, 20]), 0)
    by_column, by_row = (
        UserRows(data, "train", seed=0, collate=collate)[request]
        for collate in (stacked, lambda rows: stacked(rows))
    )
    assert {*by_column} == {*names} == {*by_row}
    for name in names:
        assert by_column[name].dtype == by_row[name].dtype
        assert torch.equal(by_column[name], by_row[name])


VALUES = {
    "bool": pa.array([True, False, True, True]),
    "int8": pa.array([1, 2, 3, 4], pa.int8()),
    "uint16": pa.array([1, 2, 3, 60_000], pa.uint16()),
    "float16": pa.array(np.array([1, 2, 3, 4], np.float16)),
    "dictionary": pa.array([5, 6, 5, 6]).dictionary_encode(),
    "lists": pa.array([[1, 2], [3, 4], [5, 6], [7, 8]]),
    "lists of lists": pa.array([[[1.5], [2.5]]] * 4),
    "fixed lists": pa.array([[1, 2], [3, 4], [5, 6], [7, 8]], pa.list_(pa.float32(), 2)),
    "no elements": pa.array([[], [], [], []], pa.list_(pa.int64())),
    "tensors": pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(24.0).reshape(4, 2, 3)),
}


@pytest.mark.parametrize("kind", VALUES)
def test_numbers_of_any_type_are_read_alike_from_groups_and_from_single_rows(
    tmp_path: Path, kind: str
) -> None:
    parquet.write_table(pa.table({"x": VALUES[kind]}), tmp_path / "t.parquet", row_group_size=2)
    rows = split_of(tmp_path / "t.parquet").rows
    together = rows.read([3, 0, 2], ["x"])["x"]
    joined = rows.read([3, 0, 2], ["x"])["x"]
    assert isinstance(together, np.ndarray)
    assert isinstance(joined, np.ndarray)
    assert np.array_equal(together, joined)
    assert together.dtype == joined.dtype
    assert together.flags.writeable
    assert joined.flags.writeable
    for place, index in enumerate((3, 0, 2)):
        single = rows.read([index], ["x"])["x"]
        assert (single.dtype, single.shape[1:]) == (together.dtype, together.shape[1:])
        assert np.array_equal(single[0], together[place])
        assert together[place].tolist() == VALUES[kind][index].as_py() or kind == "tensors"


def test_lists_that_have_one_length_in_each_group_alone_are_read(tmp_path: Path) -> None:
    table = pa.table({"x": [[1, 2], [3, 4], [5, 6, 7], [8, 9, 10]]})
    parquet.write_table(table, tmp_path / "t.parquet", row_group_size=2)
    found = split_of(tmp_path / "t.parquet").rows.read([2, 0, 3], ["x"])["x"]
    assert [value.tolist() for value in found] == [[5, 6, 7], [1, 2], [8, 9, 10]]


@pytest.mark.parametrize(
    "values", [[1.0, None, 3.0], [[1], None, [3]], [[1], [None], [3]]], ids=str
)
def test_a_missing_value_is_told_when_its_row_is_read(tmp_path: Path, values: list[Any]) -> None:
    parquet.write_table(pa.table({"x": values}), tmp_path / "t.parquet")
    rows = split_of(tmp_path / "t.parquet", valid_share=0.4).rows
    assert [np.ravel(value).tolist() for value in rows.read([2, 0], ["x"])["x"]] == [[3], [1]]
    with pytest.raises(
        DatasetError, match=r"column x has (no value|a list with a missing value) in row 1"
    ):
        rows.read([0, 1], ["x"])


def test_the_seed_chooses_the_validation_rows(tmp_path: Path) -> None:
    source = write_parquet(tmp_path)
    one, same_seed, other = (split_of(source, "valid", seed=seed) for seed in (0, 0, 1))
    assert one.indices.tolist() == same_seed.indices.tolist() != other.indices.tolist()


@pytest.mark.parametrize("layout", ["{}.parquet", "{}-00000-of-00001.parquet", "{}/data.parquet"])
def test_files_and_folders_of_a_split_are_that_split(tmp_path: Path, layout: str) -> None:
    for name, rows in (("train", 20), ("validation", 12), ("test", 8)):
        file = tmp_path / layout.format(name)
        file.parent.mkdir(exist_ok=True)
        parquet.write_table(arrow_table().slice(0, rows), file)
    assert (len(split_of(tmp_path)), len(split_of(tmp_path, "valid"))) == (20, 12)


def test_ragged_lists_images_and_dictionaries_have_their_values(tmp_path: Path) -> None:
    table = pa.table(
        {
            "tokens": [[1, 2, 3], [4], []],
            "image": [{"bytes": b"png", "path": None}] * 3,
            "label": pa.array(["cat", "dog", "cat"]).dictionary_encode(),
            "matrix": [[[1.0, 2.0], [3.0, 4.0]]] * 3,
        }
    )
    parquet.write_table(table, tmp_path / "t.parquet")
    rows = split_of(tmp_path / "t.parquet", valid_share=0.01)
    found = {rows.indices[place]: rows[place] for place in range(2)}
    for index, row in found.items():
        assert row["tokens"].tolist() == [[1, 2, 3], [4], []][index]
        assert (row["image"], row["label"]) == (b"png", ["cat", "dog", "cat"][index])
        assert row["matrix"].shape == (2, 2)


@pytest.mark.parametrize(
    ("make", "options", "error", "told"),
    [
        (lambda folder: folder / "no.csv", {}, ConfigError, "there is no"),
        (lambda folder: folder, {}, ConfigError, r"is no table \(files: none\).*a Parquet file"),
        (write_parquet, {"columns": ["vektor"]}, ConfigError, "has no column vektor, but number"),
    ],
)
def test_what_is_no_table_is_told(
    tmp_path: Path, make: Any, options: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match="(?s)" + told):
        split_of(make(tmp_path), **options)


@pytest.mark.parametrize("write", [write_csv, write_tsv, write_jsonl, write_npz])
def test_a_file_that_is_read_as_a_whole_is_refused_if_it_has_more_than_a_process_may_hold(
    tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    file = write(tmp_path)
    assert len(split_of(file, memory_bytes=4_000)) == 32
    with pytest.raises(
        ConfigError,
        match=rf"{file.name} is read as a whole, .* GiB or more in each process .* data.memory_gib "
        r"allows .*\n.*Write the table as Parquet",
    ):
        split_of(file, memory_bytes=300)


def test_all_files_that_are_read_as_a_whole_count_together(tmp_path: Path) -> None:
    for name in "abc":
        np.savez(tmp_path / f"{name}.npz", number=np.arange(100))
    size = (tmp_path / "a.npz").stat().st_size
    assert len(split_of(tmp_path, memory_bytes=3 * size)) == 240
    with pytest.raises(ConfigError, match="the files of its table"):
        split_of(tmp_path, memory_bytes=2.9 * size)


def test_a_compressed_file_counts_with_what_it_takes_in_memory(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "t.npz", zeros=np.zeros((50, 1000)))
    assert (tmp_path / "t.npz").stat().st_size < 10_000
    with pytest.raises(ConfigError, match="is read as a whole"):
        split_of(tmp_path / "t.npz", memory_bytes=100_000)


@pytest.mark.parametrize("memory_bytes", [1.0, 1_000.0, 1e9])
def test_row_groups_of_all_files_are_held_up_to_the_memory(
    tmp_path: Path, memory_bytes: float
) -> None:
    rows = split_of(write_parts(tmp_path), memory_bytes=memory_bytes)
    order = np.random.default_rng(0).permutation(32)
    found = rows.__getitems__(order.tolist())
    assert [row["number"] for row in found] == rows.indices[order].tolist()
    (memory,) = {id(part._memory): part._memory for part in rows.rows._parts}.values()
    sizes = memory.sizes
    assert sum(sizes) <= max(memory_bytes, sizes[-1])
    assert (len(sizes) == 1) == (memory_bytes == 1)


@pytest.mark.parametrize(("memory_bytes", "is_joined"), [(1e9, True), (5_000, False)])
def test_the_groups_of_a_file_are_joined_if_there_is_memory_for_all_files(
    tmp_path: Path, memory_bytes: float, is_joined: bool
) -> None:
    rows = split_of(write_parts(tmp_path), memory_bytes=memory_bytes)
    order = np.random.default_rng(0).permutation(32).tolist()
    first, again = (rows.__getitems__(order) for _ in range(2))
    assert [plain(row) for row in again] == [plain(row) for row in first]
    assert [row["number"] for row in again] == rows.indices[order].tolist()
    (memory,) = {id(part._memory): part._memory for part in rows.rows._parts}.values()
    assert (len(memory.sizes) == 3) == is_joined


def test_the_run_file_says_how_much_of_a_table_a_process_holds(code: Path, tmp_path: Path) -> None:
    (code / "lin.py").write_text(RECIPE)
    config = table_config(tmp_path, write_csv(tmp_path))
    data = OwnData.model_validate({"source": config.data.source, "memory_gib": 1e-7})
    with pytest.raises(ConfigError, match=r"data\.memory_gib allows 1e-07"):
        open_data(config.model_copy(update={"data": data}), open_folder(config))


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("t.parquet", b"PAR1", "is no intact Parquet file"),
        ("t.tar", b"x" * 600, "is no intact tar file"),
        ("t.npz", b"PK", "holds no arrays that may be loaded"),
        ("t.npz", b"PK\x03\x04 and no more", "holds no arrays that may be loaded"),
        ("t.csv", b"a,b\n1\n", "t.csv is no intact CSV file"),
        ("t.csv", b"a\n1\n", "has 1 rows, and needs 2 or more"),
        ("t.csv", b"a\n\xff\n\xfe\n", "column a is not UTF-8"),
        ("t.csv", "a,b\n1,2\n".encode("utf-16"), "t.csv is no text in UTF-8"),
        ("t.jsonl", '{"a": 1}\n'.encode("utf-16"), "t.jsonl is no text in UTF-8"),
        ("t.csv", b"a,a\n1,2\n3,4\n", "t.csv has the column a twice"),
    ],
)
def test_a_damaged_file_is_told(tmp_path: Path, name: str, content: bytes, told: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=told):
        split_of(tmp_path / name)


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("first", ["", "sep={0}{1}", "\ufeff"])
@pytest.mark.parametrize("name", ["t.csv", "t.tsv"])
def test_a_csv_file_has_its_columns_whatever_separates_them(
    separator: str, end: str, first: str, name: str, tmp_path: Path
) -> None:
    text = write_csv(tmp_path).read_text().replace(",", separator).replace("\n", end)
    (tmp_path / name).write_text(first.format(separator, end) + text, newline="")
    rows = split_of(tmp_path / name)
    assert rows[0] == {"number": rows.indices[0], "text": TEXTS[rows.indices[0]]}


def test_text_and_bytes_of_view_types_are_read(tmp_path: Path) -> None:
    views = {
        "text": pa.array(["x", "y"], pa.string_view()),
        "data": pa.array([b"x", b"y"], pa.binary_view()),
    }
    parquet.write_table(pa.table(views), tmp_path / "t.parquet")
    rows = split_of(tmp_path / "t.parquet", valid_share=0.5)
    assert rows[0] == [{"text": "x", "data": b"x"}, {"text": "y", "data": b"y"}][rows.indices[0]]


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("label=1/a.parquet", "has the column label in the names of its folders"),
        ("split=train/label=1/a.parquet", "has the column label in the names of its folders"),
        ("_delta_log/0.json", "in the format of Delta"),
        ("metadata/v1.metadata.json", "in the format of Iceberg"),
    ],
)
def test_rows_that_would_lack_or_have_too_much_are_refused(
    place: str, told: str, tmp_path: Path
) -> None:
    parquet.write_table(arrow_table(), tmp_path / "a.parquet")
    (tmp_path / place).parent.mkdir(parents=True)
    shutil.copy(tmp_path / "a.parquet", tmp_path / place)
    with pytest.raises(ConfigError, match=told):
        split_of(tmp_path)


@pytest.mark.parametrize("name", ["_temporary/0/a.parquet", "_a.parquet", ".a.parquet"])
def test_files_that_other_programs_have_not_finished_are_left_out(
    name: str, tmp_path: Path
) -> None:
    write_parquet(tmp_path)
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow_table(), tmp_path / name)
    assert len(split_of(tmp_path)) == 32


def test_folders_may_be_named_after_the_column_split(tmp_path: Path) -> None:
    for name, rows in (("train", 20), ("validation", 12)):
        (tmp_path / f"split={name}").mkdir()
        parquet.write_table(arrow_table().slice(0, rows), tmp_path / f"split={name}/a.parquet")
    assert (len(split_of(tmp_path)), len(split_of(tmp_path, "valid"))) == (20, 12)


def test_a_tar_that_is_cut_between_two_files_is_told(tmp_path: Path) -> None:
    file = write_tar(tmp_path) / "shard-0.tar"
    with tarfile.open(file) as shard:
        end = shard.getmembers()[9].offset
    file.write_bytes(file.read_bytes()[:end])
    with pytest.raises(ConfigError, match="its end is missing"):
        split_of(file)


def test_files_of_no_split_and_of_the_library_itself_are_not_mixed_in(tmp_path: Path) -> None:
    for name in ("train", "valid"):
        parquet.write_table(arrow_table(), tmp_path / f"{name}.parquet")
    parquet.write_table(arrow_table(), tmp_path / "testimonials.parquet")
    with pytest.raises(ConfigError, match=r"testimonials.parquet belongs to no split"):
        split_of(tmp_path)
    other = tmp_path / "saved"
    other.mkdir()
    write_arrow(other)
    (other / "cache-1234.arrow").write_bytes((other / "data-00000-of-00001.arrow").read_bytes())
    assert len(split_of(other)) == 32


def test_a_relative_path_has_the_splits_of_the_absolute_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_up/sub").mkdir(parents=True)
    for name, rows in (("train", 20), ("valid", 1)):
        parquet.write_table(arrow_table().slice(0, rows), f"train_up/sub/{name}.parquet")
    assert len(split_of(Path("train_up/sub"), "valid")) == 1


def test_a_tensor_column_keeps_its_shape(tmp_path: Path) -> None:
    kind = pa.fixed_shape_tensor(pa.float32(), (2, 3))
    storage = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(24, dtype=np.float32)), 6)
    column = pa.ExtensionArray.from_storage(kind, storage)
    parquet.write_table(pa.table({"x": column}), tmp_path / "t.parquet")
    rows = split_of(tmp_path / "t.parquet")
    assert rows[0]["x"].tolist() == np.arange(24).reshape(4, 2, 3)[rows.indices[0]].tolist()


def test_files_with_other_columns_or_of_another_kind_are_told(tmp_path: Path) -> None:
    write_parquet(tmp_path)
    parquet.write_table(pa.table({"x": [1, 2]}), tmp_path / "u.parquet")
    with pytest.raises(
        ConfigError, match=r"u.parquet has the columns x \(int64\), and .*t.parquet has number"
    ):
        split_of(tmp_path)
    write_csv(tmp_path)
    with pytest.raises(ConfigError, match="files of several kinds: CSV, Parquet"):
        split_of(tmp_path)


@pytest.mark.parametrize(
    ("column", "told"),
    [
        (pa.array([1, None, 3]), "column x has no value in row 1"),
        (pa.array([[1], [None], [2]]), "a list with a missing value in row 1"),
        (pa.array([{"a": 1}] * 3), "has the type struct"),
        (pa.array([["a"]] * 3), "has lists of string"),
        (pa.array([[[1], [1, 2]]] * 3), "lists of different lengths in row"),
    ],
)
def test_a_value_of_which_no_tensor_can_be_made_is_told(
    tmp_path: Path, column: pa.Array, told: str
) -> None:
    parquet.write_table(pa.table({"x": column}), tmp_path / "t.parquet")
    rows = split_of(tmp_path / "t.parquet", valid_share=0.01)
    with pytest.raises(DatasetError, match=told):
        TableSplit(rows.rows, rows.columns, np.arange(3)).__getitems__([0, 1, 2])


def test_text_and_ragged_lists_need_a_collate_of_their_own(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"x": [[1], [2, 3]] * 3, "t": ["a"] * 6}), tmp_path / "t.parquet")
    for columns, told in (
        (["t"], "column t has str"),
        (["x"], r"column x has shapes \[\(1,\), \(2,\)\]"),
    ):
        rows = split_of(tmp_path / "t.parquet", columns=columns, valid_share=0.01)
        with pytest.raises(ConfigError, match=f"{told}.*override collate"):
            stacked(TableSplit(rows.rows, rows.columns, np.arange(2)).__getitems__([0, 1]))


# In a run.

RECIPE = """
from torch.nn import functional
from trainyard_trainer import Loss, Recipe
from torch import nn

class Linear(Recipe):
    def build_model(self):
        return nn.Linear(3, 1)

    def loss(self, model, batch):
        predicted = model(batch["vector"] / 100).squeeze(1)
        target = batch["number"].float() / 100
        return Loss(sum=functional.mse_loss(predicted, target, reduction="sum"), weight=len(batch))
"""


def table_config(storage: Path, source: Path, **changes: Any) -> Any:
    config = own_config(storage, recipe="lin:Linear", global_batch_size=4, **changes)
    data = {"source": str(source), "columns": ["number", "vector"]}
    return config.model_copy(update={"data": OwnData.model_validate(data)})


def test_a_run_learns_from_a_table_and_resumes_with_the_same_bits(
    code: Path, tmp_path: Path
) -> None:
    (code / "lin.py").write_text(RECIPE)
    (tmp_path / "data").mkdir()
    source = write_parts(tmp_path / "data")
    whole = table_config(tmp_path / "whole", source, epochs=2)
    assert train_here(whole).trained.epoch == 2
    cut = table_config(tmp_path / "cut", source, epochs=2, schedule={"name": "constant"})
    plain_schedule = table_config(
        tmp_path / "plain", source, epochs=2, schedule={"name": "constant"}
    )
    train_here(plain_schedule)
    first = cut.model_copy(update={"train": cut.train.model_copy(update={"epochs": 1})})
    train_here(first)
    assert train_here(cut, attempt=2).resumed_from is not None
    assert same(final_weights(cut), final_weights(plain_schedule))


def test_the_order_and_the_messages_are_those_of_a_data_set(code: Path, tmp_path: Path) -> None:
    config = table_config(tmp_path, write_parquet(tmp_path))
    data = open_data(config, open_folder(config))
    assert isinstance(data, UserDataset)
    assert (data.num_train, data.num_valid) == (32, 8)
    assert data.info.source == str(tmp_path / "t.parquet")
    rows = UserRows(data, "train", seed=0, collate=stacked)
    batch = rows[BatchRequest(np.array([5, 2]), 0)]
    assert torch.equal(batch["number"] * 3, batch["vector"][:, 0].long())


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({}, "needs either dataset"),
        ({"dataset": "a:b", "source": "/x"}, "needs either dataset"),
        ({"source": "/x", "options": {"a": 1}}, "options means nothing to data.source"),
        ({"dataset": "a:b", "memory_gib": 2}, "memory_gib is for a source"),
        ({"source": "/x.parquet", "stream": True, "memory_gib": 2}, "stream_groups says how much"),
        ({"dataset": "a:b", "columns": ["a"]}, "columns means nothing to data.dataset"),
    ],
)
def test_data_have_one_origin(data: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        OwnData.model_validate(data)
