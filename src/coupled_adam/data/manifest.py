"""`manifest.json`: the contents of a folder of token shards. Written last: a folder with a manifest is complete.

    {"tokenizer": "gpt2", "vocabulary_size": 50257, "dtype": "uint16", "separator": 50256, "source": "text:books/*.txt",
     "splits": {"train": {"tokens": 1200, "documents": 3, "shards": [{"file": "train-00000.bin", "tokens": 1200,
                                                                      "sha256": "..."}]}}}

`tokenizer` is a tiktoken name, or "tokenizer.json" for the file of that name in the folder. A manifest written by hand
needs only `vocabulary_size`, `dtype` and `splits`.
"""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError, field_validator

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import read_json, write_whole

MANIFEST_FILE = "manifest.json"
TOKENIZER_FILE = "tokenizer.json"
UNIGRAM_FILE = "unigram.npy"
SPLITS = ("train", "val", "test")
LARGEST_VOCABULARY = 2**31
"""Limit because token counts are kept in memory; the largest tokenizers have a million tokens."""


class Shard(BaseModel):
    """One file of tokens: headerless, little-endian."""

    model_config = ConfigDict(frozen=True)

    file: str
    tokens: PositiveInt
    sha256: str | None = None

    @field_validator("file")
    @classmethod
    def _lies_in_the_folder(cls, file: str) -> str:
        if not file or "\0" in file or Path(file).is_absolute() or ".." in Path(file).parts:
            raise UserError("a shard must be in the folder of the manifest")
        return file


class Split(BaseModel):
    """The shards of one split, in order: one sequence of tokens cut into files."""

    model_config = ConfigDict(frozen=True)

    tokens: NonNegativeInt
    documents: NonNegativeInt | None = None
    shards: list[Shard]


class Manifest(BaseModel):
    """Content of manifest.json; unknown keys are kept and ignored."""

    model_config = ConfigDict(frozen=True, extra="allow")

    tokenizer: str | None = None
    """A tiktoken name, "tokenizer.json" for the file in the folder, or None if unknown."""
    vocabulary_size: Annotated[int, Field(gt=0, le=LARGEST_VOCABULARY)]
    dtype: Literal["uint16", "uint32", "int32", "int64"]
    separator: NonNegativeInt | None = None
    """The token after every document."""
    source: str | None = None
    splits: dict[str, Split]
    settings: dict[str, Any] = {}
    """Settings of `prepare`, to detect a request with other settings."""

    @field_validator("splits")
    @classmethod
    def _has_known_names(cls, splits: dict[str, Split]) -> dict[str, Split]:
        if "train" not in splits or not set(splits) <= set(SPLITS):
            raise UserError(f"splits are {', '.join(splits) or 'none'}, expected train and optionally val and test")
        return {name: splits[name] for name in SPLITS if name in splits}

    @property
    def fingerprint(self) -> str:
        """Twelve hex digits that depend on the tokens and the tokenizer, but not on the source."""
        what = self.model_dump(mode="json", include={"tokenizer", "vocabulary_size", "dtype", "separator", "splits"})
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]


def read_manifest(path: Path) -> Manifest:
    """Read and validate manifest.json."""
    remedy = "write it as docs/data.md shows, or prepare the folder again with --overwrite"
    try:
        content = read_json(path)
    except ValueError as error:
        raise UserError(f"{error}; {remedy}") from None
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise UserError(f"{path}: {where}: {first['msg']}; {remedy}") from None


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write manifest.json atomically."""
    write_whole(path, json.dumps(manifest.model_dump(mode="json"), indent=1) + "\n")
