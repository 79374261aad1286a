"""Tokenizer for preparing a corpus: opened by name, copied from a file, or trained on the text."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import replacing
from coupled_adam.byte_level_bpe import train_bpe
from coupled_adam.data.blocks import read_blocks
from coupled_adam.data.settings import Settings, bpe_size
from coupled_adam.data.sources import Source, has_tokens
from coupled_adam.data.splitting import Fractions
from coupled_adam.tokenizer import GPT2, SEPARATORS, Tokenizer, open_tokenizer, tokenizer_path

BPE_CHARACTERS = 2**27
"""Maximum characters of training text, from its beginning, for training a tokenizer."""

OnTraining = Callable[[float | None], None]
"""Callback with the progress of training a tokenizer, 0 to 1; None at the start."""


def known_tokenizer(settings: Settings, copy: Path) -> Tokenizer:
    """Open the requested tokenizer, which needs no training or is already trained; copy it if it is a file.

    Args:
        settings: settings of the preparation.
        copy: path for the copy of a tokenizer.json; an existing file is used as it is.
    """
    asked, separator = settings.tokenizer, settings.separator
    if copy.is_file():
        return _with_separator(open_tokenizer(copy, separator))
    if asked == GPT2.name and has_tokens(settings.source):
        return GPT2  # no need to download its file: the source already has tokens
    tokenizer = _with_separator(_open_asked(settings))
    if tokenizer.kind == "json":
        with replacing(copy) as temporary:
            shutil.copyfile(tokenizer.name, temporary)
        return open_tokenizer(copy, separator)
    return tokenizer


def tokenizer_for(settings: Settings, copy: Path, source: Source, fractions: Fractions, on: OnTraining) -> Tokenizer:
    """Open the requested tokenizer, or train "bpe:N" on the training split of a text source."""
    if copy.is_file() or not settings.tokenizer.startswith("bpe:"):
        return known_tokenizer(settings, copy)
    on(None)
    with replacing(copy) as temporary:
        train_bpe(_training_texts(source, fractions, on), bpe_size(settings.tokenizer), temporary)
    return open_tokenizer(copy, settings.separator)


def _open_asked(settings: Settings) -> Tokenizer:
    asked = settings.tokenizer
    try:
        return open_tokenizer(asked, settings.separator)
    except (ValueError, ConnectionError) as error:
        if tokenizer_path(asked) is not None:
            raise
        raise type(error)(
            f'{error}. Or train a tokenizer on the text: --tokenizer bpe:8192 (data.tokenizer = "bpe:8192" in a config)'
        ) from error


def _training_texts(source: Source, fractions: Fractions, on: OnTraining) -> Iterator[str]:
    characters = 0
    for block in read_blocks(source, fractions):
        for split, text, _ in block.pieces:
            if split == "train":
                characters += len(text)
                yield text
        part = characters / BPE_CHARACTERS
        on(max(part, block.progress or 0.0))
        if part >= 1:
            return


def _with_separator(tokenizer: Tokenizer) -> Tokenizer:
    """Raise a UserError if the tokenizer has no separator token."""
    tokenizer.encode("")  # raises for a GGUF vocabulary, which cannot split a text
    if tokenizer.separator is None:
        raise UserError(
            f"tokenizer {tokenizer.name}: none of its tokens is {' or '.join(SEPARATORS)}; name the token that ends a "
            "document with --separator"
        )
    return tokenizer
