"""A made-up measured run: numbers similar to the paper's, for figures, page and command."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from coupled_adam.theory.record import (
    FITTED,
    OPTIMIZERS,
    CheckpointTheory,
    Fit,
    Optimizer,
    RunTheory,
    Spread,
    TheoremFit,
    UpdateSum,
)
from coupled_adam.theory.theory_folder import TheoryFolder, TokenArrays

ROWS, TOKENS, WIDTH = 4096, 4090, 64
SUMS: dict[Optimizer, tuple[float, float, float]] = {
    "sgd": (0.11, 3e-8, 0.11),
    "adam": (0.55, 0.6, 0.08),
    "coupled": (0.09, 2e-8, 0.09),
}


def fabricate(run: Path, *, name: str = "tiny", tied: bool = True, steps: tuple[int, ...] = (30, 60, 90)) -> RunTheory:
    """Write RUN/theory as a measurement would, and return its contents."""
    generator = np.random.default_rng(0)
    folder = TheoryFolder(run)
    counts = generator.permutation((10**6 / np.arange(1, TOKENS + 1)).astype(np.int64))
    counts[:7] = 0
    p = np.zeros(ROWS)
    p[:TOKENS] = counts / counts.sum()
    checkpoints = []
    for number, step in enumerate(steps):
        A = 1e-5 * (1 + number)
        arrays = fabricated_arrays(p, A, generator)
        numbers = fabricated_checkpoint(step, A, tied)
        folder.write_checkpoint(numbers, arrays, {"step": step})
        checkpoints.append(numbers)
    folder.write_unigram(counts)
    theory = RunTheory(
        run=name,
        optimizer="adamw",
        parameters=364_864,
        vocabulary_size=TOKENS,
        rows=ROWS,
        width=WIDTH,
        tied=tied,
        corpus="data/python-docs-bpe4096",
        batches=20,
        tokens_per_batch=1024,
        precision="float32",
        checkpoints=checkpoints,
        summary={f"{fitted}_r2": Spread(0.9, 0.01) for fitted in FITTED}
        | {f"{fitted}_mutual_information": Spread(0.51, 0.02) for fitted in FITTED}
        | {"second_moment_A": Spread(2e-5, 1e-5), "theorem_r2": Spread(0.97, 0.004)},
    )
    folder.write_run(theory)
    return theory


def without_mutual_information(theory: RunTheory) -> RunTheory:
    """As measured on a machine without scikit-learn."""
    checkpoints = [
        replace(each, fits={name: replace(fit, mutual_information=None) for name, fit in each.fits.items()})
        for each in theory.checkpoints
    ]
    summary = {name: spread for name, spread in theory.summary.items() if "mutual" not in name}
    return replace(theory, checkpoints=checkpoints, summary=summary, notes=["scikit-learn is missing"])


def fabricated_arrays(p: np.ndarray, A: float, generator: np.random.Generator) -> TokenArrays:
    """Of (V,) unigram probabilities."""
    noise = np.exp(0.4 * generator.standard_normal(ROWS))
    x_false = (0.05 * p * noise + 1e-9).astype(np.float32)
    targets = generator.poisson(20 * 1024 * p)
    x_true = np.where(targets > 0, generator.beta(8, 2, ROWS), np.nan).astype(np.float32)
    squared = (0.9 * p + x_false).astype(np.float32)
    return TokenArrays(
        target_counts=targets.astype(np.int64),
        x_true=x_true,
        x_false=x_false,
        second_moment=(A * p * noise + 1e-12).astype(np.float32),
        squared_gradient=(squared * noise).astype(np.float32),
        squared_gradient_predicted=squared,
        hidden_square=np.ones(WIDTH, np.float32),
    )


def fabricated_checkpoint(step: int, A: float, tied: bool) -> CheckpointTheory:
    """Updates whose sums vanish according to the theory."""
    return CheckpointTheory(
        step=step,
        tokens_seen=step * 1024,
        batches=20,
        loss=6.5,
        mu_norm=0.3,
        S_mean=1.1,
        identity_error=3e-16,
        clip_factors=[1.0] * 20,
        gradient_sums={"output": [2e-8] * 20, "input": [0.2] * 20, "total": [0.15] * 20},
        updates=[UpdateSum(name, *SUMS[name], 1.0, 1.0, 1.0, 0.5) for name in OPTIMIZERS],
        update_series={name: {"total": [0.1] * 20, "output": [0.1] * 20, "input": [0.1] * 20} for name in OPTIMIZERS},
        fits={
            "x_true": Fit(0.5, 0.01, -3.0, 0.14, 2000),
            "x_false": Fit(0.05, 0.93, 0.92, 0.5, TOKENS),
            "second_moment": Fit(A, 0.87, 0.86, 1.2, TOKENS),
        },
        theorem=TheoremFit(1.02, 0.97, 0.96, 0.99, 0.95),
        theorem_elements=TheoremFit(1.01, 0.91, 0.90, 0.98, 0.93),
        input_updates=[] if tied else [UpdateSum(name, 0.3, 0.0, 0.3, 1, 0, 1, None) for name in OPTIMIZERS],
    )
