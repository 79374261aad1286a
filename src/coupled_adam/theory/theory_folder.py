"""`RUN/theory/`: measurements of a run's checkpoints, stored one by one so that a stopped measurement can be resumed.

    theory.json             a `RunTheory`: everything except arrays
    unigram.npz             `counts` (tokens,) int64: token counts of the training split
    step-000000300.npz      the arrays of a checkpoint, `TokenArrays`
    step-000000300.json     its numbers, a `CheckpointTheory`, and their origin; written last

Letters: V rows of the output table, padding included, H width.
"""

import json
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import read_json, read_text, replacing, require_regular_file, write_whole
from coupled_adam.theory.record import (
    CheckpointTheory,
    RunTheory,
    checkpoint_from_json,
    checkpoint_to_json,
    run_from_json,
)

Floats = npt.NDArray[np.float32]
Counts = npt.NDArray[np.int64]
DAMAGED = (ValueError, KeyError, TypeError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error)
"""Errors of numpy and zipfile on a damaged file of arrays."""
Origin = Mapping[str, str | int | None]
"""Inputs of a measurement: if all keys are equal, it need not be repeated. None if no longer known."""


@dataclass(frozen=True, eq=False)
class TokenArrays:
    """Measurements of every token at one checkpoint."""

    target_counts: Counts  # (V,): count of i as target in the batches
    x_true: Floats  # (V,): X_i^(i=t); NaN for tokens that were never the target
    x_false: Floats  # (V,): X_i^(i!=t)
    second_moment: Floats  # (V,): mean over H of the bias-corrected v_i
    squared_gradient: Floats  # (V,): mean over H of E[g_i^2], of the loss of single tokens
    squared_gradient_predicted: Floats  # (V,): mean over H of the Theorem's right-hand side
    hidden_square: Floats  # (H,): S = E[h^2]


class TheoryFolder:
    """Reads and writes the theory files of one run."""

    def __init__(self, run: Path) -> None:
        self.path = run / "theory"
        self.theory = self.path / "theory.json"
        self.unigram = self.path / "unigram.npz"
        self.figures = self.path / "figures"

    def write_run(self, theory: RunTheory) -> None:
        """Write theory.json."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_whole(self.theory, theory.to_json())

    def read_run(self) -> RunTheory:
        """Read theory.json."""
        try:
            text = read_text(self.theory)
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self.theory}: cannot be read ({error}); write it with `coupled-adam theory {self.path.parent}`"
            ) from None
        return run_from_json(text, str(self.theory))

    def write_unigram(self, counts: Counts) -> None:
        """Write the token counts of the training split."""
        self._write_arrays(self.unigram, {"counts": counts})

    def read_unigram(self) -> Counts:
        """The token counts of the training split, (tokens,)."""
        return _read_arrays(self.unigram, ["counts"])["counts"].astype(np.int64)

    def write_checkpoint(self, numbers: CheckpointTheory, arrays: TokenArrays, origin: Origin) -> None:
        """Write both files of a checkpoint."""
        stem = self._stem(numbers.step)
        # Arrays first, so that numbers never exist without them; remove old numbers, which would not match new arrays.
        stem.with_suffix(".json").unlink(missing_ok=True)
        self._write_arrays(stem.with_suffix(".npz"), vars(arrays))
        self.write_numbers(numbers, origin)

    def write_numbers(self, numbers: CheckpointTheory, origin: Origin) -> None:
        """Write only the numbers of a checkpoint."""
        content = {"of": dict(origin), "numbers": json.loads(checkpoint_to_json(numbers))}
        write_whole(self._stem(numbers.step).with_suffix(".json"), json.dumps(content, indent=1) + "\n")

    def read_numbers(self, step: int, origin: Origin) -> CheckpointTheory | None:
        """Read the numbers of a checkpoint; None if they are missing, damaged, or have another origin.

        Args:
            step: of the checkpoint.
            origin: the expected origin; None values are not compared.
        """
        path = self._stem(step).with_suffix(".json")
        try:
            content = read_json(path)
            stored = dict(content["of"])
            if any(value is not None and stored.get(key) != value for key, value in origin.items()):
                return None
            return checkpoint_from_json(json.dumps(content["numbers"]), str(path))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def read_origin(self, step: int) -> dict[str, Any]:
        """Read the origin of a checkpoint's numbers; empty if unreadable."""
        try:
            return dict(read_json(self._stem(step).with_suffix(".json"))["of"])
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def origins(self) -> dict[int, dict[str, Any]]:
        """Origins of all measurements, by step."""
        steps = [int(path.stem.removeprefix("step-")) for path in self.path.glob("step-*.json") if _is_step(path)]
        return {step: self.read_origin(step) for step in sorted(steps)}

    def read_arrays(self, step: int) -> TokenArrays:
        """Read the arrays of a checkpoint."""
        names = [field.name for field in fields(TokenArrays)]
        return TokenArrays(**_read_arrays(self._stem(step).with_suffix(".npz"), names))

    def _stem(self, step: int) -> Path:
        return self.path / f"step-{step:09d}"

    def _write_arrays(self, path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def _is_step(path: Path) -> bool:
    return path.stem.removeprefix("step-").isdecimal()


def _read_arrays(path: Path, names: list[str]) -> dict[str, npt.NDArray[Any]]:
    try:
        require_regular_file(path)
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in names}
    except (OSError, *DAMAGED) as error:
        reason = getattr(error, "strerror", None) or "it is damaged"
        raise UserError(
            f"{path}: cannot be read ({reason}); measure it again with `coupled-adam theory RUN --fresh`"
        ) from None
