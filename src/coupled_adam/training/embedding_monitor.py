"""Measure the embeddings during training: the mean embedding often, all measures occasionally.

The mean embedding costs one pass over a table on its device, and `light_measures` does not wait for the result. All
measures of a large table take seconds on the CPU, and a fraction of a second on a GPU.

Padding rows, from `vocabulary_size` on, are always excluded. Tables with rows sharded over ranks (FSDP2) are measured
as a whole: every rank must call the same function.

Legend: V vocabulary rows, H hidden size, n rows of one block.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch import Tensor

from coupled_adam.base.errors import UserError
from coupled_adam.embeddings import EmbeddingMetrics, SingleTokens, WordPairs, measure
from coupled_adam.embeddings.embedding_matrix import Array, open_table
from coupled_adam.metrics import table_key
from coupled_adam.optimizer.sharding import PartialSum, Reduction, is_distributed, local_part, process_groups

# Size of a block in float64: small compared with a table, and it stays in the cache between its two sums.
BLOCK_BYTES = 2**24


@torch.no_grad()
def light_measures(tables: Mapping[str, Tensor], vocabulary_size: int) -> dict[str, Tensor]:
    """Compute the length of each table's mean embedding, and its ratio to the mean length (Eq. mu).

    Args:
        tables: (V, H) by role: "input" and "output", or one of them for a tied model.
        vocabulary_size: number of rows before the padding.

    Returns:
        `mu_norm` and `mu_norm_ratio`, with the prefix `input_` for the input table: 0-dimensional float64 tensors on
        the table's device, the same on every rank. They equal the values of `measure`; the ratio is NaN if all rows
        are zero.

    Example:
        >>> light_measures({"output": torch.tensor([[3.0, 4.0], [3.0, -4.0], [9.0, 9.0]])}, vocabulary_size=2)
        {'mu_norm': tensor(3., dtype=torch.float64), 'mu_norm_ratio': tensor(0.6000, dtype=torch.float64)}
    """
    sums = {role: row_sums(table, vocabulary_size, role) for role, table in tables.items()}
    Reduction([PartialSum(sums[role], process_groups(table, 0)) for role, table in tables.items()]).wait()
    results: dict[str, Tensor] = {}
    for role, total in sums.items():
        mu = total[:-1] / vocabulary_size  # (H,)
        mean_norm = total[-1] / vocabulary_size
        length = torch.linalg.vector_norm(mu)
        results |= {table_key(role, "mu_norm"): length, table_key(role, "mu_norm_ratio"): length / mean_norm}
    return results


def row_sums(table: Tensor, vocabulary_size: int, role: str) -> Tensor:
    """sum_i e_i and sum_i |e_i| over this rank's rows without padding, (H + 1,) float64."""
    rows = local_part(table)[: rows_before_padding(table, vocabulary_size, role)]
    sums = torch.zeros(table.shape[1] + 1, dtype=torch.float64, device=rows.device)
    if len(rows) == 0:
        return sums
    blocks = open_table(rows, None, max(1, BLOCK_BYTES // (8 * table.shape[1])))
    for span in blocks.spans():
        block = blocks.rows(span).double()  # (n, H)
        sums[:-1] += block.sum(0)
        sums[-1] += torch.linalg.vector_norm(block, dim=1).sum()
    return sums


def rows_before_padding(table: Tensor, vocabulary_size: int, role: str) -> int:
    """Number of this rank's rows that are not padding."""
    V = table.shape[0]
    if not 0 < vocabulary_size <= V:
        raise UserError(f"{role} table: vocabulary_size is {vocabulary_size}, expected 1 to its number of rows, {V}")
    if not process_groups(table):
        return vocabulary_size
    mesh, placements = table.device_mesh, table.placements  # type: ignore[attr-defined]
    (mesh_dim, *others) = (dim for dim, placement in enumerate(placements) if not placement.is_replicate())
    if others or not placements[mesh_dim].is_shard(0):
        raise UserError(
            f"{role} table: its placements are {placements}, expected rows sharded over one mesh dimension, as with "
            "FSDP2; pass table.full_tensor(), or switch the monitor off"
        )
    rows_per_rank = -(-V // int(mesh.size(mesh_dim)))  # the last ranks may have fewer or none
    return max(0, vocabulary_size - int(mesh.get_local_rank(mesh_dim)) * rows_per_rank)


def full_measures(
    tables: Mapping[str, Tensor],
    vocabulary_size: int,
    *,
    unigram: Array | Tensor | None = None,
    tokenizer: SingleTokens | None = None,
    word_pairs: Mapping[str, WordPairs] | None = None,
) -> dict[str, float | None]:
    """Compute all measures of each table on the first rank; the other ranks only send their rows.

    Args:
        tables: (V, H) by role, as in `light_measures`.
        vocabulary_size: number of rows before the padding.
        unigram: token counts of the training text, (vocabulary_size,).
        tokenizer: maps words to tokens.
        word_pairs: word-similarity benchmarks by name.

    Returns:
        The numbers of `EmbeddingMetrics` by name, and for each benchmark for example `simlex_999_pearson`; with the
        prefix `input_` for the input table. Empty on ranks other than the first.

    Raises:
        ValueError: a table has entries that are not finite; look at the loss first.
    """
    results: dict[str, float | None] = {}
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    for role, table in tables.items():
        whole = table.full_tensor() if is_distributed(table) else table  # type: ignore[attr-defined]
        if is_first:
            metrics = measure(
                whole[:vocabulary_size].detach(), unigram=unigram, tokenizer=tokenizer, word_pairs=word_pairs
            )
            results |= {table_key(role, name): value for name, value in numbers_of(metrics).items()}
    return results


def numbers_of(metrics: EmbeddingMetrics) -> dict[str, float | None]:
    """Flatten the metrics to numbers by name, with one number per benchmark and kind."""
    numbers: dict[str, float | None] = {
        name: value for name, value in metrics.to_dict().items() if name not in ("shape", "word_similarity")
    }
    for benchmark, result in metrics.word_similarity.items():
        plain_name = re.sub(r"[^a-z0-9]+", "_", benchmark.lower())
        numbers |= {f"{plain_name}_{name}": value for name, value in asdict(result).items()}
    return numbers
