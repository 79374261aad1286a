"""Quantisation error of a table, before and after its mean is removed.

`embeddings.integers` quantises. A common mean uses up the range of the integers without distinguishing the embeddings.

Both errors are relative to the same quantity before and after recentring, so they can be compared: the distance of
embeddings from their mean, and of logits from theirs. A common shift of all logits is not an error.

Legend: V vocabulary rows, H hidden size, G groups of columns, U random unit vectors.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from coupled_adam.base.errors import UserError
from coupled_adam.embeddings.embedding_matrix import torch_rows
from coupled_adam.embeddings.integers import GROUPS, LARGEST_INTEGER, quantise
from coupled_adam.inspection.sampling import column_mean
from coupled_adam.inspection.stored import Matrix

VECTORS = 64
SEED = 0
BLOCK_ROWS = 4096


@dataclass(frozen=True)
class QuantisationError:
    """The error of one kind of quantisation, in percent."""

    integers: str
    """"int8" or "int4"."""
    scale: str
    """What shares a scale: "row" or "group of 32"."""
    table: float | None
    """Root mean square error of an entry, relative to its root mean square distance from the column mean; None if all
    rows are equal."""
    logits: float | None
    """Standard deviation of the logit error over the vocabulary, relative to that of the logits, for random unit
    vectors; None if all logits are equal."""
    table_recentred: float | None
    logits_recentred: float | None


def parse_integers(text: str) -> list[str]:
    """Parse an option such as "int8,int4".

    Example:
        >>> parse_integers("int8, int4")
        ['int8', 'int4']
    """
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in LARGEST_INTEGER:
            raise UserError(f"--quantise: {name!r} is not one of {', '.join(LARGEST_INTEGER)}; pass e.g. int8,int4")
    return names


def quantisation_errors(
    matrix: Matrix, kinds: Sequence[str], progress: Callable[[float], None] = lambda done: None
) -> list[QuantisationError]:
    """Compute the errors of every integer type, with one scale per row and with one per 32 columns.

    Args:
        matrix: (V, H).
        kinds: names in LARGEST_INTEGER.
        progress: called with the progress in [0, 1].
    """
    rows, columns = matrix.shape
    mean = column_mean(matrix)
    generator = torch.Generator().manual_seed(SEED)
    vectors = torch.randn(columns, VECTORS, generator=generator, dtype=torch.float64)
    vectors /= vectors.norm(dim=0)  # (H, U)
    ways = [(integers, scale) for integers in kinds for scale in GROUPS]
    sums = {(*way, recentred): _ErrorSums.zero() for way in ways for recentred in (False, True)}
    spread = _ErrorSums.zero()  # of the embeddings and logits themselves
    for start in range(0, rows, BLOCK_ROWS):
        block = torch_rows(matrix, slice(start, start + BLOCK_ROWS)).double()
        centred = block - mean
        spread.add(centred, vectors)
        for integers, scale, recentred in sums:
            exact = centred if recentred else block
            sums[integers, scale, recentred].add(quantise(exact, integers, GROUPS[scale]) - exact, vectors)
        progress(min(1.0, (start + BLOCK_ROWS) / rows))

    def relative(way: tuple[str, str, bool]) -> tuple[float | None, float | None]:
        error = sums[way]
        return _percent(error.squares, spread.squares), _percent(error.variance(rows), spread.variance(rows))

    errors = []
    for integers, scale in ways:
        (table, logits), (table_after, logits_after) = (relative((integers, scale, after)) for after in (False, True))
        errors.append(QuantisationError(integers, scale, table, logits, table_after, logits_after))
    return errors


def errors_json(errors: Sequence[QuantisationError]) -> list[dict[str, object]]:
    """The errors as JSON objects."""
    return [asdict(error) for error in errors]


@dataclass
class _ErrorSums:
    """Sums over rows of deviations (V, H) and of the resulting logit deviations (V, U)."""

    squares: float
    logits: Tensor  # (U,)
    logit_squares: Tensor  # (U,)

    @classmethod
    def zero(cls) -> "_ErrorSums":
        return cls(0.0, torch.zeros(VECTORS, dtype=torch.float64), torch.zeros(VECTORS, dtype=torch.float64))

    def add(self, deviation: Tensor, vectors: Tensor) -> None:
        logits = deviation @ vectors
        self.squares += float(deviation.square().sum())
        self.logits += logits.sum(0)
        self.logit_squares += logits.square().sum(0)

    def variance(self, rows: int) -> float:
        """Variance of the logits over the vocabulary, averaged over the vectors."""
        return float((self.logit_squares / rows - (self.logits / rows).square()).clamp(min=0).mean())


def _percent(error: float, spread: float) -> float | None:
    return 100 * (error / spread) ** 0.5 if spread > 0 else None
