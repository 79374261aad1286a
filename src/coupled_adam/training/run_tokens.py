"""Training data of a run: prepare it if missing, open it, check it, and find its tokenizer. Does not import torch."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import user_path
from coupled_adam.base.text import counted, percent
from coupled_adam.byte_level_bpe import BYTES
from coupled_adam.config.cross_checks import too_few_rows
from coupled_adam.config.run_config import Config
from coupled_adam.config.table_rows import MULTIPLE, rows_for, token_count
from coupled_adam.data.corpus import Corpus, is_corpus, open_known_corpus
from coupled_adam.data.manifest import MANIFEST_FILE, TOKENIZER_FILE
from coupled_adam.data.tokens import Tokens
from coupled_adam.tokenizer import Tokenizer, open_tokenizer

if TYPE_CHECKING:
    from coupled_adam.data.preparation import Progress

Say = Callable[[str], None]
TOKENS_AT_ONCE = 2**22
MOST_UNUSED = 0.05
"""Fraction of rows that may be unused without a note. The bytes of a byte-level tokenizer come in addition, because no
text has all of them."""
DRIFT = "Unused rows all drift one way, and the embeddings of the tokens drift the other way."
Report = Callable[["Progress"], None]


def is_prepared(config: Config) -> bool:
    """Whether the tokens exist, or no source is configured."""
    return config.data.source is None or is_corpus(_folder(config))


def prepare_tokens(config: Config, say: Say, on_progress: Report | None = None) -> Corpus:
    """Open the training data, and prepare it first if it is missing and the config has a source.

    For existing data, `say` gets notes about assumptions and differences from the config.
    """
    if is_prepared(config):
        corpus = open_known_corpus(_folder(config))
        say_notes(config, corpus, say)
        return corpus
    from coupled_adam.data.prepare import prepare

    source, tokenizer, folder = config.data.source, config.data.tokenizer, _folder(config)
    assert source is not None
    if tokenizer.startswith("bpe:") and config.rows < token_count(config.data):
        raise UserError(too_few_rows(config.rows, token_count(config.data), tokenizer))
    say(f"Preparing {source} with the tokenizer {tokenizer} in {folder} (only once).")
    return prepare(source, tokenizer, folder, on_progress=on_progress)


def say_notes(config: Config, corpus: Corpus, say: Say) -> None:
    """Print notes about existing tokens."""
    for note in _notes(config, corpus):
        say(f"Note: {note}")


def require_rows(config: Config, corpus: Corpus) -> None:
    """Raise a UserError if the model has fewer rows than the tokenizer has tokens."""
    if corpus.vocabulary_size > config.rows:
        raise UserError(
            f"model.vocabulary_size is {config.rows}, but the tokenizer of {corpus.folder} has "
            f'{corpus.vocabulary_size} tokens; set model.vocabulary_size to "auto" or to at least this number'
        )


def require_validation(config: Config, corpus: Corpus) -> None:
    """Raise a UserError if the corpus has too little validation text for selecting a setting by validation loss."""
    context = config.model.context
    tokens = len(corpus.tokens("val")) if "val" in corpus.splits else 0
    if tokens <= context:
        raise UserError(
            f"select.values needs a validation loss, but {corpus.folder} has only {counted(tokens, 'token')} of "
            f"validation text, expected more than model.context = {context}; prepare it with a validation split"
        )


def note_on_unused_rows(config: Config, corpus: Corpus) -> str | None:
    """Note about tables in which many rows are padding or belong to tokens that never occur; None if few do.

    Args:
        config: the config of the run.
        corpus: its training data.
    """
    rows, tokens = config.rows, corpus.vocabulary_size
    padding, allowed = rows - tokens, MOST_UNUSED * rows
    if padding > allowed:
        remedy = (
            'Set model.vocabulary_size to "auto".'
            if rows > rows_for(tokens)
            else f"Choose a tokenizer whose size is a multiple of {MULTIPLE}, or set model.vocabulary_size={tokens}."
        )
        return f"{_share(padding, rows)}: the tokenizer of {corpus.folder} has {tokens:,} tokens. {DRIFT} {remedy}"
    enough = tokens - BYTES - math.floor(allowed - padding)
    seen = _different_tokens(corpus.tokens("train"), enough)
    if seen >= enough:
        return None
    return (
        f"{_share(rows - seen, rows)}: only {seen:,} of the tokenizer's {tokens:,} tokens occur in the training text "
        f"of {corpus.folder}. {DRIFT} Train on more text, or prepare it with a smaller tokenizer, such as "
        "data.tokenizer=bpe:4096, in another data.folder."
    )


def _share(unused: int, rows: int) -> str:
    return f"{unused:,} of the {rows:,} embedding rows ({percent(unused / rows)}) are unused"


def _different_tokens(tokens: Tokens, enough: int) -> int:
    """Count the different tokens; stop reading once there are enough, which is early in most texts."""
    seen = np.zeros(tokens.vocabulary_size, bool)  # (V,)
    for start in range(0, len(tokens), TOKENS_AT_ONCE):
        seen[tokens.read(start, min(TOKENS_AT_ONCE, len(tokens) - start))] = True
        if seen.sum() >= enough:
            break
    return int(seen.sum())


def _notes(config: Config, corpus: Corpus) -> Iterator[str]:
    """Yield assumptions about existing tokens, and differences from the config."""
    folder, manifest = corpus.folder, corpus.manifest
    yield from corpus.notes
    source, tokenizer = config.data.source, config.data.tokenizer
    # Without a source, any existing tokens are meant, and data.tokenizer has no effect. nanoGPT writes no manifest.
    if source is None or not (folder / MANIFEST_FILE).is_file():
        return
    if manifest.source not in (None, source):
        yield (
            f"{folder} was prepared from {manifest.source!r}, not from {source!r}; training on the existing tokens. "
            "Set another data.folder to prepare the other text."
        )
    # The requested tokenizer, such as bpe:4096; the manifest's `tokenizer` then only says tokenizer.json.
    made_with = manifest.settings.get("tokenizer", None if manifest.tokenizer == TOKENIZER_FILE else manifest.tokenizer)
    if made_with not in (None, tokenizer):
        yield (
            f"{folder} was prepared with the tokenizer {made_with!r}, not with {tokenizer!r}; training on the existing "
            "tokens. Set another data.folder to prepare the text with the other tokenizer."
        )


def _folder(config: Config) -> Path:
    return user_path(config.data.folder)


def word_tokenizer(corpus: Corpus, setting: str) -> Tokenizer:
    """Open the tokenizer of a corpus, which maps words to rows of the table.

    Args:
        corpus: the training data of the model.
        setting: the setting that enables word similarity, such as "log.wordsim", for messages.

    Raises:
        ValueError: the tokenizer is unknown or cannot be opened.
    """
    spec = corpus.tokenizer_spec
    without = f"To skip word similarity: --set {setting}=none"
    if spec is None:
        raise UserError(
            f"{setting} needs the tokenizer of {corpus.folder}, which is unknown; write a manifest with "
            f"`coupled-adam data prepare tokens:...`. {without}"
        )
    try:
        return open_tokenizer(spec)
    except (UserError, OSError) as error:
        raise UserError(
            f"{setting} needs the tokenizer {str(spec)!r} of {corpus.folder}: {error}. {without}"
        ) from error
