"""List the vocabulary tables of every language model in the installed transformers, without weights or downloads.

    python benchmarks/known_models.py            models with other tables than a head and an input table, and errors
    python benchmarks/known_models.py --all      all models

Every class that transformers lists for text, masked text, images with text and speech with text is built from its
default config, with two layers, on the meta device. Classes whose default config does not build are only counted.
"""

import argparse
import logging
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from coupled_adam.optimizer import param_groups

KINDS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")
LAYERS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "n_layer", "num_layers")
USUAL = ({"tied"}, {"output", "input"})


def classes() -> Iterator[tuple[str, str]]:
    """Yield config type and class name of every model."""
    seen = set()
    for kind in KINDS:
        for model_type, names in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES").items():
            name = names if isinstance(names, str) else names[0]
            if name not in seen:
                seen.add(name)
                yield model_type, name


def build(model_type: str, name: str) -> nn.Module:
    config: Any = CONFIG_MAPPING[model_type]()
    parts = [getattr(config, key) for key in dir(config) if key.endswith("_config")]
    for part in [config, *parts]:
        for key in LAYERS:
            if isinstance(getattr(part, key, None), int):
                setattr(part, key, 2)
    with torch.device("meta"):
        model: Any = getattr(transformers, name)(config)
    model.tie_weights()
    assert isinstance(model, nn.Module)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="also list models with the usual tables")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    built = usual = refused = unbuilt = 0
    for model_type, name in classes():
        try:
            model = build(model_type, name)
        except Exception:  # an incomplete default config can raise anything
            unbuilt += 1
            continue
        built += 1
        try:
            tables = param_groups(model).tables
        except ValueError as error:
            refused += 1
            print(f"{name}: {error}\n")
            continue
        roles = [table.role for table in tables]
        is_usual = set(roles) in USUAL and len(roles) == len(set(roles))
        usual += is_usual
        if options.all or not is_usual:
            print(f"{name}: {', '.join(f'{t.name} {tuple(t.weight.shape)} {t.role}' for t in tables)}\n")
    print(
        f"transformers {transformers.__version__}, torch {torch.__version__}: {built} classes built; {usual} with one "
        f"tied table or with a head and an input table, {built - usual - refused} with more, {refused} refused; "
        f"{unbuilt} do not build from their default config"
    )


if __name__ == "__main__":
    main()
