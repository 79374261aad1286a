"""The tokenizer of a model as lm-eval asks for it: the same tokens as `transformers` gives for an exported folder.

It is the very tokenizer.json that an export would write, so there is nothing in which the two could differ.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from coupled_adam.base.extras import require
from coupled_adam.data.corpus import Corpus, open_known_corpus
from coupled_adam.evaluation.tokenizer_files import GPT2_ENCODINGS, TokenizerFile, corpus_tokenizer, open_for_export
from coupled_adam.evaluation.weights import run_config
from coupled_adam.training.config import Config
from coupled_adam.training.run_folder import RunFolder


@dataclass(frozen=True)
class TextTokens:
    """A tokenizer, opened."""

    name: str
    """What opens it again on another machine: "gpt2", or the path of a file."""
    sha256: str
    """Of its tokenizer.json."""
    size: int
    """Tokens: one more than the highest number."""
    end_of_text: int | None
    """The token between documents; it stands for a context that a task leaves empty."""
    end_of_text_token: str | None
    encode_text: Callable[[str, bool], list[int]]

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """The tokens of a text.

        Args:
            text: any.
            add_special_tokens: whether those are added that the tokenizer puts at the ends of a text; None: unless the
                text begins with one already.
        """
        if add_special_tokens is None:
            begins = self.end_of_text_token is not None and text.startswith(self.end_of_text_token)
            add_special_tokens = not begins
        return self.encode_text(text, add_special_tokens)


def open_text_tokens(spec: str | Path) -> TextTokens:
    """Open a tokenizer.

    Args:
        spec: "gpt2", the path of a tokenizer.json, or a folder that has one.
    """
    path = Path(spec).expanduser()
    if path.is_dir() and not (path / "tokenizer.json").is_file():
        raise ValueError(
            f"{path} has no tokenizer.json: the tasks are texts, and need the model's tokenizer; save it there with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    if path.is_dir():
        path = path / "tokenizer.json"
    known = path if path.is_file() else str(spec)
    return _opened(str(known), open_for_export(known))


def tokens_of(spec: str | Path) -> TextTokens:
    """The tokenizer of a run, whose checkpoints are not needed; or whatever else `open_text_tokens` opens."""
    if not RunFolder(Path(spec)).config.is_file():
        return open_text_tokens(spec)
    config = run_config(Path(spec))
    folder = Path(config.data.folder).expanduser()
    return run_text_tokens(config, open_known_corpus(folder) if folder.is_dir() else None)


def run_text_tokens(config: Config, corpus: Corpus | None) -> TextTokens:
    """The tokenizer of a run: that of its corpus, or where the corpus is not here, the one its config names."""
    if corpus is not None:
        if corpus.tokenizer is None:
            raise ValueError(f"{corpus.folder} does not say which tokenizer made its tokens; name it with --tokenizer")
        return _opened(str(corpus.tokenizer_spec), corpus_tokenizer(corpus))
    spec = config.data.tokenizer
    if spec in GPT2_ENCODINGS or Path(spec).expanduser().exists():
        return open_text_tokens(spec)
    raise ValueError(
        f"the tokenizer of the run ({spec}) lies with its corpus, and {config.data.folder} is not here; give its "
        "tokenizer.json with --tokenizer, or call this where that folder is"
    )


def require_fit(tokens: TextTokens, rows: int, model: str) -> None:
    """Refuse a tokenizer whose tokens the model's table does not have.

    Args:
        tokens: the tokenizer.
        rows: V, rows of the model's table.
        model: what to call the model.
    """
    if tokens.size > rows:
        raise ValueError(
            f"the tokenizer {tokens.name} has {tokens.size} tokens, but the table of {model} {rows} rows: the "
            "vocabulary does not match; give the tokenizer that this model was trained with"
        )


def _opened(name: str, file: TokenizerFile) -> TextTokens:
    tokenizers = require("tokenizers", "eval", f"to open the tokenizer {name}")
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(file.content)
    except Exception as error:  # the library raises nothing more specific
        raise ValueError(f"tokenizer: {name} is not a tokenizer.json of the `tokenizers` library ({error})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode_text(text: str, add_special_tokens: bool) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    sha256 = hashlib.sha256(file.content).hexdigest()
    return TextTokens(name, sha256, file.size, file.end_of_text, file.end_of_text_token, encode_text)
