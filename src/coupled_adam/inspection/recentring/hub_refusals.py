"""Refuse Hugging Face models that cannot be recentred, based on config.json and the names of the tensors.

Other cases are caught by the comparison of the probabilities.
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
    """Raise if config.json describes a model that cannot be recentred."""
    if "auto_map" in config:
        raise UserError(
            f"{folder}: the model has its own Python code (auto_map in config.json), which is not run here, so the "
            "result could not be checked; only models in the transformers library can be recentred"
        )
    if config.get("is_encoder_decoder"):
        raise UserError(
            f"{folder}: an encoder-decoder model ({config.get('model_type')}); expected a decoder, whose head predicts "
            "the next token"
        )
    for key, value in _values(config):
        if key in ("quantization_config", "compression_config") and value:
            raise UserError(
                f"{folder}: its weights are quantised ({key} in config.json); recentre the original model, then "
                "quantise it again"
            )
        if SOFT_CAP.fullmatch(key) and _is_positive(value):
            raise UserError(
                f"{folder}: its logits have a soft cap ({key} = {value}), which depends on a shift of all logits: "
                "removing the mean would change the probabilities"
            )


def refuse_tied(folder: Path, config: Mapping[str, Any], names: Iterable[str], unused: Iterable[str]) -> None:
    """Raise if something else uses a tied table too.

    Args:
        folder: the model.
        config: its config.json.
        names: of all tensors.
        unused: names of tensors that transformers does not load.
    """
    keys = ((key, value) for key, value in _values(config) if FURTHER_HEADS.fullmatch(key) and _is_positive(value))
    further = [f"{key} = {value}" for key, value in keys]
    further += [name for name in names if FURTHER_TENSORS.fullmatch(name)]
    if further:
        raise UserError(
            f"{folder}: the input and output tables are tied, and multi-token prediction heads use them too "
            f"({some_of(further, 3)}); their probabilities could not be checked"
        )
    if unknown := sorted(unused):
        raise UserError(
            f"{folder}: the input and output tables are tied, and the model has tensors that transformers does not use "
            f"({some_of(unknown, 3)}); whether they depend on the table cannot be checked"
        )


def gives_token_types(tokenizer_config: Mapping[str, Any]) -> bool:
    """Whether the tokenizer returns token types, which GPT-2 looks up in the token table and adds to the input."""
    names = tokenizer_config.get("model_input_names")
    return isinstance(names, list) and "token_type_ids" in names


def _values(config: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(config, Mapping):
        for key, value in config.items():
            yield str(key), value
            yield from _values(value)


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
