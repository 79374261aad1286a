"""The optimizers of a study's grid, one for each value of their lists, and their names."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coupled_adam.config.optimizer_names import member_parts, short_member_name, shortened
from coupled_adam.config.run_config import Config
from coupled_adam.config.study_sections import OptimizerAxis

OUTPUT_BIAS = "model.output_bias"


@dataclass(frozen=True)
class OptimizerVariant:
    """One optimizer of the grid: its name and the settings that make it."""

    name: str
    settings: dict[str, Any]
    has_own_name: bool = False
    """Whether the study names it explicitly."""
    selects: tuple[str, list[float]] | None = None
    """The setting to select for it, with the values to try."""


def variants_of(optimizer: OptimizerAxis) -> list[OptimizerVariant]:
    """Expand an entry of [[optimizers]] into one optimizer for each value of its lists.

    Example:
        >>> entry = OptimizerAxis(embeddings="coupled", row_exponent=[0.0, 0.25], mean_free=True)
        >>> [variant.name for variant in variants_of(entry)]
        ['coupled mean-free', 'partial y=0.25 mean-free']
    """
    axes: list[Sequence[float | None]] = [
        optimizer.lr or [None],
        optimizer.scale_exponent or [None],
        optimizer.column_exponent or [None],
        optimizer.row_exponent or [None],
        optimizer.sgd_factor or [None],
    ]
    variants = []
    for lr, n, x, y, f in itertools.product(*axes):
        own = {
            "embeddings": optimizer.embeddings,
            "lr": lr,
            "scale_exponent": n,
            "column_exponent": x,
            "row_exponent": y,
            "mean_free": optimizer.mean_free,
            "row_exponent_start": optimizer.row_exponent_start,
            "anneal": optimizer.anneal,
            "sgd_factor": f,
            "couple": optimizer.couple,
            "centre": optimizer.centre,
        }
        given = {key: value for key, value in own.items() if value is not None}
        settings = {f"optimizer.{key}": value for key, value in given.items()} | optimizer.set
        if optimizer.name is None:
            name = _plain_name(optimizer, given)
        else:
            of_lists = zip(("lr", *"nxyf"), (lr, n, x, y, f), axes, strict=True)
            parts = [f"{letter}={value:g}" for letter, value, axis in of_lists if value is not None and len(axis) > 1]
            name = " ".join([optimizer.name, *parts])
        variants.append(OptimizerVariant(name, settings, optimizer.name is not None))
    return variants


def _plain_name(optimizer: OptimizerAxis, settings: Mapping[str, Any]) -> str:
    """Default name of an optimizer: its kind, then its tables."""
    name, parts = {"adamw": "standard", "sgd": "sgd"}.get(optimizer.embeddings), shortened(member_parts(settings))
    if name is None:
        name, *parts = short_member_name(settings).split(" ")
    if "sgd_factor" in settings:
        parts.append(f"f={settings['sgd_factor']:g}")
    if "lr" in settings:
        parts.append(f"lr={settings['lr']:g}")
    tables = [] if optimizer.couple in (None, "output") else [optimizer.couple]
    return " ".join([name, *tables, *(["centred"] if optimizer.centre else []), *parts])


def named_after_bias(variant: OptimizerVariant, optimizer: OptimizerAxis) -> OptimizerVariant:
    """Add the output bias to a default name: "coupled unigram bias"."""
    bias = optimizer.set.get(OUTPUT_BIAS, "none")
    if optimizer.name is not None or bias == "none":
        return variant
    return replace(variant, name=f"{variant.name} {bias} bias")


def named_after_matrices(variant: OptimizerVariant, config: Config) -> OptimizerVariant:
    """Add Muon to a default name, for studies that train the blocks' matrices with both AdamW and Muon."""
    if variant.has_own_name or config.optimizer.matrices == "adamw":
        return variant
    return replace(variant, name=f"{variant.name} Muon")
