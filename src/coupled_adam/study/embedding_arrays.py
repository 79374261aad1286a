"""Small arrays of a trained table for the figures, in the file `embeddings.npz` of a run.

singular_values (H,)            largest first
log10_frequency, norm (n,)      for a sample of the tokens that occur in the training text
token_count ()                  number of tokens counted
cloud_final, cloud_initial (S, 3)  the same sampled rows after and before training, along the direction of the final
                                mean and the first two principal components orthogonal to it
mean_final, mean_initial (3,)   the mean of all rows in the same directions

All are float32 and describe the output table; arrays of an untied input table have the prefix `input_`.
Letters: V vocabulary rows without padding, H width, S and n sampled rows.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from coupled_adam.base.files import replacing
from coupled_adam.embeddings import EmbeddingMetrics
from coupled_adam.inspection.sampling import axes_around, column_mean
from coupled_adam.models.initial import initialise
from coupled_adam.models.model_config import ModelConfig, build_model
from coupled_adam.study.results import EMBEDDINGS_FILE

CLOUD_ROWS = 1500
FREQUENCY_ROWS = 4000
SEED = 0

Arrays = dict[str, npt.NDArray[Any]]


def table_arrays(
    final: Tensor, initial: Tensor, metrics: EmbeddingMetrics, counts: npt.NDArray[np.int64] | None
) -> Arrays:
    """Compute the arrays of one table.

    Args:
        final: (V, H) after training.
        initial: (V, H) before training.
        metrics: of `final`.
        counts: (V,) token counts of the training text, if known.
    """
    generator = np.random.default_rng(SEED)
    V = len(final)
    rows = np.sort(generator.choice(V, min(V, CLOUD_ROWS), replace=False))
    final, initial = final.detach().cpu().float(), initial.detach().cpu().float()
    mean = column_mean(final)
    axes = axes_around(final[rows], mean)  # (H, 3)
    arrays: Arrays = {
        "singular_values": metrics.singular_values,
        "cloud_final": (final[rows] @ axes).numpy(),
        "cloud_initial": (initial[rows] @ axes).numpy(),
        "mean_final": (mean.float() @ axes).numpy(),
        "mean_initial": (column_mean(initial).float() @ axes).numpy(),
    }
    if counts is not None:
        seen = np.flatnonzero(counts)
        sampled = np.sort(generator.choice(seen, min(len(seen), FREQUENCY_ROWS), replace=False))
        total = counts.sum()
        arrays |= {
            "log10_frequency": np.log10(counts[sampled] / total),
            "norm": metrics.norms[sampled],
            "token_count": np.asarray(total),
        }
    return arrays


def initial_tables(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Vocabulary tables (V, H) of a model before training, by parameter name."""
    # Initial values depend only on the seed and the parameter's name, so a model with one layer has the same tables.
    model = build_model(replace(config, layers=1, output_bias="none"))
    initialise(model, seed)
    return {name: model.get_parameter(name).detach() for name in {model.input_table_name, model.output_table_name}}


def write_arrays(run_folder: Path, arrays: Arrays) -> None:
    """Write the arrays of a run."""
    small = {name: np.asarray(values, np.float32) for name, values in arrays.items()}
    with replacing(run_folder / EMBEDDINGS_FILE) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **small)  # type: ignore[arg-type]
