"""README.md of an exported model: how to load it, what it is, and how it was trained.

Text from a config is shown as code, so that Markdown and HTML in it have no effect.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coupled_adam import __version__
from coupled_adam.base.text import counted, setting
from coupled_adam.config.optimizer_names import is_coupled_adam, member_name
from coupled_adam.models.model_config import ModelConfig, parameter_count

if TYPE_CHECKING:
    from coupled_adam.config.run_config import Config
    from coupled_adam.config.run_sections import OptimizerSection

CLASSES = {
    "gpt2": "GPT-2 with exact GELU, as GPT2LMHeadModel",
    "llama": "Llama-style (rotary positions, SwiGLU) with LayerNorm, as StableLmForCausalLM",
}
EMBEDDINGS = {
    "adamw": "AdamW, like all other weights",
    "coupled": "Coupled Adam: one second moment for the whole vocabulary",
    "sgd": "SGD with momentum",
}
HEAD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- coupled-adam
---
"""
USE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/of/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/of/this/folder")
```
"""
NO_TOKENIZER = "The tokenizer files are missing: put tokenizer.json and tokenizer_config.json into this folder.\n"


@dataclass(frozen=True)
class Training:
    """How a model was trained."""

    config: "Config"
    step: int
    """Optimizer steps taken."""
    source: str | None = None
    """Source of the tokens; None for the config's."""


def model_card(config: ModelConfig, training: Training | None, tokens: int | None) -> str:
    """Write the text of README.md.

    Args:
        config: the model.
        training: how it was trained; None if unknown.
        tokens: number of tokens of the exported tokenizer; None without one.
    """
    rows = f"{config.vocabulary_size:,} rows in the embedding table"
    if tokens is not None and tokens < config.vocabulary_size:
        rows += f"; the tokenizer uses {tokens:,} of them, the others are padding"
    model = [
        f"{CLASSES[config.architecture]}{', with biases' if config.bias else ''}",
        f"{parameter_count(config):,} parameters; {counted(config.layers, 'layer')}, {counted(config.heads, 'head')}, "
        f"width {config.width:,}",
        f"up to {config.context:,} tokens of text",
        rows,
        "one table for input and output" if config.tied else "separate tables for input and output",
    ]
    sections = [
        f"{HEAD}\n# {code(training.config.name) if training else 'A language model'}\n",
        USE,
        *([] if tokens is not None else [NO_TOKENIZER]),
        "## Model\n",
        _listed(model),
    ]
    if training is not None:
        sections += ["## Training\n", _listed(_training_facts(training))]
    return "\n".join([*sections, f"Exported by coupled-adam {__version__}.\n"])


def _training_facts(training: Training) -> list[str]:
    run, step = training.config, training.step
    optimizer = run.optimizer
    # Only the end of a path: the rest may be private.
    source = Path(training.source or run.data.source or run.data.folder).name
    which = "both tables" if optimizer.couple == "all" else f"{optimizer.couple} table"
    return [
        f"data: {code(source)}",
        f"{counted(step * run.tokens_per_step, 'token')}: {step:,} of {counted(run.total_steps, 'step')} of "
        f"{run.training.batch_size:,} x {run.model.context:,}",
        f"embeddings: {_embedding_optimizer(optimizer)}"
        + ("" if run.model.tied or optimizer.embeddings == "adamw" else f", {which}")
        + (f" (scale exponent {setting(optimizer.scale_exponent)})" if optimizer.scale_exponent else "")
        + ("; centred after each step" if optimizer.centre else ""),
        *optimizer.table_facts(tied=run.model.tied),
        *_matrix_facts(optimizer),
        f"other weights: AdamW, betas {setting(optimizer.beta1)} and {setting(optimizer.beta2)}, weight decay "
        f"{setting(optimizer.weight_decay)}",
        f"learning rate {setting(optimizer.lr)}, {run.schedule.kind}, {counted(run.warmup_steps, 'step')} of warm-up",
        f"seed {run.seed}",
    ]


def _matrix_facts(optimizer: "OptimizerSection") -> list[str]:
    """The optimizer of the blocks' matrices, if it is not AdamW."""
    if optimizer.matrices == "adamw":
        return []
    muon = optimizer.muon
    decay = optimizer.weight_decay if muon.weight_decay is None else muon.weight_decay
    return [
        f"matrices of the blocks: Muon, learning rate times {setting(muon.lr_factor)} ({muon.adjust_lr_fn}), momentum "
        f"{setting(muon.momentum)}, weight decay {setting(decay)}"
    ]


def _embedding_optimizer(optimizer: "OptimizerSection") -> str:
    """Short description of the embeddings' optimizer, without the scale exponent."""
    settings = optimizer.model_dump(exclude={"scale_exponent"})
    if optimizer.embeddings != "coupled" or is_coupled_adam(settings):
        return EMBEDDINGS[optimizer.embeddings]
    return (
        f"{member_name(settings)}: CoupledAdamW, column exponent {setting(optimizer.column_exponent)}, row exponent "
        + (
            f"{setting(optimizer.row_exponent)}"
            if optimizer.row_exponent_start is None
            else f"{setting(optimizer.row_exponent_start)} to {setting(optimizer.row_exponent)}"
        )
    )


def _listed(facts: list[str]) -> str:
    return "".join(f"- {fact}\n" for fact in facts)


def code(text: str) -> str:
    """Format a text as Markdown code, whatever characters it has.

    Example:
        >>> print(code("text:a`b<i>.txt"))
        ``text:a`b<i>.txt``
    """
    text = text if text.isprintable() else repr(text)[1:-1]
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    # Markdown hides one space at each end, which separates the text's own backticks and spaces from the fence.
    space = " " if text.strip("` ") != text else ""
    return f"{fence}{space}{text}{space}{fence}"
