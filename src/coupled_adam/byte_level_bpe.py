"""Byte-level BPE, the tokenizer of GPT-2: training one, and its tokenizer.json from what tiktoken knows.

Legend: V tokens of the vocabulary.
"""

import json
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from coupled_adam.base.errors import UserError
from coupled_adam.base.extras import require

END_OF_TEXT = "<|endoftext|>"
BYTES = 256


def train_bpe(texts: Iterable[str], size: int, path: Path) -> None:
    """Train a byte-level BPE, as GPT-2's is, and write it as tokenizer.json. The same texts give the same file.

    Args:
        texts: to learn from.
        size: V, with the 256 bytes and the token <|endoftext|>.
        path: where to.
    """
    if not BYTES + 1 <= size <= 2**20:
        raise UserError(f"tokenizer bpe:{size}: expected bpe:{BYTES + 1} to bpe:{2**20}")
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


def gpt2_json_file(encoding: Any) -> bytes:
    """GPT-2's tokenizer as a tokenizer.json: a byte-level BPE is a list of merges, and tiktoken's ranks say which."""
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
            "vocab": {as_letters(token): number for token, number in _by_rank(ranks)} | dict(special),
            "merges": [[as_letters(left), as_letters(right)] for left, right in recover_merges(ranks)],
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
                raise UserError(f"tokenizer: token {token!r} of rank {rank} is not two older tokens joined")
            parts[oldest : oldest + 2] = [parts[oldest] + parts[oldest + 1]]
        if len(parts) == 2:
            merges.append((parts[0], parts[1]))
    return merges


def _by_rank(ranks: Mapping[bytes, int]) -> list[tuple[bytes, int]]:
    return sorted(ranks.items(), key=lambda pair: pair[1])


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
    return as_letters(text.encode())


def as_letters(token: bytes) -> str:
    """A token as GPT-2's vocabulary writes it."""
    return "".join(byte_letters()[byte] for byte in token)
