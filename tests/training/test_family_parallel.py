"""Members of the family of second moments on two ranks, with DDP and FSDP2: real processes with gloo."""

from pathlib import Path

import pytest
import torch
from family_worker import MODES, OPTIMIZERS
from small_runs import VOCABULARY, assert_same_tensors, rows, run_on_two_ranks, saved_tensors, small_config, train

WORKER = Path(__file__).with_name("family_worker.py")

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_on_two_ranks(WORKER, corpus, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_ranks_give_the_curve_and_the_state_of_one(
    mode: str, name: str, runs: Path, corpus: Path, tmp_path: Path
) -> None:
    train(small_config(corpus, optimizer=OPTIMIZERS[name]), tmp_path / "one")
    ours, theirs = rows(runs / f"{mode}-{name}"), rows(tmp_path / "one")
    assert [(row["kind"], row["step"]) for row in ours] == [(row["kind"], row["step"]) for row in theirs]
    for row, expected in zip(ours, theirs, strict=True):
        if row["kind"] == "train":
            assert row["loss"] == pytest.approx(expected["loss"], rel=2e-5), row["step"]
            assert row.get("row_exponent") == expected.get("row_exponent")
    expected_tensors = saved_tensors(tmp_path / "one")
    found = saved_tensors(runs / f"{mode}-{name}")
    assert found.keys() == expected_tensors.keys()
    row_moments = [key for key in found if key.endswith("row_avg_sq")]
    assert len(row_moments) == 1
    for key in [*row_moments, *(key for key in found if key.startswith("model."))]:
        torch.testing.assert_close(found[key], expected_tensors[key], rtol=1e-3, atol=2e-5, msg=key)


@pytest.mark.parametrize("mode", MODES)
def test_a_run_stopped_during_annealing_resumes_bitwise_equally(mode: str, runs: Path) -> None:
    assert rows(runs / f"{mode}-resumed") == rows(runs / f"{mode}-annealed")
    assert_same_tensors(saved_tensors(runs / f"{mode}-resumed"), saved_tensors(runs / f"{mode}-annealed"))


def test_the_mean_of_a_sharded_table_does_not_move(runs: Path) -> None:
    before, after = (
        saved_tensors(runs / "fsdp2-partial", step)["model.wte.weight"][:VOCABULARY].double().mean(dim=0)
        for step in (8, 12)
    )
    assert (after - before).abs().max() < 1e-7


def test_a_sharded_checkpoint_without_row_moments_resumes_with_a_row_exponent(runs: Path) -> None:
    assert not any(key.endswith("row_avg_sq") for key in saved_tensors(runs / "fsdp2-switched", 4))
    found = saved_tensors(runs / "fsdp2-switched", 12)
    rows_of_table, columns = found["optimizer.wte.weight.row_avg_sq"], found["optimizer.wte.weight.exp_avg_sq"]
    # Row and column moments of the real rows start with the same mean and keep it.
    torch.testing.assert_close(rows_of_table[:VOCABULARY].mean(), columns.mean(), rtol=2e-2, atol=0)
    assert rows_of_table.std() > 0
