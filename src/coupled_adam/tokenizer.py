"""One class for every kind of tokenizer: a tiktoken name, a tokenizer.json, or the vocabulary of a GGUF file.

`Tokenizer` holds only a few values, so that it can be sent to another process; the underlying library is opened when it
first encodes a text. The packages tiktoken, tokenizers and gguf are needed only for tokenizers of their kind.

Legend: V tokens of the vocabulary.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

from coupled_adam.base.errors import UserConnectionError, UserError
from coupled_adam.base.extras import require
from coupled_adam.base.files import parse_json, user_path
from coupled_adam.byte_level_bpe import END_OF_TEXT, as_byte_level, gpt2_json_file

# Common names of the token that ends a document, most likely first.
SEPARATORS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")
# Any word that all tokenizers know.
WORD_BEFORE = "the"
# These split a text into words by the pattern that is built into `ByteLevel` of the `tokenizers` library.
GPT2_ENCODINGS = ("gpt2", "r50k_base")
GPT2_SIZE = 50257


class SingleTokens(Protocol):
    """The interface that the measures of an embedding matrix need."""

    @property
    def size(self) -> int:
        """Number of tokens."""

    def token_id(self, word: str) -> int | None:
        """The single token of a word inside a text; None if the word is split."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without special tokens added at its ends."""


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer: encodes texts, finds the token of a word, and provides the tokenizer.json for an export."""

    kind: Literal["tiktoken", "json", "gguf"]
    name: str
    """A tiktoken name, or the path of a tokenizer.json or GGUF file."""
    size: int
    """V: one more than the highest token, since token numbers may have gaps."""
    separator: int | None
    """The token between documents; None if no token has a common name for it."""

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return Tokenizer, (self.kind, self.name, self.size, self.separator)  # each process opens the library itself

    @property
    def dtype(self) -> str:
        """The smallest dtype that holds its tokens."""
        return "uint16" if self.size <= 2**16 else "uint32"

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Encode a text; special tokens written out in it are recognized.

        Args:
            text: any text.
            add_special_tokens: also add the tokens that a tokenizer.json puts at the ends of a text.
        """
        if self.kind == "tiktoken":
            return list(self._library.encode(text, allowed_special="all"))
        return list(self._splitting_library.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_documents(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """Encode texts for training; special tokens written out in a text are encoded as plain text."""
        if self.kind == "tiktoken":
            return [self._library.encode_ordinary(text) for text in texts]
        return [found.ids for found in self._document_library.encode_batch_fast(list(texts), add_special_tokens=False)]

    def token_id(self, word: str) -> int | None:
        """The single token of a word inside a text; None if the word is split.

        Many tokenizers join a word with its leading space (GPT-2's "Ġhouse", SentencePiece's "▁house"), so the word is
        looked up as it appears after another word.
        """
        if self.kind == "gguf":
            vocabulary: GgufVocabulary = self._library
            return vocabulary.ids.get(as_byte_level(" " + word) if vocabulary.byte_level else "▁" + word)
        before, tokens = self.encode(WORD_BEFORE), self.encode(f"{WORD_BEFORE} {word}")
        if len(tokens) != len(before) + 1 or tokens[:-1] != before:
            return None
        # An unknown word may also be a single token, but not its own.
        return tokens[-1] if self._decode(tokens[-1]).strip().casefold() == word.casefold() else None

    def printable_tokens(self, tokens: Sequence[int]) -> list[str]:
        r"""Tokens as printable text: in quotes, with invisible characters as \n, \x1b or \xf0."""
        if self.kind == "tiktoken":
            contents = [self._library.decode_single_token_bytes(t).decode(errors="backslashreplace") for t in tokens]
        else:
            contents = [self._decode(token) for token in tokens]
        return [repr(content).replace("\\\\x", "\\x") for content in contents]

    @property
    def separator_token(self) -> str | None:
        """Text of the token between documents."""
        if self.separator is None:
            return None
        if self.kind == "tiktoken":
            return self._decode(self.separator)
        return next(
            token for token, number in _tokens_in(self.json_file, self.name).items() if number == self.separator
        )

    @property
    def unknown_token(self) -> str | None:
        """Text of the unknown token; byte-level tokenizers have none and use the token between documents."""
        model = json.loads(self.json_file)["model"]
        tokens = _numbered(self.json_file, self.name)
        unknown = model.get("unk_token") or tokens.get(model.get("unk_id"))
        return unknown if unknown in tokens.values() else self.separator_token

    @cached_property
    def json_file(self) -> bytes:
        """Content of its tokenizer.json; for GPT-2's encodings, generated from tiktoken's ranks."""
        if self.kind == "json":
            return Path(self.name).read_bytes()
        if self.name in GPT2_ENCODINGS:
            return gpt2_json_file(self._library)
        raise UserError(f"tokenizer: {self.name!r} is neither a tokenizer.json nor {' or '.join(GPT2_ENCODINGS)}")

    @cached_property
    def sha256(self) -> str:
        """Hash of its tokenizer.json."""
        return hashlib.sha256(self.json_file).hexdigest()

    def _decode(self, token: int) -> str:
        if self.kind == "tiktoken":
            return str(self._library.decode([token]))
        return str(self._splitting_library.decode([token], skip_special_tokens=False))

    @cached_property
    def _library(self) -> Any:
        """The object of the underlying library."""
        opener: Callable[[str], Any] = {"tiktoken": _tiktoken, "json": _from_file, "gguf": _gguf_vocabulary}[self.kind]
        return opener(self.name)

    @property
    def _splitting_library(self) -> Any:
        if self.kind == "gguf":
            raise UserError(
                f"tokenizer: {self.name} lists tokens but not how to split a text; pass the model's tokenizer.json"
            )
        return self._library

    @cached_property
    def _document_library(self) -> Any:
        library = _from_file(self.name)
        library.encode_special_tokens = True
        return library


# GPT-2's values, for token sources, which do not need its file.
GPT2 = Tokenizer("tiktoken", "gpt2", GPT2_SIZE, GPT2_SIZE - 1)


def open_tokenizer(spec: str | Path, separator: str | int | None = None) -> Tokenizer:
    """Open a tokenizer and its library.

    Args:
        spec: a `tokenizers` JSON file, a Hugging Face folder with tokenizer.json, a GGUF file, or a tiktoken name such
            as "gpt2". tiktoken downloads its files once; TIKTOKEN_CACHE_DIR names a folder that has them.
        separator: name or number of the token between documents; None for a token with a common name, if any.
    """
    tokenizer = read_tokenizer(spec, separator)
    assert tokenizer._library is not None  # raises now for a missing package or a damaged file, not at first use
    return tokenizer


def read_tokenizer(spec: str | Path, separator: str | int | None = None) -> Tokenizer:
    """Open a tokenizer without its library: reading a tokenizer.json does not need the package `tokenizers`."""
    path = tokenizer_path(spec)
    if path is None:
        return _read_tiktoken(str(spec), separator)
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"  # a GGUF file can have gigabytes
    if is_gguf:
        return Tokenizer("gguf", str(path), _gguf_vocabulary(str(path)).size, None)
    tokens = _tokens_in(path.read_bytes(), str(path))
    return Tokenizer("json", str(path), max(tokens.values()) + 1, _separator(tokens, separator, str(path)))


def tokenizer_path(spec: str | Path) -> Path | None:
    """The tokenizer file at a path or in a folder; None for a tiktoken name."""
    path = user_path(spec)
    if path.is_dir() and str(spec) not in GPT2_ENCODINGS:  # a model folder may be called gpt2
        if not (path / "tokenizer.json").is_file():
            raise UserError(
                f"tokenizer: the folder {path} has no tokenizer.json; "
                "save it with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        return path / "tokenizer.json"
    if path.suffix == ".json" and not path.is_file():
        raise UserError(f"tokenizer: no such file: {spec}; expected a tokenizer.json, bpe:N or a tiktoken name")
    return path if path.is_file() else None


def _separator(tokens: Mapping[str, int], separator: str | int | None, origin: str) -> int | None:
    if separator is None:
        return next((tokens[name] for name in SEPARATORS if name in tokens), None)
    if isinstance(separator, str):
        if separator not in tokens:
            raise UserError(
                f"tokenizer {origin}: none of its tokens is {separator}; name the token that ends a document with "
                "--separator"
            )
        return tokens[separator]
    if separator not in tokens.values():
        raise UserError(f"tokenizer: {origin} has no token {separator}, the separator of the corpus")
    return separator


def _tokens_in(content: bytes, origin: str) -> dict[str, int]:
    """Tokens of a tokenizer.json and their numbers."""
    try:
        parsed = parse_json(content, origin)
        vocabulary = parsed["model"]["vocab"]
        # Unigram models list tokens with scores; the others map tokens to numbers.
        tokens = {token: number for number, (token, _) in enumerate(vocabulary)} if isinstance(vocabulary, list) else {}
        tokens |= vocabulary if isinstance(vocabulary, dict) else {}
        tokens |= {token["content"]: token["id"] for token in parsed.get("added_tokens") or ()}
        tokens = {str(token): int(number) for token, number in tokens.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"tokenizer: {origin} is neither a tokenizer.json of the `tokenizers` library nor GGUF ({error})"
        ) from None
    if not tokens:
        raise UserError(f"tokenizer: {origin} has no tokens")
    return tokens


def _numbered(content: bytes, origin: str) -> dict[int, str]:
    return {number: token for token, number in _tokens_in(content, origin).items()}


def _read_tiktoken(name: str, separator: str | int | None) -> Tokenizer:
    encoding = _tiktoken(name)
    special = {token: encoding.encode_single_token(token) for token in encoding.special_tokens_set}
    if separator is None:
        return Tokenizer("tiktoken", name, encoding.n_vocab, special.get(END_OF_TEXT))
    if isinstance(separator, str) and separator not in special:
        raise UserError(
            f"separator {separator!r}: {name} has no such special token; it has {', '.join(sorted(special))}"
        )
    return Tokenizer("tiktoken", name, encoding.n_vocab, _separator(special, separator, name))


def _tiktoken(name: str) -> Any:
    """Open a tiktoken encoding."""
    tiktoken = require("tiktoken", "study", f"to open the tokenizer {name!r}")
    known = tiktoken.list_encoding_names()
    if name not in known:
        raise UserError(
            f"tokenizer: {name!r} is neither a file or folder here nor a tiktoken name ({', '.join(known)}); "
            "pass the path of a tokenizer.json, a model folder or a GGUF file"
        )
    try:
        return tiktoken.get_encoding(name)
    except OSError as error:  # includes the errors of requests
        raise UserConnectionError(
            f"tokenizer: tiktoken could not download {name!r} ({type(error).__name__}). Go online, set "
            "TIKTOKEN_CACHE_DIR to a folder that has it, or pass the path of a tokenizer.json"
        ) from error


def _from_file(path: str) -> Any:
    """Open a tokenizer.json with the `tokenizers` library, without truncation and padding."""
    tokenizers = require("tokenizers", "study", f"to open the tokenizer {path}")
    try:
        library = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises nothing more specific
        raise UserError(
            f"tokenizer: {path} is neither a tokenizer.json of the `tokenizers` library nor GGUF ({error})"
        ) from error
    library.no_truncation()
    library.no_padding()
    return library


@dataclass(frozen=True)
class GgufVocabulary:
    """A list of tokens, without the rules for splitting a text."""

    size: int
    ids: dict[str, int]
    byte_level: bool
    """Whether tokens are written as in GPT-2; otherwise as in SentencePiece."""


def _gguf_vocabulary(path: str) -> GgufVocabulary:
    require("gguf", "gguf", f"to read {path}")
    from coupled_adam.gguf_reader import not_whole, open_reader

    try:
        field = open_reader(Path(path)).get_field("tokenizer.ggml.tokens")
        tokens = None if field is None else field.contents()
    except ValueError as error:
        raise UserError(f"tokenizer: {error}") from None
    except Exception as error:  # the field may hold anything instead of tokens
        raise UserError(f"tokenizer: {not_whole(Path(path), error)}") from None
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise UserError(f"tokenizer: {path} has no vocabulary; pass the tokenizer.json of the model")
    byte_level = sum(token.startswith("Ġ") for token in tokens)
    sentence_piece = sum(token.startswith("▁") for token in tokens)
    if byte_level == sentence_piece == 0:
        raise UserError(
            f"tokenizer: no token of {path} starts with 'Ġ' or '▁', so words cannot be told from parts of words; "
            "pass the tokenizer.json of the model"
        )
    ids: dict[str, int] = {}
    for index, token in enumerate(tokens):
        ids.setdefault(token, index)
    return GgufVocabulary(len(tokens), ids, byte_level > sentence_piece)
