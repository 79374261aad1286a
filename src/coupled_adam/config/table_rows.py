"""Number of rows of the embedding tables if `model.vocabulary_size` is "auto". Does not import torch or numpy.

Padding rows are not harmless: only the softmax acts on them, so they all move the same way, and because the updates of
a coupled table sum to zero, the tokens move the other way. A table therefore gets as few padding rows as fast matrix
products allow.
"""

import re

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import user_path
from coupled_adam.config.cross_checks import GPT2_TOKENS
from coupled_adam.config.run_sections import DataSection
from coupled_adam.config.toml_writing import toml_value
from coupled_adam.data.manifest import MANIFEST_FILE, read_manifest
from coupled_adam.tokenizer import read_tokenizer, tokenizer_path

MULTIPLE = 64
"""The matrix products of the head are fast if the number of rows is a multiple of this."""
# `n_vocab` of each encoding; tiktoken itself knows it only after a download.
TIKTOKEN = {
    "gpt2": GPT2_TOKENS,
    "r50k_base": 50257,
    "p50k_base": 50281,
    "p50k_edit": 50284,
    "cl100k_base": 100277,
    "o200k_base": 200019,
    "o200k_harmony": 201088,
}


def rows_for(tokens: int) -> int:
    """Number of rows of a table for this many tokens.

    Example:
        >>> rows_for(50257), rows_for(4096)
        (50304, 4096)
    """
    return -(-tokens // MULTIPLE) * MULTIPLE


def token_count(data: DataSection) -> int:
    """Number of tokens of the tokenizer of `data.folder`, or of `data.tokenizer` if the folder is not prepared yet.

    A tokenizer trained on very little text may end up with fewer tokens.

    Raises:
        ValueError: neither gives a number.
    """
    folder = user_path(data.folder)
    if (folder / MANIFEST_FILE).is_file():
        return read_manifest(folder / MANIFEST_FILE).vocabulary_size
    if (folder / "train.bin").is_file():
        return GPT2_TOKENS  # a nanoGPT folder, which `open_corpus` reads as GPT-2 tokens
    trained = re.fullmatch(r"bpe:(\d+)", data.tokenizer)
    if trained:
        return int(trained[1])
    if data.tokenizer in TIKTOKEN:
        return TIKTOKEN[data.tokenizer]
    path = tokenizer_path(data.tokenizer)
    if path is None:
        raise UserError(
            f'model.vocabulary_size = "auto": the number of tokens of data.tokenizer = {toml_value(data.tokenizer)} is '
            f"unknown until {folder} is prepared; prepare it first, or set model.vocabulary_size to a number"
        )
    return read_tokenizer(path).size
