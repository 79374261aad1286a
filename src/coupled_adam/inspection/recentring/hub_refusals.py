"""Which Hugging Face models cannot be recentred, and why: found in config.json and in the names of the tensors.

Nothing here trusts the class of a model. What is not listed is caught by the comparison of the probabilities.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from coupled_adam.base.errors import UserError
from coupled_adam.base.text import some_of

SOFT_CAP = re.compile(r"(?!.*(attn|attention|router|gate)).*soft_?cap.*")
FURTHER_HEADS = re.compile(r".*(nextn_predict|mtp|medusa|n_future|multi_token).*")
FURTHER_TENSORS = re.compile(r"(.*\.)?(mtp|medusa|nextn|eagle)\w*\..*")


def refuse_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse a model for what its config.json says."""
    if "auto_map" in config:
        raise UserError(
            f"{folder}: its model is Python code that comes with it (auto_map in config.json), which is not run here, "
            "so the result could not be checked; only models of the transformers library can be recentred"
        )
    if config.get("is_encoder_decoder"):
        raise UserError(
            f"{folder}: an encoder-decoder model ({config.get('model_type')}); expected a decoder, whose head gives "
            "the next token"
        )
    for key, value in _values(config):
        if key in ("quantization_config", "compression_config") and value:
            raise UserError(
                f"{folder}: its weights are quantised ({key} in config.json); recentre the model as it was before, "
                "then quantise it again"
            )
        if SOFT_CAP.fullmatch(key) and _is_positive(value):
            raise UserError(
                f"{folder}: its logits go through a soft-cap ({key} = {value}), which does see a shift of all logits: "
                "removing the mean would change the probabilities"
            )


def refuse_tied(folder: Path, config: Mapping[str, Any], names: Iterable[str], unused: Iterable[str]) -> None:
    """Refuse a tied table that something else uses as well.

    Args:
        folder: the model.
        config: its config.json.
        names: of all its tensors.
        unused: of the tensors that transformers does not load.
    """
    keys = ((key, value) for key, value in _values(config) if FURTHER_HEADS.fullmatch(key) and _is_positive(value))
    further = [f"{key} = {value}" for key, value in keys]
    further += [name for name in names if FURTHER_TENSORS.fullmatch(name)]
    if further:
        raise UserError(
            f"{folder}: input and output table are tied, and heads for further tokens use them too "
            f"({some_of(further, 3)}); their probabilities could not be checked"
        )
    if unknown := sorted(unused):
        raise UserError(
            f"{folder}: input and output table are tied, and the model has tensors that transformers does not use "
            f"({some_of(unknown, 3)}); whether they need the table as it is cannot be checked"
        )


def gives_token_types(tokenizer_config: Mapping[str, Any]) -> bool:
    """Whether the model gets token types: GPT-2 looks them up in the table of the tokens and adds them to the input."""
    names = tokenizer_config.get("model_input_names")
    return isinstance(names, list) and "token_type_ids" in names


def _values(config: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(config, Mapping):
        for key, value in config.items():
            yield str(key), value
            yield from _values(value)


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
