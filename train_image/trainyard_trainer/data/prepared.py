"""A prepared data set: a description, and Parquet files of samples.

    <path>/dataset.json                 the description of the data set; written last, so an incomplete data
                                        set has none
    <path>/train/part-00000.parquet     samples in random order, in row groups of a few MB
    <path>/valid/part-00000.parquet

The files have a column `id` (int64), the row number of a sample in its split, and those of the kind of data:

* images and text: `image`, bytes, and `label`, int64. `image` holds pixels (uint8, in the order channel, row,
  column) or a plain image file (see `image_codec.py`); for text the bytes of a row (see
  `sources/tokens/byte_rows.py`).
* tokens of chats: `tokens` and `flags`, bytes (see `TokenInfo`).
* tokens of text: `tokens`, bytes (see `TokenStreamInfo`).

`stored_rows.py` writes and reads the rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from pyarrow import fs
from typing_extensions import Self, assert_never

from trainyard_trainer.errors import ConfigError
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.storage import open_filesystem

METADATA_KEY = b"trainyard"

ID = "id"
"""The column of the samples' ids, in files and in arrays."""

FORMAT = 4
"""The version of dataset.json. A file of another version is refused."""

DATASET = "dataset.json"

LEARNT = 1
"""The bit of `flags` of a token that the model learns to predict from those before it."""

STARTS_DOCUMENT = 2
"""The bit of `flags` of the first token of a document, which sees nothing of the documents before it. The
first padding token has it, too. It is never learnt."""

PADDING = 4
"""The bit of `flags` of a token that only fills the row."""


PromptAs = Literal["chat", "text"]
"""What a prompt is: a user's turn, which the chat template renders, or a text that a model continues."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataColumn:
    """What each sample of a data set has in one column."""

    shape: tuple[int, ...]
    """The shape of a decoded value."""
    dtype: Literal["uint8", "int32", "int64"]
    stored: str
    """The column of the Parquet files that has the values: as numbers if `shape` is empty, else as bytes."""
    is_encoded: bool = False
    """Whether the bytes are a file of any size, which has to be decoded."""
    stored_dtype: Literal["uint16", "uint32"] | None = None
    """The type of the stored numbers, if they are stored as another type than `dtype`."""

    @property
    def bytes(self) -> int:
        """The size of a decoded value."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def numbers(self) -> np.dtype[Any]:
        """The type of the stored numbers."""
        return np.dtype(self.stored_dtype or self.dtype)

    @property
    def stored_bytes(self) -> int:
        """The size of a stored value that is no file."""
        return math.prod(self.shape) * self.numbers.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetInfo:
    """The format and statistics of a prepared data set: what all its samples have in common."""

    source: str
    """The path or name of the source that was prepared."""
    shape: tuple[int, int, int]
    """Channels, rows and columns of each decoded image. A row of N bytes of text has the shape (1, 1, N)."""
    kind: Literal["images", "text"] = "images"
    encoding: Literal["raw", "encoded"] = "raw"
    """How the column `image` stores images: `raw` pixels, or `encoded` image files."""
    classes: tuple[str, ...]
    """The names of the classes, by label."""
    mean: tuple[float, ...]
    """The mean of the training images, per channel, with pixels from 0 to 1."""
    std: tuple[float, ...]
    """The standard deviation of the training images, per channel, with pixels from 0 to 1."""

    @property
    def decoded(self) -> DatasetInfo:
        """The same data set with pixels in place of image files."""
        return replace(self, encoding="raw")

    @property
    def bytes_per_sample(self) -> int:
        """The size of a decoded image, or of a row of text."""
        return int(np.prod(self.shape))

    @property
    def columns(self) -> dict[str, DataColumn]:
        """The columns of a batch by name: `image` and `label`, or `text`."""
        if self.kind == "text":
            return {
                "text": DataColumn(shape=(self.bytes_per_sample,), dtype="uint8", stored="image")
            }
        is_encoded = self.encoding == "encoded"
        return {
            "image": DataColumn(
                shape=self.shape, dtype="uint8", stored="image", is_encoded=is_encoded
            ),
            "label": DataColumn(shape=(), dtype="int64", stored="label"),
        }

    @property
    def stored(self) -> list[str]:
        """The columns of the Parquet files that a loader reads."""
        return [ID, *(column.stored for column in self.columns.values())]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCounts:
    """What became of the rows of a source in one split of a data set of tokens."""

    source_rows: int
    """The rows of the source that could be used."""
    samples: int
    """The documents in the stored rows: source rows, or parts of those that were split."""
    tokens: int
    """The tokens of all samples, without padding."""
    learnt_tokens: int
    padding_tokens: int
    truncated_rows: int
    """The source rows whose end was left out because they are too long."""
    truncated_tokens: int
    """The tokens that were left out with it."""
    split_rows: int
    """The source rows that became several samples because they are too long."""
    left_out: int
    """The source rows, or parts of split ones, that were left out because no token of them is learnt."""
    longest_sample: int
    lengths: tuple[int, ...]
    """The number of samples by length: entry i counts lengths from 2**i up to, but without, 2**(i + 1)."""

    @property
    def fill_rate(self) -> float:
        """The share of the stored tokens that is not padding."""
        return self.tokens / (self.tokens + self.padding_tokens)


def token_column(row_tokens: int, vocab_size: int) -> DataColumn:
    """Return the column of tokens: stored as uint16 if no token is above 65535, else as uint32."""
    stored: Literal["uint16", "uint32"] = "uint16" if vocab_size <= 2**16 else "uint32"
    return DataColumn(shape=(row_tokens,), dtype="int32", stored="tokens", stored_dtype=stored)


class StoredTokens:
    """What the infos of data sets of tokens share: a token is stored as its number."""

    __slots__ = ()

    @property
    def columns(self) -> dict[str, DataColumn]:
        """The columns of a batch by name."""
        raise NotImplementedError

    @property
    def encoding(self) -> Literal["raw"]:
        """How values are stored: tokens need no decoding."""
        return "raw"

    @property
    def decoded(self) -> Self:
        """The same data set: tokens are not encoded."""
        return self

    @property
    def bytes_per_sample(self) -> int:
        """The size of a row in memory."""
        return sum(column.bytes for column in self.columns.values())

    @property
    def stored(self) -> list[str]:
        """The columns of the Parquet files that a loader reads."""
        return [ID, *(column.stored for column in self.columns.values())]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenInfo(StoredTokens):
    """The format and statistics of a prepared data set of tokens.

    Each stored row has `row_tokens` tokens: documents one after the other, then padding. `flags` has bits for
    each token: `LEARNT`, `STARTS_DOCUMENT` and `PADDING`.
    """

    source: str
    """The path of the source that was prepared."""
    row_tokens: int
    """The number of tokens of each stored row."""
    context_length: int
    """The largest number of tokens of a document."""
    vocab_size: int
    """One more than the highest token id of the tokenizer."""
    pad_id: int
    """The token that fills rows."""
    tokenizer: str
    """The folder of the tokenizer, as it was given."""
    tokenizer_sha256: str
    """The SHA-256 of the tokenizer's files."""
    loss_on: Literal["answers", "all"]
    packing: bool
    too_long: Literal["truncate", "split", "refuse"]
    prompt_as: PromptAs
    """What a prompt has to be to look as in training: `chat` if the chat template has rendered any row."""
    rows_sha256: str
    """The SHA-256 of the tokens and flags of all rows, training first. Paths do not change it."""
    train: TokenCounts
    valid: TokenCounts

    @property
    def columns(self) -> dict[str, DataColumn]:
        """The columns of a batch by name: `tokens` and `flags`."""
        return {
            "tokens": token_column(self.row_tokens, self.vocab_size),
            "flags": DataColumn(shape=(self.row_tokens,), dtype="uint8", stored="flags"),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamCounts:
    """The size of one split of a stream of tokens."""

    tokens: int
    """The tokens, with those that end documents and those that fill no whole row."""
    documents: int | None = None
    """None if it is not known, as of files of tokens."""
    bytes: int | None = None
    """The bytes of the text; None if they are not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenStreamInfo(StoredTokens):
    """The format and statistics of text as one stream of tokens, cut into rows that overlap by a token.

    All tokens of a row but the first are learnt, so each token of the stream but the first is learnt once.
    """

    source: str
    """The path of the source that was prepared."""
    row_tokens: int
    """The number of tokens of each row: one more than the context length."""
    vocab_size: int
    """One more than the highest id of a token."""
    end_of_text: int | None
    """The token between documents; None if they are not separated."""
    tokenizer: str | None
    """The folder of the tokenizer, as it was given; None if there is none."""
    tokenizer_sha256: str | None
    """The SHA-256 of the tokenizer's files."""
    train: StreamCounts
    valid: StreamCounts

    @property
    def columns(self) -> dict[str, DataColumn]:
        """The only column of a batch: `tokens`."""
        return {"tokens": token_column(self.row_tokens, self.vocab_size)}


PreparedInfo = DatasetInfo | TokenInfo | TokenStreamInfo
"""The format and statistics of a prepared data set of any kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """The Parquet files of the training or the validation samples."""

    files: tuple[str, ...]
    """The paths of the files, as the filesystem of the data set takes them."""
    rows: tuple[int, ...]
    """The number of rows of each file."""

    @property
    def count(self) -> int:
        return sum(self.rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A prepared data set that a loader can read."""

    info: PreparedInfo
    train: Split
    valid: Split
    path: str
    """The path or URL as in a run file."""
    endpoint: str | None
    """The address of the S3 server; None for AWS, or for a disk."""
    bad_samples: int = 0
    """The number of samples that could not be read and were left out."""

    @property
    def num_train(self) -> int:
        return self.train.count

    @property
    def num_valid(self) -> int:
        return self.valid.count

    @property
    def images(self) -> DatasetInfo:
        """The info of a data set of images or text. Raises ConfigError for one of tokens."""
        if not isinstance(self.info, DatasetInfo):
            raise ConfigError(f"{self.path} holds {kind_of(self.info)}.")
        return self.info

    def open_filesystem(self) -> fs.FileSystem:
        """Open the filesystem of the splits' files."""
        return open_filesystem(self.path, self.endpoint)[0]


def is_prepared(folder: RunFolder) -> bool:
    return folder.exists(f"{folder.root}/{DATASET}")


def read_dataset_json(folder: RunFolder) -> dict[str, Any]:
    """Return the content of dataset.json. Raises ConfigError if it is of another version or damaged."""
    path = f"{folder.root}/{DATASET}"
    try:
        known = json.loads(folder.read(path))
        found = known["format"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder.show(path)} was not written by `trainyard data prepare`: {error}."
        ) from error
    if found != FORMAT:
        raise ConfigError(
            f"{folder.show(path)} has format {found}, and this version reads {FORMAT}. "
            "Prepare the data again: trainyard data prepare."
        )
    return known


def read_prepared(folder: RunFolder, *, path: str, endpoint: str | None) -> Prepared:
    """Return the data set of a folder; `path` and `endpoint` are those of the run file.

    Raises ConfigError if a file is missing or has a size other than dataset.json says.
    """
    known = read_dataset_json(folder)
    files = {name: known["splits"][name]["files"] for name in ("train", "valid")}
    _check_files(folder, [file for part in files.values() for file in part])
    return Prepared(
        info=prepared_info_of_json(
            next(known[key] for key in ("stream", "tokens", "images") if key in known)
        ),
        **{
            name: Split(
                files=tuple(f"{folder.root}/{file['file']}" for file in part),
                rows=tuple(file["rows"] for file in part),
            )
            for name, part in files.items()
        },
        path=path,
        endpoint=endpoint,
        bad_samples=len(known["bad_samples"]),
    )


def kind_of(info: PreparedInfo) -> str:
    """Return what a prepared data set holds, for messages."""
    match info:
        case TokenInfo():
            return "tokens, which only recipe causal_lm trains on"
        case TokenStreamInfo():
            return "tokens of text, which only recipe language_model with a tokenizer trains on"
        case DatasetInfo():
            return info.kind
        case _:
            assert_never(info)


def prepared_info_of_json(known: Mapping[str, Any]) -> PreparedInfo:
    """Return the info of a prepared data set of any kind that a JSON object holds."""
    if "end_of_text" in known:
        counts = {name: StreamCounts(**known[name]) for name in ("train", "valid")}
        return TokenStreamInfo(**{**known, **counts})
    return token_info_of_json(known) if "row_tokens" in known else info_of_json(known)


def info_of_json(known: Mapping[str, Any]) -> DatasetInfo:
    """Return the info that a JSON object holds, with tuples in place of lists."""
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in known.items()
    }
    return DatasetInfo(**values)


def token_info_of_json(known: Mapping[str, Any]) -> TokenInfo:
    """Return the info of a data set of tokens that a JSON object holds."""
    counts = {
        name: TokenCounts(**known[name] | {"lengths": tuple(known[name]["lengths"])})
        for name in ("train", "valid")
    }
    return TokenInfo(**{**known, **counts})


def _check_files(folder: RunFolder, files: Sequence[dict[str, Any]]) -> None:
    infos = folder.infos([f"{folder.root}/{file['file']}" for file in files])
    for info, file in zip(infos, files, strict=True):
        if info.type != fs.FileType.File or info.size != file["bytes"]:
            found = f"has {info.size:,} bytes" if info.type == fs.FileType.File else "is missing"
            raise ConfigError(
                f"{folder.show(info.path)} {found}, where {DATASET} counts {file['bytes']:,} bytes. "
                "Prepare the data again: trainyard data prepare."
            )
