"""How a study selects a setting: which values to try, which value wins, and whether it is at an edge.

Everything here is a function of validation losses only, so that runner, status and report agree.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Edge = Literal["lower", "upper"]
DIGITS = 6
VALIDATION_LOSS = "val_loss"
"""The metric of the selection."""


@dataclass(frozen=True)
class Trial:
    """A run's role in a selection."""

    key: str
    """The selected setting, such as optimizer.lr."""
    value: float | None
    """Value in this run; None if the winner is not known yet."""
    is_candidate: bool
    """Whether the run uses the selection's seed and is not reported."""
    of: str
    """The cell whose runs use the winner."""
    edge: Edge | None = None
    """Reported runs: the end of the tried values at which the winner lies, if any."""
    trials: int | None = None
    """Reported runs: the number of values tried."""

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values, for results and tasks."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Trial":
        """The inverse of `to_json`.

        Raises:
            ValueError: the values are not those of a trial.
        """
        kinds: dict[str, tuple[type, ...]] = {
            "key": (str,),
            "value": (int, float, type(None)),
            "is_candidate": (bool,),
            "of": (str,),
            "edge": (str, type(None)),
            "trials": (int, type(None)),
        }
        if set(values) != set(kinds) or not all(isinstance(values[name], kind) for name, kind in kinds.items()):
            raise ValueError(f"expected the keys {', '.join(kinds)}")
        if values["edge"] not in (None, "lower", "upper"):
            raise ValueError("expected an edge that is lower, upper or null")
        return cls(**values)


@dataclass(frozen=True)
class Choice:
    """State of a selection."""

    tried: tuple[float, ...]
    """The values needed so far, ascending."""
    winner: float | None = None
    """The value with the smallest validation loss; None while values are missing, or if all diverged."""
    edge: Edge | None = None
    """The end of `tried` at which the winner lies, if any."""
    all_diverged: bool = False
    """Whether every value was tried and none gave a finite loss."""


def choose(values: Sequence[float], extend: int, losses: Mapping[float, float | None]) -> Choice:
    """Return the winner of a selection, or the values that must be tried first.

    Args:
        values: of the study, ascending.
        extend: how many values may be added beyond an edge.
        losses: validation loss of finished runs by value; None or not finite if the training diverged.

    Example:
        >>> choose([1.0, 2.0], 1, {1.0: 3.4, 2.0: 3.2}).tried
        (1.0, 2.0, 4.0)
        >>> choose([1.0, 2.0], 1, {1.0: 3.4, 2.0: 3.2, 4.0: 3.3})
        Choice(tried=(1.0, 2.0, 4.0), winner=2.0, edge=None, all_diverged=False)
    """
    tried = list(values)
    for added in range(extend + 1):
        if any(value not in losses for value in tried):
            break
        finite = {value: loss for value in tried if (loss := losses[value]) is not None and math.isfinite(loss)}
        if not finite:
            return Choice(tuple(tried), all_diverged=True)
        winner = min(finite, key=lambda value: finite[value])
        edge = edge_of(winner, tried)
        if edge is None or added == extend:
            return Choice(tuple(tried), winner, edge)
        tried = [beyond(tried, edge), *tried] if edge == "lower" else [*tried, beyond(tried, edge)]
    return Choice(tuple(tried))


def edge_of(winner: float, tried: Sequence[float]) -> Edge | None:
    """The end of the tried values at which a value lies; None if it is in between."""
    return "lower" if winner == min(tried) else "upper" if winner == max(tried) else None


def beyond(values: Sequence[float], edge: Edge) -> float:
    """The next value beyond an edge, at the ratio of the last two values there.

    Example:
        >>> beyond([1e-3, 2e-3, 4e-3], "upper"), beyond([1e-3, 2e-3, 4e-3], "lower")
        (0.008, 0.0005)
    """
    last, next_to_last = (values[0], values[1]) if edge == "lower" else (values[-1], values[-2])
    found = float(f"{last * last / next_to_last:.{DIGITS}g}")
    # Integer settings stay integers.
    return int(found) if isinstance(last, int) and found.is_integer() else found


def all_beyond(values: Sequence[float], extend: int) -> list[float]:
    """Every value that may ever be tried beyond the edges, ascending, without `values` themselves.

    Example:
        >>> all_beyond([1.0, 2.0], 2)
        [0.25, 0.5, 4.0, 8.0]
    """
    found = list(values)
    for _ in range(extend):
        found = [beyond(found, "lower"), *found, beyond(found, "upper")]
    return [value for value in found if value not in values]
