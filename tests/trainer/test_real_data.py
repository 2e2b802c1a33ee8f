"""Data as people have it: each kind is understood, or refused by name before anything is trained."""

from __future__ import annotations

import datetime
import decimal
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import made_sources as made
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from attempts import Attempts, read_records, wait_for
from training import open_folder, small_config

from trainyard_trainer.attempt.attempt import open_data
from trainyard_trainer.boosting.table import PreparedTable, prepare, read_share
from trainyard_trainer.config.data.section import Table
from trainyard_trainer.config.trainer_config import BoostingConfig
from trainyard_trainer.config.training.boosting import Boosting
from trainyard_trainer.data.preparation.context import PrepareContext
from trainyard_trainer.data.preparation.plan import Options
from trainyard_trainer.data.preparation.prepare import prepare as prepare_images
from trainyard_trainer.data.prepared import Prepared, read_prepared
from trainyard_trainer.data.sources.column_types import COLUMN_TYPES, Use
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.storage import open_filesystem
from trainyard_trainer.tools import data as data_tool

COUNT = 12
PNGS = [made.png(image) for image in made.pixels(COUNT)]
LABELS = made.labels(COUNT)
TRAIN = {"recipe": "gradient_boosting", "library": "xgboost", "rounds": 1}
ROWS: dict[str, Any] = {"a": [float(row) for row in range(COUNT)], "label": [0, 1, 2] * 4}


def images_of(source: Path, said: list[str] | None = None, **options: Any) -> Prepared:
    """Prepare a source of images beside it."""
    dest = RunFolder(*open_filesystem(str(source.parent / "dest")))
    context = PrepareContext(say=([] if said is None else said).append)
    prepare_images(Options(source=str(source), **{"valid_share": 0.3} | options), dest, context)
    return read_prepared(dest, path=dest.root, endpoint=None)


def table_of(
    source: Path, objective: str = "multiclass", said: list[str] | None = None, **data: Any
) -> PreparedTable:
    train = Boosting.model_validate(TRAIN | {"objective": objective})
    say = ([] if said is None else said).append
    return prepare(Table(source=str(source), **{"valid_share": 0.3} | data), train, None, say)


def write_rows(path: Path, columns: dict[str, Any] | pa.Table, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    pq.write_table(table, path, **options)
    return path


def pictures(folder: Path) -> Path:
    return made.write_folder(folder, PNGS, LABELS)


# Links.


def linked(link: str, target: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        pictures(folder)
        (folder / link).parent.mkdir(parents=True, exist_ok=True)
        (folder / link).symlink_to(target.format(folder=folder))
        return folder

    return write


def circle_of_two(folder: Path) -> Path:
    pictures(folder)
    (folder / "ant/bees").symlink_to("../bee")
    (folder / "bee/ants").symlink_to("../ant")
    return folder


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (linked("ant/up", ".."), r"ant/up is a link in a circle: it leads to \.\."),
        (linked("ant/here", "."), r"ant/here is a link in a circle"),
        (linked("ant/top", "../.."), r"ant/top is a link in a circle"),
        (linked("ant/root", "{folder}"), r"ant/root is a link in a circle"),
        (linked("wasp", "bee"), r"wasp is the same folder as .*bee"),
        (linked("ant/more", "../bee"), r"is the same folder as"),
        (circle_of_two, r"is the same folder as"),
    ],
)
def test_folders_that_links_make_endless_or_double_are_refused(
    write: Callable[[Path], Path], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        images_of(write(tmp_path / "source"))


@pytest.mark.parametrize("suffix", ["txt", "parquet"])
def test_text_and_tables_refuse_circles_of_links_too(suffix: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_rows(source / "a.parquet", ROWS)
    (source / "a.txt").write_text("x" * 500)
    (source / "up").symlink_to(".")
    read = table_of if suffix == "parquet" else partial(images_of, row_bytes=9)
    with pytest.raises(ConfigError, match="link in a circle"):
        read(source)


@pytest.mark.parametrize("is_folder", [True, False])
def test_links_that_leave_the_source_are_followed_and_announced(
    is_folder: bool, tmp_path: Path
) -> None:
    said: list[str] = []
    source = pictures(tmp_path / "source")
    away = tmp_path / "away"
    if is_folder:
        (source / "cat").rename(away)
        (source / "cat").symlink_to(away)
    else:
        away.mkdir()
        (source / "cat/000002.png").rename(away / "x")
        (source / "cat/000002.png").symlink_to(away / "x")
    prepared = images_of(source, said)
    assert prepared.num_train + prepared.num_valid == COUNT
    assert any("links that leave the folder, and are followed: 1, such as" in line for line in said)


def test_a_link_to_a_file_of_the_source_is_announced(tmp_path: Path) -> None:
    said: list[str] = []
    source = pictures(tmp_path / "source")
    (source / "ant/copy.png").symlink_to("000000.png")
    assert images_of(source, said).info.classes == made.NAMES
    assert any("read under another name too: 1" in line for line in said)


def test_a_link_to_nothing_is_a_bad_sample_and_a_pipe_is_none(tmp_path: Path) -> None:
    source = pictures(tmp_path / "source")
    os.mkfifo(source / "ant/pipe.png")
    (source / "ant/lost.png").symlink_to("/nowhere/lost.png")
    with pytest.raises(ConfigError, match=r"ant/lost.png: it is a link to /nowhere/lost.png"):
        images_of(source)
    write_rows(tmp_path / "tables/a.parquet", ROWS)
    (tmp_path / "tables/b.parquet").symlink_to("/nowhere/b.parquet")
    with pytest.raises(ConfigError, match=r"b.parquet cannot be read: .*No such file"):
        table_of(tmp_path / "tables")


# Names.


def bad_name(kind: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        pictures(folder)
        if kind == "file":
            (folder / "ant/000000.png").rename(
                os.fsdecode(os.fsencode(folder) + b"/ant/caf\xe9.png")
            )
        else:
            (folder / "ant").rename(os.fsdecode(os.fsencode(folder) + b"/caf\xe9"))
        return folder

    return write


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_name_that_is_not_utf8_is_refused_with_its_bytes(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"caf\\xe9.* is not UTF-8") as error:
        images_of(bad_name(kind)(tmp_path / "source"))
    str(error.value).encode()


def test_a_source_or_table_whose_name_is_not_utf8_is_refused(tmp_path: Path) -> None:
    source = pictures(tmp_path / "source")
    other = os.fsencode(tmp_path) + b"/caf\xe9"
    Path(source).rename(os.fsdecode(other))
    arguments = ["prepare", os.fsdecode(other), str(tmp_path / "dest")]
    assert data_tool.main(arguments) == 2
    write_rows(tmp_path / "tables/a.parquet", ROWS)
    (tmp_path / "tables/a.parquet").rename(
        os.fsdecode(os.fsencode(tmp_path) + b"/tables/\xff.parquet")
    )
    with pytest.raises(ConfigError, match=r"\\xff.parquet is not UTF-8"):
        table_of(tmp_path / "tables")


def test_a_column_whose_name_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.parquet", ROWS | {"caf_": [1] * COUNT}, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"caf_", b"caf\xe9"))
    with pytest.raises(ConfigError, match=r"column whose name is not UTF-8: caf\\xe9"):
        table_of(path)


@pytest.mark.parametrize("name", ["n" * 240, "two\nlines", "ünïcödé 猫", " ", "a=b", "quo'te\""])
def test_unusual_names_are_kept(name: str, tmp_path: Path) -> None:
    source = pictures(tmp_path / "source")
    if name != "a=b":
        (source / "ant").rename(source / name)
        assert name in images_of(source).info.classes
    table = table_of(write_rows(tmp_path / "a.parquet", ROWS | {name: [1] * COUNT}))
    assert name in table.columns


# Splits and classes.


def moved(**folders: str) -> Callable[[Path], Path]:
    """Pictures whose class folders have these names instead."""

    def write(folder: Path) -> Path:
        pictures(folder)
        for old, new in folders.items():
            (folder / new).parent.mkdir(parents=True, exist_ok=True)
            (folder / old).rename(folder / new)
        return folder

    return write


def with_stray(place: str, base: Callable[[Path], Path]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        base(folder)
        (folder / place).write_bytes(PNGS[0])
        return folder

    return write


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (moved(ant="train", bee="valid", cat="test"), "names of splits, and no folder per class"),
        (moved(ant="train", bee="validation", cat="train/cat"), "train has pictures of its own"),
        (moved(ant="train/ant", bee="train/bee"), "beside it there are cat with pictures too"),
        (moved(ant="test/ant", bee="test/bee"), "beside it there are cat with pictures too"),
        (with_stray("cover.png", pictures), "cover.png lies beside the folders of the classes"),
        (
            with_stray("train/x.png", moved(ant="train/ant", bee="train/bee", cat="valid/ant")),
            "train has pictures of its own",
        ),
    ],
)
def test_a_folder_that_may_be_class_or_split_is_refused(
    write: Callable[[Path], Path], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        images_of(write(tmp_path / "source"))


@pytest.mark.parametrize("name", ["train", "valid", "validation", "test", "Test", "dev"])
def test_a_class_may_have_the_name_of_a_split(name: str, tmp_path: Path) -> None:
    prepared = images_of(moved(ant=name)(tmp_path / "source"))
    assert prepared.info.classes == tuple(sorted([name, "bee", "cat"]))


def test_files_of_a_split_beside_files_of_none_are_refused(tmp_path: Path) -> None:
    for name in ("train-0", "extra"):
        write_rows(tmp_path / f"tables/{name}.parquet", ROWS)
        made.write_table(tmp_path / f"pics/{name}.parquet", pa.array(PNGS, pa.binary()), LABELS)
    for read in (table_of, images_of):
        with pytest.raises(
            ConfigError, match=r"files of the split train.*of no split, such as .*extra"
        ):
            read(tmp_path / ("tables" if read is table_of else "pics"))


SPLITS = "image,label,split\nx.png,ant,{}\ny.png,bee,{}\n"


@pytest.mark.parametrize("names", [("train", "Train"), ("train", "training"), ("val", "VAL")])
@pytest.mark.parametrize("kind", ["tables", "folders", "manifest"])
def test_two_names_of_one_split_are_refused(
    kind: str, names: tuple[str, str], tmp_path: Path
) -> None:
    for name in {*names, "train"}:
        if kind == "tables":
            write_rows(tmp_path / f"t/{name}/a.parquet", ROWS)
        elif kind == "folders":
            made.write_folder(tmp_path / f"t/{name}", PNGS, LABELS)
    if kind == "manifest":
        (tmp_path / "t.csv").write_text(SPLITS.format(*names))
    read = table_of if kind == "tables" else images_of
    with pytest.raises(ConfigError, match=f"the splits .*{names[1]}.* cannot be known"):
        read(tmp_path / ("t.csv" if kind == "manifest" else "t"))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl"])
def test_a_manifest_in_another_encoding_is_refused_by_its_cause(
    name: str, encoding: str, tmp_path: Path
) -> None:
    text = '{"image": "x"}' if name == "a.jsonl" else "image,label\nx.png,ant\n"
    (tmp_path / name).write_bytes(text.encode(encoding))
    with pytest.raises(ConfigError, match=r"is no text in UTF-8: .* Save it as UTF-8"):
        images_of(tmp_path / name)


# Missing labels.

MISSING: list[Any] = [None, "", "nan", "NaN", "None", "<NA>", "NULL", "NaT"]


@pytest.mark.parametrize("missing", [*MISSING, float("nan")])
@pytest.mark.parametrize("objective", ["binary", "multiclass"])
def test_a_missing_label_is_no_class_of_a_table(
    missing: Any, objective: str, tmp_path: Path
) -> None:
    labels = ["x", "y"] * 6 if not isinstance(missing, float) else [0.0, 1.0] * 6
    path = write_rows(tmp_path / "a.parquet", ROWS | {"label": [*labels[:-1], missing]})
    with pytest.raises(ConfigError, match=r"a.parquet: row 11 \(from 0\) has (no label|the label)"):
        table_of(path, objective)


@pytest.mark.parametrize("missing", MISSING)
@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl", "folder"])
def test_a_missing_label_is_no_class_of_images(kind: str, missing: Any, tmp_path: Path) -> None:
    labels = [made.NAMES[label] for label in LABELS[:-1]] + [missing]
    source = tmp_path / "source"
    pictures(source / "pics")
    files = [f"pics/{made.NAMES[label]}/{row:06}.png" for row, label in enumerate(LABELS)]
    if kind == "parquet":
        made.write_table(source / "a.parquet", pa.array(PNGS, pa.binary()), labels)
    elif kind == "folder":
        source = source / "pics"
        if missing:
            (source / missing).mkdir()
            (source / "cat/000011.png").rename(source / missing / "000011.png")
        else:
            (source / "NA").mkdir()
            (source / "cat/000011.png").rename(source / "NA/000011.png")
    else:
        source = made.write_manifest(
            source / f"all.{kind}",
            [{"image": f, "label": x} for f, x in zip(files, labels, strict=True)],
        )
    with pytest.raises(ConfigError, match=r"has no label|stands for a missing label"):
        images_of(source)


@pytest.mark.parametrize(
    "names", [("red", "red "), (" red", "red"), ("r\u00e9d", "re\u0301d"), ("red", "red\t")]
)
@pytest.mark.parametrize("kind", ["table", "folder", "manifest"])
def test_classes_that_look_alike_are_refused(
    kind: str, names: tuple[str, str], tmp_path: Path
) -> None:
    if kind == "table":
        write_rows(tmp_path / "t.parquet", ROWS | {"label": [*names] * 6})
    elif kind == "folder":
        for name in names:
            made.write_folder(tmp_path / "t" / name, PNGS[:2], LABELS[:2])
    else:
        pictures(tmp_path / "pics")
        rows = [{"image": "pics/ant/000000.png", "label": name} for name in names]
        made.write_manifest(tmp_path / "t.jsonl", rows)
    source = tmp_path / {"table": "t.parquet", "folder": "t", "manifest": "t.jsonl"}[kind]
    with pytest.raises(ConfigError, match="look alike"):
        table_of(source, "binary") if kind == "table" else images_of(source)


@pytest.mark.parametrize("label", ["0.0", "1.5", "1,5", "2e-1.0"][:3])
def test_labels_with_a_fraction_are_no_names(label: str, tmp_path: Path) -> None:
    source = tmp_path / "all.csv"
    source.write_text(f'image;label\nx.png;"{label}"\n')
    with pytest.raises(ConfigError, match=r"line 2: label is .*, a number with a fraction"):
        images_of(source)


def test_a_table_without_any_label_is_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.parquet", ROWS | {"label": pa.nulls(COUNT, pa.int64())})
    with pytest.raises(ConfigError, match="has no labels: all values are missing"):
        table_of(path)


# Columns: index, repeated, differing.


@pytest.mark.parametrize("name", [None, "id", ("x", "y")])
def test_the_index_of_a_data_frame_is_no_feature(name: Any, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(ROWS).sample(frac=1, random_state=1)
    if isinstance(name, tuple):
        frame.index = pandas.MultiIndex.from_arrays([range(COUNT)] * 2, names=name)
    else:
        frame.index.name = name
    path = tmp_path / "a.parquet"
    frame.to_parquet(path)
    said: list[str] = []
    table = table_of(path, said=said)
    assert table.columns == ("a",)
    assert any("the index of a pandas data frame is not used" in line for line in said)
    if name == "id":
        assert table_of(path, feature_columns=("id",)).columns == ("id",)


@pytest.mark.parametrize(
    "name", ["__index_level_0__", "Unnamed: 0", "Unnamed: 0.1", "", "index", "level_0"]
)
def test_an_index_is_known_by_its_name_alone(name: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.parquet", {name: range(COUNT), **ROWS})
    assert table_of(path).columns == ("a",)


def test_a_column_called_index_that_is_no_integer_is_a_feature(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.parquet", {"index": [0.5] * COUNT, **ROWS})
    assert table_of(path).columns == ("index", "a")


def test_a_range_index_takes_no_column_away(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame(ROWS | {"id": range(COUNT)}).to_parquet(tmp_path / "a.parquet")
    assert table_of(tmp_path / "a.parquet").columns == ("a", "id")


def twice(name: str) -> pa.Table:
    values = [pa.array(ROWS["a"]), pa.array(ROWS["a"]), pa.array(ROWS["label"])]
    names = ["a", "a", "label"] if name == "a" else ["a", "label", "label"]
    return pa.Table.from_arrays(values, names=names)


@pytest.mark.parametrize("name", ["a", "label"])
def test_a_column_that_is_there_twice_is_refused_in_a_table(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"a.parquet has the column {name} twice"):
        table_of(write_rows(tmp_path / "a.parquet", twice(name)))


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("a.csv", "image,label,label\nx,1,2\n", "has the column label twice"),
        ("a.csv", "image;image;label\nx;y;2\n", "has the column image twice"),
        ("a.csv", "image,label,split,split\nx,1,train,valid\n", "has the column split twice"),
        ("a.jsonl", '{"image": "x", "label": 1, "label": 2}\n', "it has the key label twice"),
    ],
)
def test_a_column_that_is_there_twice_is_refused_in_a_manifest(
    file: str, text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / file).write_text(text)
    with pytest.raises(ConfigError, match=message):
        images_of(tmp_path / file)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            {"a": [1.0], "label": ["x"]},
            "label is of type string in .*b.parquet, but contains numbers in .*a.parquet",
        ),
        ({"a": ["x"], "label": [1]}, r"b.parquet has columns that are not numeric: a \(string\)"),
        ({"label": [1]}, "have different columns: a is in only one of them"),
        (
            {"a": [1.0], "b": [1.0], "label": [1]},
            "have different columns: b is in only one of them",
        ),
        ({"a": [1.0]}, "b.parquet has no column label"),
    ],
)
def test_files_that_contradict_each_other_are_refused(
    second: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_rows(tmp_path / "t/a.parquet", ROWS)
    write_rows(tmp_path / "t/b.parquet", second)
    with pytest.raises(ConfigError, match=message):
        table_of(tmp_path / "t")


def test_numbers_of_several_types_and_columns_in_another_order_are_one_table(
    tmp_path: Path,
) -> None:
    write_rows(tmp_path / "t/a.parquet", ROWS)
    write_rows(
        tmp_path / "t/b.parquet",
        {"label": pa.array([0.0, 2.0] * 4), "a": pa.array([100] * 8, pa.int32())},
    )
    table = table_of(tmp_path / "t")
    assert table.classes == (0.0, 1.0, 2.0)
    assert (read_share(table, table.train, 0, 1).features == 100).any()


# Numbers.

INFINITE = [0.5] * 7 + [float("inf")] + [1.0] * 4


@pytest.mark.parametrize("has_statistics", [True, False])
@pytest.mark.parametrize(
    ("values", "row"),
    [
        (pa.array(INFINITE), 7),
        (pa.array([-value for value in INFINITE], pa.float32()), 7),
        (pa.array(np.array(INFINITE, np.float16)), 7),
        (pa.array([1e300] + [0.0] * 11), 0),
        (pa.array([0] * 11 + [2**53 + 1]), 11),
        (pa.array([0] * 11 + [-(2**60)]), 11),
        (pa.array([0, 2**63] + [1] * 10, pa.uint64()), 1),
        (pa.array([0] * 11 + [2**60]).dictionary_encode(), 11),
        (pa.array([decimal.Decimal(10) ** 50] + [None] * 11), 0),
    ],
)
def test_a_number_that_no_float_holds_is_refused_with_its_row(
    values: pa.Array, row: int, has_statistics: bool, tmp_path: Path
) -> None:
    columns = ROWS | {"b": values}
    path = tmp_path / "a.parquet"
    write_rows(path, columns, write_statistics=has_statistics, row_group_size=5)
    with pytest.raises(ConfigError, match=rf"a.parquet: row {row} \(from 0\) of column b is "):
        table_of(path)
    assert table_of(path, feature_columns=("a",)).columns == ("a",)
    if not pa.types.is_dictionary(values.type):
        write_rows(path, {"a": ROWS["a"], "label": values})
        with pytest.raises(ConfigError, match=rf"row {row} \(from 0\) has (the|no) label"):
            table_of(path, "regression")


@pytest.mark.parametrize("value", [2**53 + 1, -(2**53) - 1])
def test_a_number_in_the_name_of_a_folder_that_no_float_holds_is_refused(
    value: int, tmp_path: Path
) -> None:
    write_rows(tmp_path / f"t/b={value}/a.parquet", ROWS)
    with pytest.raises(ConfigError, match=f"in a folder for b = {value}, which is larger than 2"):
        table_of(tmp_path / "t")
    assert table_of(tmp_path / "t", feature_columns=("a",)).columns == ("a",)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("objective", ["binary", "multiclass"])
def test_an_infinite_label_is_no_class(objective: str, kind: type, tmp_path: Path) -> None:
    labels = np.array([0.0, 1.0] * 5 + [0.0, np.inf], kind)
    path = write_rows(tmp_path / "a.parquet", ROWS | {"label": labels})
    with pytest.raises(ConfigError, match=r"row 11 \(from 0\) has the label inf, which should be"):
        table_of(path, objective)


def test_zero_and_minus_zero_are_one_class(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.parquet", ROWS | {"label": [-0.0, 0.0, 1.0] * 4})
    assert str(table_of(path, "binary").classes) == "(0.0, 1.0)"


def test_large_integers_that_are_rounded_are_named(tmp_path: Path) -> None:
    said: list[str] = []
    path = write_rows(tmp_path / "a.parquet", ROWS | {"b": [2**30 + 1] * COUNT})
    table_of(path, said=said)
    assert any("are rounded to 32-bit floats in column b" in line for line in said)


# Types: each row of the registry, for each use.

STORED: dict[str, list[pa.Array]] = {
    "booleans": [
        pa.array([True, False] * 6),
        pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, 0] * 6, pa.int8())),
    ],
    "integers": [
        *(pa.array([0, 1] * 6, kind) for kind in (pa.int8(), pa.int64(), pa.uint8(), pa.uint64())),
        pa.array([0, 1] * 6).dictionary_encode(),
    ],
    "floats": [
        pa.array(np.array([0, 1] * 6, kind)) for kind in (np.float16, np.float32, np.float64)
    ],
    "decimals without fraction digits": [
        pa.array([decimal.Decimal(0), decimal.Decimal(1)] * 6, kind)
        for kind in (pa.decimal32(5), pa.decimal64(9), pa.decimal128(9), pa.decimal256(50))
    ],
    "decimals with fraction digits": [
        pa.array([decimal.Decimal("0.5"), decimal.Decimal("1.5")] * 6, pa.decimal128(9, 2))
    ],
    "text": [
        *(pa.array(["x", "y"] * 6, kind) for kind in (pa.string(), pa.large_string())),
        pa.array(["x", "y"] * 6, pa.string_view()),
        pa.array(["x", "y"] * 6).dictionary_encode(),
    ],
    "bytes": [
        pa.array([b"x", b"y"] * 6, kind)
        for kind in (pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(1))
    ],
    "null": [pa.nulls(COUNT)],
    "dates": [pa.array([datetime.date(2026, 1, 1 + row) for row in (0, 1) * 6])],
    "times of day": [pa.array([datetime.time(row) for row in (0, 1) * 6])],
    "timestamps": [
        pa.array(
            [
                datetime.datetime(2026, 1, 1 + row, tzinfo=datetime.timezone.utc)
                for row in (0, 1) * 6
            ]
        )
    ],
    "durations": [pa.array([datetime.timedelta(row) for row in (0, 1) * 6])],
    "lists, structs and maps": [
        pa.array([[0], [1]] * 6),
        pa.array([{"x": 0}, {"x": 1}] * 6),
        pa.array([[("x", 0)], [("x", 1)]] * 6, pa.map_(pa.string(), pa.int64())),
    ],
    "extension types and all others": [
        pa.ExtensionArray.from_storage(
            pa.uuid(), pa.array([b"0" * 16, b"1" * 16] * 6, pa.binary(16))
        ),
    ],
}


FOUND: dict[tuple[str, str], list[str]] = {
    **{
        (name, use): values
        for name in ("booleans", "integers", "floats", "decimals without fraction digits")
        for use, values in (("feature", ["0.0", "1.0"]), ("number", ["0.0", "1.0"]))
    },
    **{(name, "class"): ["0", "1"] for name in ("booleans", "integers")},
    ("floats", "class"): ["0.0", "1.0"],
    ("decimals without fraction digits", "class"): ["0", "1"],
    **{
        ("decimals with fraction digits", use): ["0.5", "1.5"]
        for use in ("feature", "number", "class")
    },
    ("text", "class"): ["x", "y"],
    ("bytes", "class"): ["x", "y"],
    ("null", "feature"): ["nan"],
}
"""What a column of STORED becomes, by the name of its type and its use."""


def test_every_column_type_is_tried() -> None:
    assert STORED.keys() == {each.name for each in COLUMN_TYPES}


@pytest.mark.parametrize("use", Use)
@pytest.mark.parametrize("row", COLUMN_TYPES, ids=lambda row: row.name)
def test_a_column_becomes_what_the_table_of_the_docs_says(
    row: Any, use: Use, tmp_path: Path
) -> None:
    for number, values in enumerate(STORED[row.name]):
        path = tmp_path / f"{number}" / "a.parquet"
        becomes = row.becomes(use)
        read = lambda: read_as(use, values, path)  # noqa: B023, E731
        if becomes is None:
            with pytest.raises(ConfigError, match=r"a.parquet.*(are right|are not numeric)"):
                read()
            continue
        found = read()
        assert found == FOUND[row.name, use.value if "label" not in use.value else "class"]


def read_as(use: Use, values: pa.Array, path: Path) -> list[str]:
    """Write a column and read it for a use; return its different values or its classes."""
    if use is Use.IMAGE:
        made.write_table(path, pa.array(PNGS, pa.binary()), values)
        return list(images_of(path).info.classes)
    if use is Use.FEATURE:
        table = table_of(write_rows(path, {"a": values, "label": ROWS["label"]}))
        return sorted(set(map(str, read_share(table, table.train, 0, 1).features[:, 0])))
    columns = {"a": ROWS["a"], "label": values}
    if use is Use.CLASS:
        return list(map(str, table_of(write_rows(path, columns)).classes))
    table = table_of(write_rows(path, columns), "regression")
    return sorted(set(map(str, read_share(table, table.train, 0, 1).labels)))


def test_labels_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    values = pa.array([b"caf\xe9", b"tea"] * 6)
    made.write_table(tmp_path / "pics/a.parquet", pa.array(PNGS, pa.binary()), values)
    with pytest.raises(ConfigError, match=r"label that is not UTF-8: 'caf\\\\xe9', in row 0"):
        images_of(tmp_path / "pics")
    write_rows(tmp_path / "a.parquet", {"a": ROWS["a"], "label": values})
    with pytest.raises(ConfigError, match=r"label that is not UTF-8: 'caf\\\\xe9', in row 0"):
        table_of(tmp_path / "a.parquet")


# Folders with columns in their names, and folders that stand for one file.


def in_partitions(folder: Path, *names: str, is_image: bool = False) -> Path:
    for name in names:
        file = folder / name / "part-0.parquet"
        if is_image:
            file.parent.mkdir(parents=True)
            pq.write_table(pa.table({"image": pa.array(PNGS, pa.binary())}), file)
        else:
            write_rows(file, {"a": ROWS["a"]})
    return folder


@pytest.mark.parametrize(
    ("names", "classes"),
    [
        (("label=0", "label=1"), (0, 1)),
        (("label=0.5", "label=1"), (0.5, 1.0)),
        (("label=New%20York", "label=a%2Fb"), ("New York", "a/b")),
        (("label=007", "label=1"), ("007", "1")),
        (("year=2024/label=x", "year=2025/label=y"), ("x", "y")),
        (("train/label=x", "train/label=y", "valid/label=x"), ("x", "y")),
        (("split=train/label=x", "split=train/label=y", "split=test/label=x"), ("x", "y")),
    ],
)
def test_a_label_may_be_in_the_names_of_folders(
    names: tuple[str, ...], classes: tuple[Any, ...], tmp_path: Path
) -> None:
    table = table_of(in_partitions(tmp_path / "t", *names))
    assert table.classes == classes
    assert table.columns == (("a", "year") if "year" in names[0] else ("a",))
    assert (table.train.share is None) == ("train" in names[0])
    prepared = images_of(in_partitions(tmp_path / "i", *names, is_image=True))
    expected = tuple(map(str, classes)) if classes != (0.5, 1.0) else ("0.5", "1.0")
    assert prepared.info.classes == expected
    folder = tmp_path / "p"
    for name in names:
        made.write_folder(folder / name, PNGS, LABELS)
        for row, file in enumerate(sorted((folder / name).rglob("*.png"))):
            file.rename(folder / name / f"{row}.png")
        for empty in made.NAMES:
            (folder / name / empty).rmdir()
    (tmp_path / "dest").rename(tmp_path / "other")
    assert images_of(folder).info.classes == expected


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("label=0", "label=__HIVE_DEFAULT_PARTITION__", "label=1"), "has no label"),
        (("label=0", "b=1"), "is in only one of"),
        (("label=%e9", "label=1"), "does not decode to UTF-8"),
        (("label=0/label=1", "label=1/label=1"), "has the column label twice"),
        (("city=x/label=0", "city=y/label=1"), r"not numeric: city \(string\)"),
    ],
)
def test_folders_with_unusable_columns_are_refused(
    names: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        table_of(in_partitions(tmp_path / "t", *names))
    if "city" not in names[0]:
        with pytest.raises(ConfigError, match=message):
            images_of(in_partitions(tmp_path / "i", *names, is_image=True))


def test_a_column_that_contradicts_its_folder_is_refused(tmp_path: Path) -> None:
    for value in (0, 1):
        write_rows(tmp_path / f"t/label={value}/x.parquet", ROWS | {"label": [value] * COUNT})
    assert table_of(tmp_path / "t").classes == (0, 1)
    write_rows(tmp_path / "t/label=1/y.parquet", ROWS | {"label": [0] * COUNT})
    with pytest.raises(ConfigError, match="folder for label = 1, but its column label contains"):
        table_of(tmp_path / "t")


def as_spark_writes(folder: Path, is_image: bool) -> Path:
    """A folder called .parquet, with an empty first file, hidden files and files of the writer."""
    marks = LABELS[:0].tolist(), LABELS.tolist()
    for number, labels in enumerate(marks):
        images = pa.array(PNGS[: len(labels)], pa.binary())
        columns = {"image": images} if is_image else {"a": ROWS["a"][: len(labels)]}
        kind = pa.null() if not labels else pa.int64()
        write_rows(
            folder / f"part-0000{number}.snappy.parquet",
            columns | {"label": pa.array(labels, kind)},
        )
    for name in ("_SUCCESS", "_metadata", ".part.parquet.crc", "_temporary/x.parquet"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x")
    return folder


def test_a_folder_may_be_called_like_a_file(tmp_path: Path) -> None:
    table = table_of(as_spark_writes(tmp_path / "t/all.parquet", is_image=False).parent)
    assert table.train.rows + table.valid.rows == COUNT
    prepared = images_of(as_spark_writes(tmp_path / "i/all.parquet", is_image=True))
    assert prepared.num_train + prepared.num_valid == COUNT


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl"])
def test_a_manifest_may_be_a_folder_of_files(kind: str, tmp_path: Path) -> None:
    pictures(tmp_path / "pics")
    folder = tmp_path / f"all.{kind}"
    records = [
        {"image": f"pics/{made.NAMES[label]}/{row:06}.png", "label": int(label)}
        for row, label in enumerate(LABELS)
    ]
    made.write_manifest(folder / f"part-1.{kind}", records[:5])
    made.write_manifest(folder / f"part-2.{kind}", records[5:])
    (folder / f"part-0.{kind}").touch()
    (folder / "_SUCCESS").touch()
    prepared = images_of(folder)
    assert prepared.num_train + prepared.num_valid == COUNT


def test_tables_without_rows_are_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.parquet", {"a": [], "label": [], "image": []})
    for read in (table_of, images_of):
        with pytest.raises(ConfigError, match="has no rows"):
            read(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["_delta_log", ".hoodie"])
def test_a_table_with_versions_is_refused(name: str, tmp_path: Path) -> None:
    write_rows(tmp_path / "t/a.parquet", ROWS)
    (tmp_path / "t" / name).mkdir()
    with pytest.raises(ConfigError, match=r"in the format of (Delta|Hudi)"):
        table_of(tmp_path / "t")


# Manifests.


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("begin", ["", "\ufeff", "\n", "sep={}\n"])
@pytest.mark.parametrize("name", ["all.csv", "all.tsv"])
def test_a_csv_file_may_have_any_usual_separator(
    separator: str, begin: str, name: str, tmp_path: Path
) -> None:
    said: list[str] = []
    pictures(tmp_path / "pics")
    lines = (
        ["image", "label", "note"],
        *(
            [f'"pics/{made.NAMES[label]}/{row:06}.png"', made.NAMES[label], '"a, b; c"']
            for row, label in enumerate(LABELS)
        ),
    )
    text = "\r\n".join(separator.join(line) for line in lines)
    (tmp_path / name).write_text(begin.format(separator) + text + "\n", newline="")
    assert images_of(tmp_path / name, said).info.classes == made.NAMES
    usual = "\t" if name.endswith("tsv") else ","
    assert any("columns are separated by" in line for line in said) == (separator != usual)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("p" * 300 + ".png", "longer than the file system allows"),
        ("a\0b.png", "and no path"),
        ("pics", "there is no such file"),
        ("pics\\ant\\000000.png", "there is no such file"),
    ],
)
def test_a_path_that_leads_nowhere_is_a_bad_sample(path: str, message: str, tmp_path: Path) -> None:
    pictures(tmp_path / "pics")
    records = [{"image": path, "label": "x"}, {"image": "pics/ant/000000.png", "label": "x"}]
    source = made.write_manifest(tmp_path / "all.jsonl", records)
    with pytest.raises(ConfigError, match=message):
        images_of(source)


def test_an_escape_that_is_no_character_is_a_bad_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"image": "caf\\udce9", "label": "x"}\n')
    with pytest.raises(ConfigError, match=r"line 1: it has an escape .* no character"):
        images_of(tmp_path / "a.jsonl")


# Repairs.


def grow(file: Path) -> None:
    file.write_bytes(PNGS[0])


def keep_size(file: Path) -> None:
    """Repair it to a file of the same size: what follows a picture's end is not read."""
    size = file.stat().st_size
    file.write_bytes(PNGS[0].ljust(size, b"\0"))


@pytest.mark.parametrize("repair", [grow, keep_size, Path.unlink])
@pytest.mark.parametrize("kind", ["folder", "manifest"])
def test_after_a_repaired_picture_the_same_command_goes_on(
    kind: str, repair: Callable[[Path], None], tmp_path: Path
) -> None:
    source = pictures(tmp_path / "source")
    broken = source / "ant/000000.png"
    broken.write_bytes(b"<html>404</html>".ljust(4096, b" "))
    if kind == "manifest":
        records = [
            {"image": f"{made.NAMES[label]}/{row:06}.png", "label": made.NAMES[label]}
            for row, label in enumerate(LABELS)
        ]
        source = made.write_manifest(source / "all.csv", records)
    with pytest.raises(ConfigError, match=r"(000000.png|line 2): it cannot be decoded"):
        images_of(source)
    repair(broken)
    if broken.exists():
        prepared = images_of(source)
        assert prepared.num_train + prepared.num_valid == COUNT
    elif kind == "folder":
        prepared = images_of(source)
        assert prepared.num_train + prepared.num_valid == COUNT - 1
    else:
        with pytest.raises(ConfigError, match="there is no such file"):
            images_of(source)


# Whole runs: the exit code, and that nothing was trained.


def boosting_config(attempts: Attempts, source: Path) -> BoostingConfig:
    return BoostingConfig.model_validate(
        {
            "name": "t",
            "data": {"source": str(source)},
            "train": TRAIN | {"objective": "multiclass"},
            "scaling": {"num_workers": 1, "use_gpu": False, "cpus_per_worker": 1},
            "storage": {"path": str(attempts.storage)},
        }
    )


@pytest.mark.ci
@pytest.mark.parametrize("arguments", [["--without-ray"], []], ids=["without Ray", "with Ray"])
def test_a_run_on_unusable_data_ends_at_once_with_exit_code_2(
    arguments: list[str], attempts: Attempts
) -> None:
    source = write_rows(attempts.storage / "data/a.parquet", ROWS | {"a": INFINITE})
    config = boosting_config(attempts, source)
    output = attempts.finish(config, 2, arguments=arguments)
    assert output.count("row 7 (from 0) of column a is inf") == 1
    assert "storage" not in output.replace(str(attempts.storage), "")
    assert not (attempts.storage / "t/metrics.jsonl").exists()


@pytest.mark.ci
def test_an_input_that_a_worker_refuses_is_tried_once(attempts: Attempts) -> None:
    """The file is removed after the driver has looked at it, and before the workers read it."""
    source = write_rows(attempts.storage / "data/a.parquet", ROWS)
    config = boosting_config(attempts, source)
    process = attempts.start(config)
    assert wait_for(lambda: attempts.read(config, "attempts.jsonl"), 120)
    source.unlink()
    output, _ = process.communicate()
    assert process.returncode == 2, output
    assert "a.parquet cannot be read: No such file or directory" in output
    assert len(read_records(config, "failures.jsonl")) == 1


@pytest.mark.parametrize("loader", ["torch", "ray"])
def test_images_that_are_refused_are_refused_for_either_loader(loader: Any, tmp_path: Path) -> None:
    source = linked("ant/up", "..")(tmp_path / "source")
    config = small_config(tmp_path, data__source=str(source), data__loader=loader)
    with pytest.raises(ConfigError, match="link in a circle"):
        open_data(config, open_folder(config))


@pytest.mark.parametrize("tool", ["prepare", "inspect"])
def test_the_tools_refuse_with_exit_code_2(
    tool: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = linked("ant/up", "..")(tmp_path / "source")
    dest = [str(tmp_path / "dest")] if tool == "prepare" else []
    assert data_tool.main([tool, str(source), *dest]) == 2
    assert "link in a circle" in capsys.readouterr().err
