"""The recorded step with members of the family of second moments, including an annealed row exponent."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
from small_runs import rows, small_config, train, write_corpus
from test_train_step_gpu import AUTOCAST, assert_same, batch, lr_of, small_model, split, states

from coupled_adam.config.run_sections import OptimizerSection
from coupled_adam.models.language_model import LanguageModel
from coupled_adam.training.optimizers import EmbeddingOptimizers, build_optimizers
from coupled_adam.training.train_step import TrainStep

pytestmark = pytest.mark.gpu
REAL = 509
MEMBERS = {
    "partial": {"row_exponent": 0.25, "mean_free": True},
    "annealed": {"row_exponent": 0.25, "row_exponent_start": 1.0, "anneal": 4, "mean_free": True},
    "from-zero": {"row_exponent": 0.5, "row_exponent_start": 0.0, "anneal": 4},
    "per-row": {"row_exponent": 1.0, "column_exponent": 0.0},
}


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def optimizers_of(model: LanguageModel, member: dict[str, Any], *, capturable: bool = True) -> EmbeddingOptimizers:
    section = OptimizerSection.model_validate({"lr": 1e-3, "max_grad_norm": 0.5, **member})
    return build_optimizers(model, section, capturable=capturable, vocabulary_size=REAL)


def exponent_of(member: dict[str, Any], step: int) -> float | None:
    start, end = member.get("row_exponent_start"), member["row_exponent"]
    return None if start is None else start + (end - start) * min(step, 4) / 4


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("name", MEMBERS)
def test_recorded_step_is_bitwise_equal_to_the_plain_one_while_the_exponent_changes(name: str, parts: int) -> None:
    member = MEMBERS[name]
    plain, recorded = small_model(), small_model()
    plain_optimizers, recorded_optimizers = (optimizers_of(model, member) for model in (plain, recorded))
    plain_step = TrainStep(plain, plain_optimizers, precision=AUTOCAST)
    recorded_step = TrainStep(recorded, recorded_optimizers, precision=AUTOCAST, cuda_graphs=True)
    for step in range(6):
        micro_batches = split(batch(step), parts)
        for take in (plain_step, recorded_step):
            take(micro_batches, lr_of(step), exponent_of(member, step))
        assert_same(recorded, recorded_optimizers, plain, plain_optimizers)
    assert any(value.shape == (512, 1) for value in states(recorded_optimizers))


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_step_with_an_annealed_exponent_does_not_wait_for_the_device(cuda_graphs: bool) -> None:
    model = small_model()
    optimizers = optimizers_of(model, MEMBERS["annealed"], capturable=cuda_graphs)
    step = TrainStep(model, optimizers, precision=AUTOCAST, cuda_graphs=cuda_graphs)
    batches = [[batch(number)] for number in range(4)]
    step(batches[0], 1e-3, 1.0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(1, 4):
            step(batches[number], 1e-3, 1.0 - 0.2 * number)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", MEMBERS)
def test_run_with_graphs_has_the_same_curve_as_one_without(name: str, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    losses = {}
    for graphs in (False, True):
        training = {"device": "cuda", "cuda_graphs": graphs, "precision": "float32", "compile": False}
        train(small_config(corpus, training=training, optimizer=MEMBERS[name]), tmp_path / f"graphs-{graphs}")
        losses[graphs] = [row["loss"] for row in rows(tmp_path / f"graphs-{graphs}") if row["kind"] == "train"]
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)
