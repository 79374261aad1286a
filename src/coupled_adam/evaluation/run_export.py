"""Export a run: its newest checkpoint, the tokenizer of its corpus, and its config in the model card."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from coupled_adam.base.errors import UserError
from coupled_adam.config.run_config import Config
from coupled_adam.data.corpus import Corpus
from coupled_adam.evaluation.export import export_model
from coupled_adam.evaluation.hugging_face import require_class
from coupled_adam.evaluation.model_card import Training
from coupled_adam.evaluation.run_tokenizer import corpus_tokenizer, open_json_tokenizer
from coupled_adam.evaluation.weights import find_checkpoint, load_weights, run_config, run_corpus
from coupled_adam.evaluation.whole_folder import require_free
from coupled_adam.inspection.safetensors_files import open_safetensors
from coupled_adam.models.model_config import ModelConfig
from coupled_adam.tables_file import TABLES_FILE
from coupled_adam.tokenizer import Tokenizer
from coupled_adam.training.checkpoint.checkpoint_folder import Record, read_record


@dataclass(frozen=True)
class Exported:
    """Summary of an export."""

    name: str
    """Name of the run."""
    step: int
    model: ModelConfig
    no_tokenizer: str | None
    """Why there are no tokenizer files; None if there are."""


def export_run(
    run: Path,
    folder: Path,
    *,
    checkpoint: int | None = None,
    dtype: str = "float32",
    tokenizer: str | None = None,
    overwrite: bool = False,
    on_skip: Callable[[str], None],
) -> Exported:
    """Write the model of a run as a Hugging Face folder.

    Args:
        run: the run folder.
        folder: to write; new, empty, or with `overwrite` an existing exported model.
        checkpoint: step of the checkpoint; None for the newest complete one.
        dtype: of the stored weights, "float32" or "bfloat16".
        tokenizer: "gpt2" or the path of a tokenizer.json, with as many tokens as the run was trained with. None for
            that of the run's corpus; if it is unavailable, the model is exported without a tokenizer.
        overwrite: replace an existing model.
        on_skip: called with a message about each damaged checkpoint that is skipped.
    """
    config = run_config(run)
    model = config.to_model_config()
    require_class(model)
    require_free(folder, overwrite=overwrite)  # fail before loading the weights
    path = find_checkpoint(run, checkpoint, on_skip)
    record = read_record(path)
    corpus, missing = _corpus(config, record)
    end_of_text = None if corpus is None else corpus.manifest.separator
    vocabulary_size = _vocabulary_size(path)
    opened: Tokenizer | None = None
    if tokenizer is not None:
        opened, missing = open_json_tokenizer(tokenizer, end_of_text), None
        if vocabulary_size not in (None, opened.size):
            raise UserError(
                f"the tokenizer {tokenizer!r} has {opened.size} tokens, but the run was trained with "
                f"{vocabulary_size}: it belongs to another model; pass the tokenizer that its corpus was made with"
            )
    elif corpus is not None:
        opened, missing = _tokenizer_of(corpus)
    export_model(
        model,
        load_weights(model, path),
        opened,
        folder,
        end_of_text=end_of_text,
        vocabulary_size=vocabulary_size,
        dtype=dtype,
        training=Training(config, record.step, _origin(config, corpus)),
        overwrite=overwrite,
    )
    return Exported(config.name, record.step, model, missing)


def _vocabulary_size(checkpoint: Path) -> int | None:
    """Vocabulary size of a run's tokenizer, from its checkpoint, because the corpus may be missing."""
    tables = checkpoint / TABLES_FILE
    return open_safetensors(tables).vocabulary_size if tables.is_file() else None


def _origin(config: Config, corpus: Corpus | None) -> str | None:
    """Source of the tokens according to the corpus: the config may name a text that was never prepared."""
    return None if corpus is None else corpus.manifest.source or config.data.folder


def _corpus(config: Config, checkpoint: Record) -> tuple[Corpus | None, str | None]:
    """The corpus of a run, or the reason why there is none."""
    try:
        corpus = run_corpus(config, checkpoint)
    except (UserError, OSError) as error:
        return None, str(error)
    return corpus, None if corpus else f"the corpus of the run, {config.data.folder}, is missing"


def _tokenizer_of(corpus: Corpus) -> tuple[Tokenizer | None, str | None]:
    """The tokenizer of a corpus, or the reason why there is none."""
    try:
        return corpus_tokenizer(corpus), None
    except (UserError, OSError) as error:
        return None, str(error)
