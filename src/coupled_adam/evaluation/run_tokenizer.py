"""The tokenizer of a run or of a trained model, for lm-eval and for an export.

Both need its tokenizer.json: an export writes it, and results and requests of tasks identify it by its hash.
"""

from pathlib import Path

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import user_path
from coupled_adam.config.run_config import Config
from coupled_adam.data.corpus import Corpus, is_corpus, open_without_shards
from coupled_adam.evaluation.weights import run_config
from coupled_adam.tokenizer import GPT2_ENCODINGS, Tokenizer, read_tokenizer, tokenizer_path
from coupled_adam.training.run_folder import RunFolder


def open_json_tokenizer(spec: str | Path, separator: int | None = None) -> Tokenizer:
    """Open a tokenizer that has a tokenizer.json.

    Args:
        spec: "gpt2", the path of a tokenizer.json, or a folder that has one.
        separator: id of the token between documents; None for a token with a common name, if any.
    """
    if tokenizer_path(spec) is None and str(spec) not in GPT2_ENCODINGS:
        raise UserError(f"tokenizer: {str(spec)!r} is neither a tokenizer.json nor {' or '.join(GPT2_ENCODINGS)}")
    tokenizer = read_tokenizer(spec, separator)
    assert tokenizer.json_file  # read or built now, so that errors appear early
    return tokenizer


def corpus_tokenizer(corpus: Corpus) -> Tokenizer:
    """The tokenizer that made the tokens of a corpus.

    Raises:
        ValueError, OSError, ImportError: the tokenizer is unknown or unavailable.
    """
    if corpus.tokenizer_spec is None:
        raise UserError(f"{corpus.folder} does not name its tokenizer")
    return open_json_tokenizer(corpus.tokenizer_spec, corpus.manifest.separator)


def tokenizer_of(spec: str | Path) -> Tokenizer:
    """Open the tokenizer of a run, which needs no checkpoints or shards, or anything `open_json_tokenizer` takes."""
    if not RunFolder(Path(spec)).config.is_file():
        return open_json_tokenizer(spec)
    config = run_config(Path(spec))
    folder = user_path(config.data.folder)
    return run_tokenizer(config, open_without_shards(folder) if is_corpus(folder) else None)


def run_tokenizer(config: Config, corpus: Corpus | None) -> Tokenizer:
    """The tokenizer of a run: that of its corpus, or if the corpus is missing, the one in its config."""
    if corpus is not None:
        if corpus.tokenizer is None:
            raise UserError(f"{corpus.folder} does not name its tokenizer; pass it with --tokenizer")
        return corpus_tokenizer(corpus)
    spec = config.data.tokenizer
    if spec in GPT2_ENCODINGS or user_path(spec).exists():
        return open_json_tokenizer(spec)
    raise UserError(
        f"the tokenizer of the run ({spec}) is stored with its corpus, and {config.data.folder} is missing; pass its "
        "tokenizer.json with --tokenizer, or run this where that folder exists"
    )


def require_fit(tokenizer: Tokenizer, rows: int, model: str) -> None:
    """Raise if a tokenizer has more tokens than the model's table has rows.

    Args:
        tokenizer: to check.
        rows: V, rows of the model's table.
        model: name of the model in the message.
    """
    if tokenizer.size > rows:
        raise UserError(
            f"the tokenizer {tokenizer.name} has {tokenizer.size} tokens, but the table of {model} has {rows} rows: "
            "the vocabulary does not match; pass the tokenizer that this model was trained with"
        )
