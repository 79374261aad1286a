"""All measurements at one checkpoint, in one pass over its K batches.

Letters: V rows of a table, padding included, H width, B samples of a batch, T context.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import numpy as np
import torch
from torch import Tensor

from coupled_adam.base.errors import UserError
from coupled_adam.config.optimizer_names import is_coupled_adam
from coupled_adam.config.run_sections import OptimizerSection, TableSection
from coupled_adam.models.language_model import LanguageModel
from coupled_adam.theory.fits import fit_through_origin, theorem_fit
from coupled_adam.theory.identity import identity_error
from coupled_adam.theory.pseudo_training import BatchGradients, PseudoTraining
from coupled_adam.theory.record import OPTIMIZERS, CheckpointTheory, Fit, Optimizer, Series, UpdateSum
from coupled_adam.theory.theory_folder import Counts, TokenArrays
from coupled_adam.theory.token_statistics import TokenStatistics
from coupled_adam.theory.updates import LayerParts, Member, TableState, gradient_sum, update_sum
from coupled_adam.training.embedding_monitor import row_sums

# For the check of the gradient identity, whose logits are in float64.
IDENTITY_TOKENS = 128


def measure_checkpoint(
    model: LanguageModel,
    batches: Iterable[Tensor],
    optimizer: OptimizerSection,
    unigram: Counts,
    *,
    step: int,
    tokens_seen: int,
    row_exponent: float | None = None,
    bf16: bool = False,
    on_batch: Callable[[], None] = lambda: None,
) -> tuple[CheckpointTheory, TokenArrays]:
    """Measure the theory at one checkpoint.

    Args:
        model: with its weights, on its device; the weights are not changed.
        batches: windows (B, T + 1) each, int64: the next training batches of the run.
        optimizer: the run's settings for clipping and decay, whichever optimizer it used.
        unigram: (tokens,) token counts of the training text; later rows are padding.
        step: of the checkpoint.
        tokens_seen: tokens trained on so far.
        row_exponent: at this step, if the run anneals it.
        bf16: use autocast, as in training on a GPU; sums then vanish only up to its rounding.
        on_batch: called after each batch.
    """
    tied = model.config.tied
    device = next(model.parameters()).device
    training = PseudoTraining(
        model,
        max_grad_norm=optimizer.max_grad_norm,
        z_loss=optimizer.z_loss,
        autocast=partial(torch.autocast, device.type, torch.bfloat16) if bf16 else nullcontext,
    )
    table = training.output_table.detach()  # (V, H)
    mean = row_sums(table, len(unigram), "output")[:-1] / len(unigram)  # (H,)
    bias = None if model.lm_head.bias is None else model.lm_head.bias.detach()  # (V,)
    statistics = TokenStatistics(table, bias)
    member = member_of(optimizer, len(unigram), row_exponent)
    has_member = {role: tied or optimizer.couple in (role, "all") for role in ("output", "input")}
    output = TableUpdates(optimizer, optimizer.tables, mean, member if has_member["output"] else None)
    input_mean = row_sums(training.input_table, len(unigram), "input")[:-1] / len(unigram)
    input_table = optimizer.tables if tied else optimizer.input_table
    input = TableUpdates(optimizer, input_table, input_mean, member if has_member["input"] else None)
    sums: Series = {}
    losses: list[float] = []
    clip_factors: list[float] = []
    errors: list[float] = []

    def look_at(hidden: Tensor, targets: Tensor) -> None:
        statistics.add(hidden, targets)
        if not errors:
            errors.append(identity_error(hidden[:IDENTITY_TOKENS], table, targets[:IDENTITY_TOKENS], bias))

    with exact_float32():
        for windows in batches:
            gradients = training.gradients(windows, look_at)
            losses.append(require_finite(gradients.loss, step))
            clip_factors.append(gradients.clip_factor)
            _append_gradient_sums(sums, gradients, tied)
            if tied:
                output.add({"output": gradients.output, "input": gradients.input})
            else:
                output.add({"output": gradients.output})
                input.add({"input": gradients.input})
            on_batch()
    arrays = token_arrays(statistics, output.state.second_moment())
    numbers = CheckpointTheory(
        step=step,
        tokens_seen=tokens_seen,
        batches=len(losses),
        loss=sum(losses) / len(losses),
        mu_norm=float(mean.norm()),
        S_mean=float(statistics.hidden_square.mean()),
        identity_error=errors[0],
        clip_factors=clip_factors,
        gradient_sums=sums,
        updates=output.last(),
        update_series=output.series(),
        fits=fits_of(arrays, unigram),
        theorem=theorem_fit(arrays.squared_gradient, arrays.squared_gradient_predicted),
        theorem_elements=theorem_fit(
            statistics.element_squared_gradient.cpu().numpy(),
            statistics.element_squared_gradient_predicted.cpu().numpy(),
        ),
        input_updates=[] if tied else input.last(),
    )
    return numbers, arrays


def member_of(optimizer: OptimizerSection, vocabulary_size: int, row_exponent: float | None = None) -> Member | None:
    """The family member that trained a run's tables; None for Coupled Adam and other optimizers.

    Args:
        optimizer: [optimizer] of the run.
        vocabulary_size: later rows are padding.
        row_exponent: at the step in question, if it is annealed.
    """
    if optimizer.embeddings != "coupled" or is_coupled_adam(optimizer.model_dump()):
        return None
    return Member(
        scale_exponent=optimizer.scale_exponent,
        column_exponent=optimizer.column_exponent,
        row_exponent=optimizer.row_exponent if row_exponent is None else row_exponent,
        mean_free=optimizer.mean_free,
        vocabulary_size=vocabulary_size,
    )


class TableUpdates:
    """The optimizers' state of one table, and the update sums after every batch."""

    def __init__(
        self, optimizer: OptimizerSection, table: TableSection, mean_embedding: Tensor, member: Member | None
    ) -> None:
        self.state = TableState(
            betas=optimizer.betas_of(table),
            eps=optimizer.eps_of(table),
            momentum=optimizer.sgd_momentum,
            member=member,
        )
        self.mean_embedding = mean_embedding  # (H,)
        names: tuple[Optimizer, ...] = OPTIMIZERS if member is None else (*OPTIMIZERS, "own")
        self.sums: dict[Optimizer, list[UpdateSum]] = {name: [] for name in names}

    def add(self, gradient: LayerParts) -> None:
        """Add the gradient of a batch."""
        self.state.add(gradient)
        for name, sums in self.sums.items():
            sums.append(update_sum(name, self.state.update(name), self.mean_embedding))

    def last(self) -> list[UpdateSum]:
        """The update sums after the last batch."""
        return [sums[-1] for sums in self.sums.values()]

    def series(self) -> dict[Optimizer, Series]:
        """The relative update sums after every batch."""
        return {
            name: {part: [getattr(each, part) for each in sums] for part in ("total", "output", "input")}
            for name, sums in self.sums.items()
        }


def _append_gradient_sums(sums: Series, gradients: BatchGradients, tied: bool) -> None:
    total = gradients.output + gradients.input if tied else gradients.output
    for name, gradient in (("output", gradients.output), ("input", gradients.input), ("total", total)):
        relative, by_frobenius = gradient_sum(gradient)
        sums.setdefault(name, []).append(relative)
        sums.setdefault(f"{name}_frobenius", []).append(by_frobenius)


def token_arrays(statistics: TokenStatistics, second_moment: Tensor) -> TokenArrays:
    """The arrays to store for every token."""
    named = {
        "x_true": statistics.x_true,
        "x_false": statistics.x_false,
        "second_moment": second_moment,
        "squared_gradient": statistics.squared_gradient,
        "squared_gradient_predicted": statistics.squared_gradient_predicted,
        "hidden_square": statistics.hidden_square,
    }
    return TokenArrays(
        target_counts=statistics.target_counts.cpu().numpy(),
        **{name: values.cpu().numpy().astype(np.float32) for name, values in named.items()},
    )


def fits_of(arrays: TokenArrays, unigram: Counts) -> dict[str, Fit]:
    """Fit against the unigram probability of the corpus, over all tokens; X^(i=t) only over tokens seen as target."""
    p = unigram / unigram.sum()
    measured = {"x_true": arrays.x_true, "x_false": arrays.x_false, "second_moment": arrays.second_moment}
    return {name: fit_through_origin(y[: len(p)], p) for name, y in measured.items()}


def require_finite(loss: float, step: int) -> float:
    """Return the loss; raise ValueError if it is not finite."""
    if not math.isfinite(loss):
        raise UserError(
            f"checkpoint of step {step}: its loss is {loss}, so nothing can be measured; choose other checkpoints with "
            "--checkpoint"
        )
    return loss


@contextmanager
def exact_float32() -> Iterator[None]:
    """Compute matrix products in full float32: training in the same process may have enabled TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
