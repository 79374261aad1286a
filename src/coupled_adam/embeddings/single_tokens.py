"""Tokenizers behind one small protocol: which single token is a word, and which tokens is a text.

Where words are written with their leading space (GPT-2's "Ġhouse", SentencePiece's "▁house"), the token with the space
is the word as it stands in a text. So a word is always looked up as it is written after another word.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

from coupled_adam.base.extras import require

# Any word that all tokenizers know will do.
WORD_BEFORE = "the"


class SingleTokens(Protocol):
    """What the measures need of a tokenizer."""

    @property
    def size(self) -> int:
        """Number of tokens."""

    def token_id(self, word: str) -> int | None:
        """The token that stands for the word inside a text, or None where it is split."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without any added at its ends."""


def open_tokenizer(spec: str | Path) -> SingleTokens:
    """Open a tokenizer.

    Args:
        spec: a `tokenizers` JSON file, a Hugging Face folder with tokenizer.json, a GGUF file, or a tiktoken name such
            as "gpt2". tiktoken downloads its files once; TIKTOKEN_CACHE_DIR names a folder that has them.
    """
    path = Path(spec)
    if path.is_dir():
        if not (path / "tokenizer.json").is_file():
            raise ValueError(
                f"tokenizer: the folder {path} has no tokenizer.json; "
                "save it with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        return open_json(path / "tokenizer.json")
    if path.is_file():
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
        return open_gguf(path) if is_gguf else open_json(path)
    return open_tiktoken(str(spec))


@dataclass(frozen=True)
class EncodingTokens:
    """A tokenizer that splits a text into tokens."""

    size: int
    encode_text: Callable[[str], list[int]]
    decode_tokens: Callable[[list[int]], str]

    def encode(self, text: str) -> list[int]:
        return self.encode_text(text)

    def token_id(self, word: str) -> int | None:
        before, tokens = self.encode(WORD_BEFORE), self.encode(f"{WORD_BEFORE} {word}")
        if len(tokens) != len(before) + 1 or tokens[:-1] != before:
            return None
        # An unknown word is a single token as well, but not its own.
        itself = self.decode_tokens(tokens[-1:]).strip().casefold() == word.casefold()
        return tokens[-1] if itself else None


@dataclass(frozen=True)
class VocabularyTokens:
    """A list of tokens without the rules that split a text into them."""

    size: int
    ids: dict[str, int]
    byte_level: bool
    """Tokens are written as GPT-2 does, else as SentencePiece does."""
    origin: str

    def token_id(self, word: str) -> int | None:
        return self.ids.get(as_byte_level(" " + word) if self.byte_level else "▁" + word)

    def encode(self, text: str) -> list[int]:
        raise ValueError(
            f"tokenizer: {self.origin} lists its tokens but not how to split a text; pass the model's tokenizer.json"
        )


def open_json(path: Path) -> EncodingTokens:
    """A file of the `tokenizers` library."""
    tokenizers = require("tokenizers", "study", f"to open the tokenizer {path}")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(
            f"tokenizer: {path} is neither a tokenizer.json of the `tokenizers` library nor GGUF ({error})"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return EncodingTokens(
        tokenizer.get_vocab_size(),
        lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
        lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=False)),
    )


def open_tiktoken(name: str) -> EncodingTokens:
    """An encoding of OpenAI's tiktoken."""
    tiktoken = require("tiktoken", "study", f"to open the tokenizer {name!r}")
    known = tiktoken.list_encoding_names()
    if name not in known:
        raise ValueError(
            f"tokenizer: {name!r} is neither a file or folder here nor a tiktoken name ({', '.join(known)}); "
            "pass the path of a tokenizer.json, a model folder or a GGUF file"
        )
    try:
        encoding = tiktoken.get_encoding(name)
    except OSError as error:  # what requests raises without a network is one of these
        raise ConnectionError(
            f"tokenizer: tiktoken could not download {name!r} ({type(error).__name__}). Go online, set "
            "TIKTOKEN_CACHE_DIR to a folder that has it, or pass the path of a tokenizer.json"
        ) from error
    return EncodingTokens(
        encoding.n_vocab, lambda text: list(encoding.encode(text, allowed_special="all")), encoding.decode
    )


def open_gguf(path: Path) -> VocabularyTokens:
    """The vocabulary of a GGUF file."""
    gguf = require("gguf", "gguf", f"to read {path}")
    try:
        field = gguf.GGUFReader(str(path)).get_field("tokenizer.ggml.tokens")
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(f"tokenizer: {path} is a damaged GGUF file ({error}); download it again") from error
    if field is None:
        raise ValueError(f"tokenizer: {path} has no vocabulary; pass the tokenizer.json of the model")
    tokens: list[str] = field.contents()
    byte_level = sum(token.startswith("Ġ") for token in tokens)
    sentence_piece = sum(token.startswith("▁") for token in tokens)
    if byte_level == sentence_piece == 0:
        raise ValueError(
            f"tokenizer: no token of {path} starts with 'Ġ' or '▁', so words cannot be told from parts of words; "
            "pass the tokenizer.json of the model"
        )
    ids: dict[str, int] = {}
    for index, token in enumerate(tokens):
        ids.setdefault(token, index)
    return VocabularyTokens(len(tokens), ids, byte_level > sentence_piece, str(path))


@cache
def byte_letters() -> dict[int, str]:
    """The letter by which GPT-2 writes each byte: itself where it is visible, else the next one from 256 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


def as_byte_level(text: str) -> str:
    """A text as GPT-2's vocabulary writes it.

    Example:
        >>> as_byte_level(" café")
        'ĠcafÃ©'
    """
    return "".join(byte_letters()[byte] for byte in text.encode())
