"""Settings of a data preparation, their defaults, and the differences between two sets of settings."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coupled_adam.base.errors import UserError
from coupled_adam.byte_level_bpe import BYTES

SHARD_TOKENS = 100_000_000


@dataclass(frozen=True)
class Settings:
    """Settings that determine the content of a corpus folder; None is the default of the source or tokenizer."""

    source: str
    tokenizer: str
    field: str = "text"
    separator: str | None = None
    val: float | None = None
    test: float | None = None
    seed: int = 0
    shard_tokens: int = SHARD_TOKENS
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.shard_tokens < 1:
            raise UserError(f"shard_tokens is {self.shard_tokens}, expected 1 or more")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UserError(f"max_tokens is {self.max_tokens}, expected 1 or more")
        if self.tokenizer.startswith("bpe:"):
            bpe_size(self.tokenizer)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def default_tokenizer(source: str) -> str:
    """Default tokenizer of a source: GPT-2's, or for the built-in text one that needs no download."""
    return "bpe:4096" if source == "python-docs" else "gpt2"


def default_folder(source: str, tokenizer: str) -> Path:
    """Default folder of a corpus.

    Example:
        >>> print(default_folder("python-docs", "bpe:4096"), default_folder("text:my books/*.txt", "gpt2"))
        data/python-docs-bpe4096 data/my-books-txt-gpt2
    """
    name = re.sub("[^A-Za-z0-9]+", "-", re.sub("^(hf|text|tokens):", "", source)).strip("-")
    return Path("data", f"{name}-{re.sub('[^A-Za-z0-9]+', '', Path(tokenizer).name)}")


def bpe_size(tokenizer: str) -> int:
    """Parse and check the N of "bpe:N".

    Example:
        >>> bpe_size("bpe:4096")
        4096
    """
    size = tokenizer.removeprefix("bpe:")
    if not size.isdecimal() or not BYTES < int(size) <= 2**20:
        raise UserError(
            f"tokenizer {tokenizer!r}: expected bpe:N with N from {BYTES + 1} (all bytes plus the separator) to {2**20}"
        )
    return int(size)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe the settings that changed.

    Example:
        >>> differences({"tokenizer": "gpt2", "seed": 0}, {"tokenizer": "bpe:4096", "seed": 0})
        ["tokenizer was 'gpt2' and is 'bpe:4096'"]
    """
    keys = [*before, *(key for key in now if key not in before)]
    return [f"{key} was {before.get(key)!r} and is {now.get(key)!r}" for key in keys if before.get(key) != now.get(key)]
