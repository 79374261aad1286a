"""Recentring from beginning to end: open, subtract the mean, prove it, write, read back, measure.

With mu the mean of the output embeddings, the logits of (e_i - mu) are those of e_i minus the number mu . h, the same
for every token of the vocabulary. Softmax divides it out.

Legend: V vocabulary rows, H hidden size.
"""

import dataclasses
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from coupled_adam.base.errors import UserError
from coupled_adam.base.text import size_text
from coupled_adam.evaluation.whole_folder import replacing_folder, require_free
from coupled_adam.inspection.model_inspection import MeasuredModel, Request, inspect_models, json_object
from coupled_adam.inspection.recentring.finished_model import FinishedModel
from coupled_adam.inspection.recentring.hub_model import CONFIG, open_hub_folder
from coupled_adam.inspection.recentring.probability_check import (
    Difference,
    differences,
    log_probabilities,
    probes_of,
)
from coupled_adam.inspection.recentring.run_model import is_run, open_run
from coupled_adam.tokenizer import open_tokenizer

LARGEST_DIFFERENCE = 1e-4
"""Of log-probabilities, in nats, between the model and the unrounded result; exact algebra gives about 1e-12."""

Method = Literal["head", "positions", "untie"]
OnStage = Callable[[str, float | None], None]
"""Called with what is being done, and the part of it that is done, from 0 to 1; None: not known."""


@dataclass(frozen=True)
class Recentred:
    """What was done, and what it changed."""

    source: str
    out: str | None
    """None: nothing was left to do, and nothing was written."""
    method: Method
    """The mean was taken from a head of its own; moved to the positions; or taken from a head that was untied."""
    tensors: Sequence[str]
    """The stored tensors that changed."""
    dtype: str
    """How they are stored."""
    rows: int
    """Rows of the table that count for the mean."""
    padding_rows: int
    """Rows that move with the others and do not count."""
    mu_norm: float
    """Length of the mean embedding before."""
    mu_norm_ratio: float
    """The same relative to the mean length of an embedding."""
    added_bytes: int
    """How much larger the weights are."""
    unrounded: Sequence[Difference]
    """Of the result in float64."""
    stored: Sequence[Difference]
    """Of the result as it is stored."""
    before: MeasuredModel
    after: MeasuredModel | None
    notes: Sequence[str]


def recentre(
    source: Path,
    out: Path,
    *,
    untie: bool = False,
    dtype: torch.dtype | None = None,
    tokenizer: str | None = None,
    overwrite: bool = False,
    on_stage: OnStage = lambda what, done: None,
) -> Recentred:
    """Remove the mean of a model's output embeddings without changing its probabilities.

    Args:
        source: a Hugging Face folder, or a run of ours.
        out: the folder to write; new, empty, or with `overwrite` an older model.
        untie: give the head of a tied model a table of its own.
        dtype: how the changed tensors are stored; None: as they were.
        tokenizer: for the comparison on text, as `open_tokenizer` takes it; None: the one that comes with the model.
        overwrite: replace an older model.
        on_stage: called as the work goes on.
    """
    require_free(out, overwrite=overwrite)
    _require_apart(source, out)
    given = None if tokenizer is None else open_tokenizer(tokenizer)
    on_stage("reading the model", None)
    model = _open(source)
    if dtype == model.dtype:
        dtype = None  # nothing changes its type
    if given is not None:
        model = dataclasses.replace(model, tokenizer=lambda: given)
    before = _measure(source, model.rows, "before", on_stage)
    mean, facts = _facts(model, before, untie=untie)
    # The mean of rounding errors is at most half an epsilon of the mean length: what lies below is only rounding.
    if facts["mu_norm_ratio"] <= torch.finfo(model.dtype).eps:
        nothing: dict[str, Any] = {"out": None, "after": None, "tensors": [], "unrounded": [], "stored": []}
        return Recentred(**facts, **nothing, dtype=_name(model.dtype), added_bytes=0)
    method: Method = facts["method"]
    if method == "positions" and model.no_positions:
        raise UserError(_offer_to_untie(model, dtype))

    probes, why_no_text = probes_of(model)
    on_stage("comparing probabilities", 0.0)
    reference = log_probabilities(model, probes)
    tensors = _subtract(model, mean, method)
    on_stage("comparing probabilities", 0.5)
    unrounded = differences(reference, model, probes)
    _require_equal(source, unrounded)

    expected = _rounded(source, tensors, {name: dtype or model.dtypes[name] for name in tensors})
    as_before = 0 if method == "untie" else sum(t.numel() * model.dtypes[name].itemsize for name, t in tensors.items())
    added = sum(tensor.nbytes for tensor in expected.values()) - as_before
    _require_space(out, model.bytes + added)
    write, reopen = model.write, model.reopen
    del model  # a float64 copy of all weights; the one that is read back is another
    with replacing_folder(out) as temporary:
        on_stage("writing", None)
        write(temporary, tensors, untied=method == "untie", dtype=dtype)
        del tensors
        on_stage("reading it back", None)
        again = reopen(temporary)
        _require_written(again, expected, out)
        stored = differences(reference, again, probes)
        if not all(math.isfinite(each.largest) for each in stored):
            raise UserError(f"{source}: the result gives no finite numbers once it is rounded; try --dtype float32")
        del again
        after = dataclasses.replace(_measure(temporary, facts["rows"], "after", on_stage), path=str(out))
    return Recentred(
        **facts | {"notes": [*facts["notes"], *why_no_text]},
        out=str(out),
        tensors=list(expected),
        dtype=_name(next(iter(expected.values())).dtype),
        added_bytes=added,
        unrounded=unrounded,
        stored=stored,
        after=after,
    )


def recentred_json(done: Recentred) -> dict[str, object]:
    """All of it as one JSON object."""
    fields = {field.name: getattr(done, field.name) for field in dataclasses.fields(done)}
    for key in ("unrounded", "stored"):
        fields[key] = [dataclasses.asdict(difference) for difference in fields[key]]
    for key in ("before", "after"):
        fields[key] = None if fields[key] is None else json_object([fields[key]])["models"][0]  # type: ignore[index]
    return {"changed": done.out is not None, **fields}


def _open(source: Path) -> FinishedModel:
    if not source.exists():
        raise UserError(f"{source}: no such folder; give a Hugging Face folder or a run, downloaded to this machine")
    if not source.is_dir():
        raise UserError(
            f"{source}: a file of tensors does not say how the model computes, so the result could not be checked; "
            "give the folder of the model, with config.json"
        )
    if is_run(source):
        return open_run(source)
    if (source / CONFIG).exists():
        return open_hub_folder(source)
    raise UserError(f"{source}: neither a Hugging Face folder (no {CONFIG}) nor a run of ours (no config.toml)")


def _require_apart(source: Path, out: Path) -> None:
    old, new = source.resolve(), out.resolve()
    if new.is_relative_to(old) or old.is_relative_to(new):
        raise UserError(f"{out}: lies in the folder of the model or around it; give the name of another folder")


def _facts(model: FinishedModel, before: MeasuredModel, *, untie: bool) -> tuple[Tensor, dict[str, Any]]:
    """The mean (H,) of the output embeddings that are no padding, and the fields of `Recentred` that are known now."""
    table = model.head.detach()
    if not bool(torch.isfinite(table).all()):
        raise UserError(f"{model.path}: its output table has entries that are not finite; repair the model first")
    mean = table[: model.rows].mean(0)
    mean_length = float(table[: model.rows].norm(dim=1).mean())
    mu_norm = float(mean.norm())
    useless = ["the model has a head of its own already: --untie has nothing to do"] if untie and not model.tied else []
    return mean, {
        "source": str(model.path),
        "method": "head" if not model.tied else "untie" if untie else "positions",
        "rows": model.rows,
        "padding_rows": len(table) - model.rows,
        "mu_norm": mu_norm,
        "mu_norm_ratio": mu_norm / mean_length if mean_length else 0.0,
        "before": before,
        "notes": [*model.notes, *useless],
    }


def _subtract(model: FinishedModel, mean: Tensor, method: Method) -> dict[str, Tensor]:
    """Remove the mean in memory; the tensors that change, by the names of the files."""
    if method == "head":
        return model.take_from_head(mean)
    return model.move_to_positions(mean) if method == "positions" else model.untie(mean)


def _measure(folder: Path, rows: int, when: str, on_stage: OnStage) -> MeasuredModel:
    def progress(what: str, done: float) -> None:
        on_stage(f"measuring {when}", done)

    return inspect_models([str(folder)], Request(vocabulary_size=rows), progress)[0]


def _offer_to_untie(model: FinishedModel, dtype: torch.dtype | None) -> str:
    size = model.head.numel() * (dtype or model.dtype).itemsize
    return (
        f"{model.path}: input and output are one table, and {model.no_positions}, so removing the mean would change "
        f"what the model reads. --untie gives the head a table of its own: {size_text(size)} more on disk and in "
        f"memory ({size / model.bytes:.0%} of the weights)"
    )


def _require_equal(source: Path, found: Sequence[Difference]) -> None:
    worst = max(found, key=lambda difference: difference.largest)
    if not worst.largest <= LARGEST_DIFFERENCE:
        raise UserError(
            f"{source}: without its mean the model gives other probabilities (log-probabilities differ by up to "
            f"{worst.largest:.2g} on {worst.tokens}, more than {LARGEST_DIFFERENCE:g}): something in it sees the "
            "shift of the logits or of the table; nothing was written"
        )


def _require_space(out: Path, needed: int) -> None:
    """Say now, and not after half of the writing, that the disk is too full."""
    place = next(path for path in out.absolute().parents if path.is_dir())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise UserError(
            f"{out}: the model needs {size_text(needed)}, but {size_text(free)} are free; make room, or give a folder "
            "on another disk"
        )


def _rounded(source: Path, tensors: dict[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """The tensors as they are to be stored."""
    for name, tensor in tensors.items():
        largest = float(tensor.abs().max())
        if largest > torch.finfo(dtypes[name]).max:
            raise UserError(
                f"{source}: tensor {name!r} would have an entry of {largest:.3g}, too large for {_name(dtypes[name])}; "
                "store it with --dtype float32"
            )
    return {name: tensor.to(dtypes[name]) for name, tensor in tensors.items()}


def _require_written(again: FinishedModel, expected: dict[str, Tensor], out: Path) -> None:
    tables = dict.fromkeys(again.table_names, again.head)
    if again.positions is not None and again.positions_name is not None:
        tables[again.positions_name] = again.positions
    for name, tensor in expected.items():
        if name not in tables or not torch.equal(tables[name].detach(), tensor.double()):
            raise RuntimeError(f"{out}: {name!r} was not read back as it was written")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
