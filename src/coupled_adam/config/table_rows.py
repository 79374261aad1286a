"""The rows of the embedding tables where `model.vocabulary_size` is "auto". Loads neither torch nor numpy.

Rows that belong to no token are not harmless: nothing but the softmax acts on them, so they all move one way, and as
the updates of a coupled table sum to zero, the tokens move the other way. So a table gets as few of them as the matrix
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
"""Tables with a multiple of so many rows make the matrix products of the head fast."""
# `n_vocab` of each encoding, which tiktoken itself knows only after a download.
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
    """The rows of a table for so many tokens.

    Example:
        >>> rows_for(50257), rows_for(4096)
        (50304, 4096)
    """
    return -(-tokens // MULTIPLE) * MULTIPLE


def token_count(data: DataSection) -> int:
    """The tokens of the tokenizer: of the corpus in `data.folder`, or where that is still to be made, of
    `data.tokenizer`. A tokenizer that is trained on very little text may end up with fewer.

    Raises:
        ValueError: where neither says.
    """
    folder = user_path(data.folder)
    if (folder / MANIFEST_FILE).is_file():
        return read_manifest(folder / MANIFEST_FILE).vocabulary_size
    if (folder / "train.bin").is_file():
        return GPT2_TOKENS  # a folder of nanoGPT, as `open_corpus` takes it
    trained = re.fullmatch(r"bpe:(\d+)", data.tokenizer)
    if trained:
        return int(trained[1])
    if data.tokenizer in TIKTOKEN:
        return TIKTOKEN[data.tokenizer]
    path = tokenizer_path(data.tokenizer)
    if path is None:
        raise UserError(
            f'model.vocabulary_size = "auto": the number of tokens of data.tokenizer = {toml_value(data.tokenizer)} is '
            f"not known before {folder} is prepared; prepare it first, or set model.vocabulary_size to a number"
        )
    return read_tokenizer(path).size
