"""Text to tokens: which tokenizer a name means, training one, and what the worker processes run.

Legend: V tokens of the vocabulary.
"""

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

END_OF_TEXT = "<|endoftext|>"
# How tokenizers of well-known models call the token that ends a document, the likeliest first.
SEPARATORS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")
# Known without the files of the tokenizer, which tokens that are there already do not need.
GPT2 = 50257
BYTES = 256


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer that was opened once, in few words: enough for another process to open it again."""

    kind: Literal["tiktoken", "json"]
    name: str
    """Of tiktoken, or the path of a tokenizer.json."""
    vocabulary_size: int
    separator: int
    """The token behind every document."""

    @property
    def dtype(self) -> str:
        """The smallest number type for its tokens."""
        return "uint16" if self.vocabulary_size <= 2**16 else "uint32"


def tokenizer_path(spec: str) -> Path | None:
    """The tokenizer.json that a name means, a file or a folder that has one; None for names of tiktoken."""
    path = Path(spec).expanduser()
    if path.is_dir() and (path / "tokenizer.json").is_file():
        return path / "tokenizer.json"
    if path.suffix == ".json" and not path.is_file():
        raise ValueError(f"tokenizer: there is no file {spec}; expected a tokenizer.json, bpe:N or a tiktoken name")
    return path if path.is_file() else None


def tiktoken_tokenizer(name: str, separator: str | None) -> Tokenizer:
    """An encoding of tiktoken; downloaded once, unless TIKTOKEN_CACHE_DIR names a folder that has it."""
    from coupled_adam.embeddings.single_tokens import open_tiktoken

    try:
        open_tiktoken(name)  # for what it says when the name is unknown, or the network away
    except (ValueError, ConnectionError) as error:
        raise type(error)(
            f'{error}. Or train a tokenizer on the text: --tokenizer bpe:8192, in a config data.tokenizer = "bpe:8192"'
        ) from error
    encoding = importlib.import_module("tiktoken").get_encoding(name)
    if separator is None:
        return Tokenizer("tiktoken", name, encoding.n_vocab, encoding.eot_token)
    if separator not in encoding.special_tokens_set:
        raise ValueError(
            f"separator {separator!r}: {name} has no such special token; it has "
            f"{', '.join(sorted(encoding.special_tokens_set))}"
        )
    return Tokenizer("tiktoken", name, encoding.n_vocab, encoding.encode_single_token(separator))


def json_tokenizer(path: Path, separator: str | None) -> Tokenizer:
    """A tokenizer.json of the `tokenizers` library."""
    from coupled_adam.embeddings.single_tokens import open_json

    open_json(path)  # for what it says when the file is none
    tokens: dict[str, int] = importlib.import_module("tokenizers").Tokenizer.from_file(str(path)).get_vocab()
    names = SEPARATORS if separator is None else (separator,)
    known = next((name for name in names if name in tokens), None)
    if known is None:
        raise ValueError(
            f"tokenizer {path}: none of its tokens is {' or '.join(names)}; name the one that ends a document with "
            "--separator"
        )
    # The numbers may have gaps.
    return Tokenizer("json", str(path), max(tokens.values()) + 1, tokens[known])


def train_bpe(texts: Iterable[str], size: int, path: Path) -> None:
    """Train a byte-level BPE, as GPT-2's is, and write it as tokenizer.json. The same texts give the same file.

    Args:
        texts: to learn from.
        size: V, with the 256 bytes and the token <|endoftext|>.
        path: where to.
    """
    from coupled_adam.base.extras import require

    if not BYTES + 1 <= size <= 2**20:
        raise ValueError(f"tokenizer bpe:{size}: expected bpe:{BYTES + 1} to bpe:{2**20}")
    tokenizers = require("tokenizers", "study", f"to train the tokenizer bpe:{size}")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path), pretty=False)


def open_encoding(tokenizer: Tokenizer) -> Any:
    """The library's own object for a tokenizer."""
    if tokenizer.kind == "tiktoken":
        return importlib.import_module("tiktoken").get_encoding(tokenizer.name)
    encoding = importlib.import_module("tokenizers").Tokenizer.from_file(tokenizer.name)
    encoding.no_truncation()
    encoding.no_padding()
    # A text that speaks of "<|endoftext|>" must not end the document.
    encoding.encode_special_tokens = True
    return encoding


def text_encoder(tokenizer: Tokenizer) -> Callable[[Sequence[str]], Sequence[Sequence[int]]]:
    """A function from texts to their tokens, without any added at the ends."""
    encoding = open_encoding(tokenizer)
    if tokenizer.kind == "tiktoken":
        return lambda texts: [encoding.encode_ordinary(text) for text in texts]
    return lambda texts: [found.ids for found in encoding.encode_batch_fast(list(texts), add_special_tokens=False)]


def token_texts(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    r"""Tokens as a terminal can show them: in quotes, with what is not visible as \n, \x1b or \xf0."""
    encoding = open_encoding(tokenizer)
    if tokenizer.kind == "tiktoken":
        contents = [encoding.decode_single_token_bytes(token).decode(errors="backslashreplace") for token in tokens]
    else:
        contents = [encoding.decode([token], skip_special_tokens=False) for token in tokens]
    return [repr(content).replace("\\\\x", "\\x") for content in contents]


@dataclass(frozen=True)
class Encoded:
    """The tokens of some pieces that belong to one split."""

    tokens: npt.NDArray[Any]  # of the shards' dtype
    documents: int
    """Those that end here."""


Pieces = Sequence[tuple[str, Any, bool]]
"""For each piece its split, its content (text or tokens), and whether its document ends with it."""


def encoder(tokenizer: Tokenizer) -> Callable[[Pieces], dict[str, Encoded]]:
    """What a worker runs: pieces of text to the tokens of each split, every document followed by the separator."""
    encode = text_encoder(tokenizer)

    def run(pieces: Pieces) -> dict[str, Encoded]:
        found = encode([content for _, content, _ in pieces])
        return joined(
            [(split, tokens, ends) for (split, _, ends), tokens in zip(pieces, found, strict=True)], tokenizer
        )

    return run


def packer(tokenizer: Tokenizer) -> Callable[[Pieces], dict[str, Encoded]]:
    """The same for pieces that are tokens already."""
    return lambda pieces: joined(pieces, tokenizer)


def joined(pieces: Pieces, tokenizer: Tokenizer) -> dict[str, Encoded]:
    """The tokens of pieces, one array for each split, with the separator where a document ends."""
    parts: dict[str, list[npt.NDArray[Any]]] = {}
    documents: dict[str, int] = {}
    separator = np.array([tokenizer.separator], np.uint32)
    for split, content, ends in pieces:
        tokens = np.asarray(content, np.uint32)
        if len(tokens) and tokens.max() >= tokenizer.vocabulary_size:
            raise ValueError(
                f"the source has the token {tokens.max()}, but the tokenizer {tokenizer.name} has "
                f"{tokenizer.vocabulary_size} tokens; name the tokenizer of these tokens with --tokenizer"
            )
        parts.setdefault(split, []).extend([tokens, separator] if ends else [tokens])
        documents[split] = documents.get(split, 0) + ends
    kind = np.dtype(tokenizer.dtype).newbyteorder("<")
    return {split: Encoded(np.concatenate(arrays).astype(kind), documents[split]) for split, arrays in parts.items()}
