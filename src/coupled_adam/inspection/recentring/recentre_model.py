"""Recentre a model: open, subtract the mean, check, write, read back, measure.

With mu the mean of the output embeddings, the logits of (e_i - mu) are those of e_i minus the number mu . h, which is
the same for every token of the vocabulary and cancels in the softmax.

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
from coupled_adam.base.text import percent, scientific, setting, significant, size_text
from coupled_adam.evaluation.whole_folder import replacing_folder, require_free
from coupled_adam.inspection.folders import runs_inside
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
"""Between the log-probabilities of the model and the unrounded result, in nats; in float64 about 1e-12 is expected."""

Method = Literal["head", "positions", "untie"]
OnStage = Callable[[str, float | None], None]
"""Called with the name of a step and its progress in [0, 1], or None if unknown."""


@dataclass(frozen=True)
class Recentred:
    """Summary of a recentring."""

    source: str
    out: str | None
    """None if there was nothing to do and nothing was written."""
    method: Method
    """The mean was subtracted from a separate head, moved to the positions, or subtracted from a newly untied head."""
    tensors: Sequence[str]
    """Names of the changed stored tensors."""
    dtype: str
    """Their stored type."""
    rows: int
    """Rows of the table that are averaged."""
    padding_rows: int
    """Rows that are shifted but not averaged."""
    mu_norm: float
    """Length of the mean embedding before."""
    mu_norm_ratio: float
    """The same, relative to the mean length of an embedding."""
    added_bytes: int
    """Increase of the size of the weights."""
    unrounded: Sequence[Difference]
    """For the result in float64."""
    stored: Sequence[Difference]
    """For the stored result."""
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
        source: a Hugging Face folder or a run folder.
        out: the folder to write; new, empty, or with `overwrite` an existing model.
        untie: give the head of a tied model its own table.
        dtype: of the changed tensors; None to keep their type.
        tokenizer: for the comparison on text, in a form that `open_tokenizer` accepts; None for the model's own.
        overwrite: replace an existing model.
        on_stage: called with the progress.
    """
    require_free(out, overwrite=overwrite)
    _require_apart(source, out)
    given = None if tokenizer is None else open_tokenizer(tokenizer)
    on_stage("reading the model", None)
    model = _open(source)
    if dtype == model.dtype:
        dtype = None  # the type does not change
    if given is not None:
        model = dataclasses.replace(model, tokenizer=lambda: given)
    before = _measure(source, model.rows, "before", on_stage)
    mean, facts = _facts(model, before, untie=untie)
    # Rounding errors alone give a mean of at most half an epsilon of the mean length.
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
    del model  # a float64 copy of all weights; reading back needs another
    with replacing_folder(out) as temporary:
        on_stage("writing", None)
        write(temporary, tensors, untied=method == "untie", dtype=dtype)
        del tensors
        on_stage("reading it back", None)
        again = reopen(temporary)
        _require_written(again, expected, out)
        stored = differences(reference, again, probes)
        if not all(math.isfinite(each.largest) for each in stored):
            raise UserError(f"{source}: the rounded result is not finite; try --dtype float32")
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
    """Convert to one JSON object."""
    fields = {field.name: getattr(done, field.name) for field in dataclasses.fields(done)}
    for key in ("unrounded", "stored"):
        fields[key] = [dataclasses.asdict(difference) for difference in fields[key]]
    for key in ("before", "after"):
        fields[key] = None if fields[key] is None else json_object([fields[key]])["models"][0]  # type: ignore[index]
    return {"changed": done.out is not None, **fields}


def _open(source: Path) -> FinishedModel:
    if not source.exists():
        raise UserError(f"{source}: no such folder; pass a local Hugging Face folder or run folder")
    if not source.is_dir():
        raise UserError(
            f"{source}: a file of tensors does not define the model, so the result could not be checked; pass the "
            "folder of the model, with config.json"
        )
    if is_run(source):
        return open_run(source)
    if (source / CONFIG).exists():
        return open_hub_folder(source)
    runs = runs_inside(source)
    remedy = f"; pass a run, such as {runs[0]}" if runs else ""
    raise UserError(f"{source}: neither a Hugging Face folder (no {CONFIG}) nor a run folder (no config.toml){remedy}")


def _require_apart(source: Path, out: Path) -> None:
    old, new = source.resolve(), out.resolve()
    if new.is_relative_to(old) or old.is_relative_to(new):
        raise UserError(f"{out}: is inside the model folder or contains it; pass another folder")


def _facts(model: FinishedModel, before: MeasuredModel, *, untie: bool) -> tuple[Tensor, dict[str, Any]]:
    """The mean (H,) of the output embeddings without padding, and the fields of `Recentred` known so far."""
    table = model.head.detach()
    if not bool(torch.isfinite(table).all()):
        raise UserError(f"{model.path}: its output table has non-finite entries; repair the model first")
    mean = table[: model.rows].mean(0)
    mean_length = float(table[: model.rows].norm(dim=1).mean())
    mu_norm = float(mean.norm())
    useless = ["the model is already untied: --untie has no effect"] if untie and not model.tied else []
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
    """Subtract the mean in memory; return the changed tensors by stored name."""
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
        f"{model.path}: input and output share a table, and {model.no_positions}, so removing the mean would change "
        f"the input. Pass --untie to give the head its own table: {size_text(size)} more on disk and in memory "
        f"({percent(size / model.bytes)} of the weights)"
    )


def _require_equal(source: Path, found: Sequence[Difference]) -> None:
    worst = max(found, key=lambda difference: difference.largest)
    if not worst.largest <= LARGEST_DIFFERENCE:
        raise UserError(
            f"{source}: removing the mean changes the probabilities (log-probabilities differ by up to "
            f"{scientific(worst.largest)} on {worst.tokens}, more than {setting(LARGEST_DIFFERENCE)}): the model "
            "depends on a shift of the logits or of the table; nothing was written"
        )


def _require_space(out: Path, needed: int) -> None:
    """Raise before writing if the disk is too full."""
    place = next(path for path in out.absolute().parents if path.is_dir())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise UserError(
            f"{out}: the model needs {size_text(needed)}, but only {size_text(free)} are free; free disk space, or use "
            "a folder on another disk"
        )


def _rounded(source: Path, tensors: dict[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """Round the tensors to their stored types."""
    for name, tensor in tensors.items():
        largest = float(tensor.abs().max())
        if largest > torch.finfo(dtypes[name]).max:
            raise UserError(
                f"{source}: tensor {name!r} would have an entry of {significant(largest, 3)}, too large for "
                f"{_name(dtypes[name])}; store it with --dtype float32"
            )
    return {name: tensor.to(dtypes[name]) for name, tensor in tensors.items()}


def _require_written(again: FinishedModel, expected: dict[str, Tensor], out: Path) -> None:
    tables = dict.fromkeys(again.table_names, again.head)
    if again.positions is not None and again.positions_name is not None:
        tables[again.positions_name] = again.positions
    for name, tensor in expected.items():
        if name not in tables or not torch.equal(tables[name].detach(), tensor.double()):
            raise RuntimeError(f"{out}: {name!r} was read back differently than written")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
