"""The embedding metrics during training: equal to `measure`, on the device, with little memory, and on several ranks.

Legend: V vocabulary rows, H hidden size.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from coupled_adam.embeddings import WordPairs, measure
from coupled_adam.training import embedding_monitor
from coupled_adam.training.embedding_monitor import full_measures, light_measures

V, H = 1000, 24


def table_of(shift: float, dtype: torch.dtype = torch.float32) -> Tensor:
    rows = torch.randn(V, H, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (rows - rows.mean(0) + shift).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shift", [0.0, 1e-4, 1.0, 100.0])
@pytest.mark.parametrize("block_bytes", [1, 7 * 8 * H, 2**24])
def test_the_light_measures_equal_those_of_measure(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shift: float, block_bytes: int
) -> None:
    monkeypatch.setattr(embedding_monitor, "BLOCK_BYTES", block_bytes)
    table = table_of(shift, dtype)
    results = light_measures({"output": table}, V)
    rows = table.double().numpy()
    mu_norm, mean_norm = np.linalg.norm(rows.mean(0)), np.linalg.norm(rows, axis=1).mean()
    metrics = measure(table)
    # The mean of a centred float64 table is 1e-16, which is rounding error.
    for expected in (mu_norm / mean_norm, metrics.mu_norm_ratio):
        assert results["mu_norm_ratio"].item() == pytest.approx(expected, rel=1e-9, abs=1e-15)
    for expected in (mu_norm, metrics.mu_norm):
        assert results["mu_norm"].item() == pytest.approx(expected, rel=1e-9, abs=1e-14)


def test_padding_is_left_out() -> None:
    table = table_of(1.0)
    padded = torch.cat([table, torch.full((24, H), float("nan"))])
    assert light_measures({"output": padded}, V) == light_measures({"output": table}, V)
    assert full_measures({"output": padded}, V) == full_measures({"output": table}, V)


def test_untied_tables_are_measured_separately() -> None:
    tables = {"input": table_of(0.1), "output": table_of(1.0).bfloat16()}
    results = light_measures(tables, V)
    assert list(results) == ["input_mu_norm", "input_mu_norm_ratio", "mu_norm", "mu_norm_ratio"]
    for prefix, table in (("input_", tables["input"]), ("", tables["output"])):
        assert results[f"{prefix}mu_norm_ratio"].item() == pytest.approx(measure(table).mu_norm_ratio, rel=1e-9)


def test_a_table_of_zeros_or_with_a_nan_has_no_ratio_and_raises_nothing() -> None:
    broken = table_of(1.0)
    broken[3, 5] = float("nan")
    for table in (torch.zeros(V, H), broken):
        assert light_measures({"output": table}, V)["mu_norm_ratio"].isnan()


def test_a_parameter_needs_no_gradient_here_and_is_not_changed() -> None:
    parameter = torch.nn.Parameter(table_of(1.0))
    before = parameter.detach().clone()
    assert not light_measures({"output": parameter}, V)["mu_norm"].requires_grad
    full_measures({"output": parameter}, V)
    assert torch.equal(parameter, before)


class Watch(TorchDispatchMode):
    """Records which operations run, and the largest tensor that they create."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: set[str] = set()
        self.largest = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        self.operations.add(operation.name())
        if isinstance(result, Tensor) and not operation.is_view:
            self.largest = max(self.largest, result.numel() * result.itemsize)
        return result


def test_the_light_measures_never_wait_for_the_device() -> None:
    tables = {"input": table_of(1.0), "output": table_of(0.0)}
    with Watch() as watch:
        light_measures(tables, V - 24)
    assert "aten::linalg_vector_norm" in watch.operations
    # The operations behind .item(), float(), bool() and indexing with a mask.
    assert not watch.operations & {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"}


def test_the_light_measures_create_no_tensor_larger_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_monitor, "BLOCK_BYTES", 100 * 8 * H)
    for dtype in (torch.bfloat16, torch.float32):
        table = table_of(1.0, dtype)
        with Watch() as watch:
            light_measures({"output": table}, V)
        assert 0 < watch.largest <= 100 * 8 * H


@pytest.mark.parametrize("vocabulary_size", [0, V + 1])
def test_a_vocabulary_that_does_not_fit_is_refused(vocabulary_size: int) -> None:
    with pytest.raises(ValueError, match=rf"^output table: .*vocabulary_size .*\b{vocabulary_size}\b.* {V}$"):
        light_measures({"output": table_of(1.0)}, vocabulary_size)


class LetterTokens:
    """The word "a" is token 0, "b" is token 1, and so on; "z" is not a token."""

    def token_id(self, word: str) -> int | None:
        return None if word == "z" else ord(word) - ord("a")

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError


def test_the_full_measures_equal_those_of_measure() -> None:
    table = table_of(0.5)
    counts = np.arange(1, V + 1)
    pairs = WordPairs("SimLex-999", (("a", "b"), ("c", "d"), ("e", "f"), ("g", "z")), (1.0, 5.0, 2.0, 9.0))
    options: Any = {"unigram": counts, "tokenizer": LetterTokens(), "word_pairs": {"SimLex-999": pairs}}
    numbers = full_measures({"output": table}, V, **options)
    metrics = measure(table, **options)
    for name in ("iso", "mu_norm", "mu_norm_ratio", "kappa", "rho", "rho_log", "r_cos", "iso_score", "mean_cosine"):
        assert numbers[name] == getattr(metrics, name)
    assert numbers["simlex_999_pearson"] == metrics.word_similarity["SimLex-999"].pearson
    assert numbers["simlex_999_pairs_used"] == 3
    assert all(value is None or type(value) in (int, float) for value in numbers.values()), numbers
    json.dumps(numbers, allow_nan=False)


def test_sharded_tables_are_measured_as_a_whole_on_two_ranks(tmp_path: Path) -> None:
    script = Path(__file__).with_name("monitor_on_ranks.py")
    result = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "store")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-4000:]
