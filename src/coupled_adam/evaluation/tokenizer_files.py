"""The tokenizer of an exported model: tokenizer.json, and what `transformers` wants to know about it.

A corpus either has a tokenizer.json, which is copied, or names tiktoken's "gpt2", for which the file is made: GPT-2's
byte-level BPE is a list of merges, and tiktoken's ranks say which they were. Nothing here needs `transformers` or
`tokenizers`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from coupled_adam.base.extras import require
from coupled_adam.data.corpus import Corpus
from coupled_adam.data.tokenizing import SEPARATORS
from coupled_adam.embeddings.single_tokens import byte_letters, open_tiktoken

# Their pattern for splitting a text into words is the one that `ByteLevel` of the `tokenizers` library has built in.
GPT2_ENCODINGS = ("gpt2", "r50k_base")


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer.json and the token that stands between documents."""

    content: bytes
    """The file."""
    size: int
    """Tokens: one more than the highest number."""
    end_of_text: int | None
    """Number of the token between documents; None where it has none."""
    end_of_text_token: str | None
    """That token, written out."""
    unknown_token: str | None
    """The token for what has no token; byte-level tokenizers need none and name the one between documents."""


def corpus_tokenizer(corpus: Corpus) -> TokenizerFile:
    """The tokenizer that made the tokens of a corpus.

    Raises:
        ValueError, OSError, ImportError: there is none, or it cannot be had here and now; the message says why.
    """
    if corpus.tokenizer_spec is None:
        raise ValueError(f"{corpus.folder} does not say which tokenizer made its tokens")
    return open_for_export(corpus.tokenizer_spec, corpus.manifest.separator)


def open_for_export(spec: str | Path, separator: int | None = None) -> TokenizerFile:
    """The tokenizer.json of a tokenizer.

    Args:
        spec: "gpt2", or the path of a tokenizer.json.
        separator: number of the token between documents; None: one with a usual name, if there is any.
    """
    if str(spec) in GPT2_ENCODINGS:
        return parse_tokenizer(gpt2_tokenizer_json(str(spec)), str(spec), separator)
    if not Path(spec).is_file():
        raise ValueError(f"tokenizer: {str(spec)!r} is neither a tokenizer.json nor {' or '.join(GPT2_ENCODINGS)}")
    return parse_tokenizer(Path(spec).read_bytes(), str(spec), separator)


def parse_tokenizer(content: bytes, origin: str, separator: int | None) -> TokenizerFile:
    """Look up in a tokenizer.json what the other files say about it."""
    try:
        parsed = json.loads(content)
        vocabulary = parsed["model"]["vocab"]
        # Unigram models list their tokens with scores, the others map them to numbers.
        tokens = {token: number for number, (token, _) in enumerate(vocabulary)} if isinstance(vocabulary, list) else {}
        tokens |= vocabulary if isinstance(vocabulary, dict) else {}
        tokens |= {token["content"]: token["id"] for token in parsed.get("added_tokens") or ()}
        numbers = {int(number): str(token) for token, number in tokens.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"tokenizer: {origin} is not a tokenizer.json of the `tokenizers` library ({error})") from None
    if not numbers:
        raise ValueError(f"tokenizer: {origin} has no tokens")
    if separator is None:
        separator = next((tokens[name] for name in SEPARATORS if name in tokens), None)
    elif separator not in numbers:
        raise ValueError(f"tokenizer: {origin} has no token {separator}, which separates the documents of the corpus")
    between = None if separator is None else numbers[separator]
    unknown = parsed["model"].get("unk_token") or numbers.get(parsed["model"].get("unk_id"))
    return TokenizerFile(content, max(numbers) + 1, separator, between, unknown if unknown in tokens else between)


def write_tokenizer(folder: Path, tokenizer: TokenizerFile, context: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json.

    Args:
        folder: where to.
        tokenizer: what to write.
        context: T, the longest text the model takes.
    """
    named = {
        "bos_token": tokenizer.end_of_text_token,
        "eos_token": tokenizer.end_of_text_token,
        "unk_token": tokenizer.unknown_token,
        # A text is padded to the length of others in its batch; the attention mask hides it.
        "pad_token": tokenizer.end_of_text_token,
    }
    special = {name: token for name, token in named.items() if token is not None}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "model_max_length": context,
        "padding_side": "left",  # so that the texts of a batch go on where they end
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer.json").write_bytes(tokenizer.content)
    write_json(folder / "tokenizer_config.json", settings)
    write_json(folder / "special_tokens_map.json", special)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file as `transformers` does: keys sorted, two spaces."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8", newline="\n")


def gpt2_tokenizer_json(name: str = "gpt2") -> bytes:
    """GPT-2's tokenizer as a tokenizer.json, made from tiktoken's ranks."""
    open_tiktoken(name)  # says what to do when it cannot be had
    encoding = require("tiktoken", "study", f"to open the tokenizer {name!r}").get_encoding(name)
    ranks: dict[bytes, int] = {token: encoding.encode_single_token(token) for token in encoding.token_byte_values()}
    special = [(token, encoding.encode_single_token(token)) for token in encoding.special_tokens_set]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": token, "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for token, number in sorted(special, key=lambda pair: pair[1])
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {_letters(token): number for token, number in _by_rank(ranks)} | dict(special),
            "merges": [[_letters(left), _letters(right)] for left, right in recover_merges(ranks)],
        },
    }
    return json.dumps(content, ensure_ascii=False).encode()


def recover_merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The merges of a byte-level BPE, in order, from the ranks of its tokens.

    A token was made by joining two older ones: those that are left when its bytes are merged by older merges only.

    Example:
        >>> recover_merges({b"a": 0, b"b": 1, b"c": 2, b"ab": 3, b"abc": 4})
        [(b'a', b'b'), (b'ab', b'c')]
    """
    merges = []
    for token, rank in _by_rank(ranks):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            joined = [ranks.get(left + right, rank) for left, right in pairwise(parts)]
            oldest = min(range(len(joined)), key=joined.__getitem__)
            if joined[oldest] >= rank:
                raise ValueError(f"tokenizer: token {token!r} of rank {rank} is not two older tokens joined")
            parts[oldest : oldest + 2] = [parts[oldest] + parts[oldest + 1]]
        if len(parts) == 2:
            merges.append((parts[0], parts[1]))
    return merges


def _by_rank(ranks: Mapping[bytes, int]) -> list[tuple[bytes, int]]:
    return sorted(ranks.items(), key=lambda pair: pair[1])


def _letters(token: bytes) -> str:
    """A token as GPT-2's vocabulary writes it."""
    return "".join(byte_letters()[byte] for byte in token)
