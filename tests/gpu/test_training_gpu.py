"""Complete runs on a real GPU: bf16, compiled, as CUDA graphs; bitwise equal after resuming if deterministic = true."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
from small_runs import assert_same_tensors, rows, saved_tensors, small_config, train, write_corpus
from test_training_run import stop_at

pytestmark = pytest.mark.gpu

MODEL = {"width": 64, "context": 64}
STEPS = 12


def gpu_config(corpus: Path, **sections: dict[str, Any]) -> Any:
    training = {"device": "cuda", "tokens": STEPS * 8 * 64, **sections.pop("training", {})}
    return small_config(corpus, model={**MODEL, **sections.pop("model", {})}, training=training, **sections)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


OPTIMIZERS: list[dict[str, Any]] = [
    {"embeddings": "coupled"},
    {"embeddings": "adamw", "centre": True},
    {"embeddings": "sgd", "sgd_factor": 20.0},
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer["embeddings"])
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_a_resumed_deterministic_run_is_bitwise_equal(
    optimizer: dict[str, Any], compile: bool, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = gpu_config(corpus, optimizer=optimizer, training={"deterministic": True, "compile": compile})
    train(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_at(6, patch)
        train(config, tmp_path / "parts")
    train(config, tmp_path / "parts", resume=True)
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    assert_same_tensors(saved_tensors(tmp_path / "parts"), saved_tensors(tmp_path / "whole"))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer["embeddings"])
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_the_fast_path_follows_the_curve_of_the_cpu(
    optimizer: dict[str, Any], architecture: str, corpus: Path, tmp_path: Path
) -> None:
    model = {"architecture": architecture}
    train(gpu_config(corpus, optimizer=optimizer, model=model), tmp_path / "gpu")
    train(gpu_config(corpus, optimizer=optimizer, model=model, training={"device": "cpu"}), tmp_path / "cpu")
    for ours, expected in zip(rows(tmp_path / "gpu"), rows(tmp_path / "cpu"), strict=True):
        if ours["kind"] in ("train", "val"):
            assert ours["loss"] == pytest.approx(expected["loss"], abs=0.03)  # bf16 against float32


def test_float32_on_the_gpu_follows_the_cpu_closely(corpus: Path, tmp_path: Path) -> None:
    settings = {"precision": "float32", "deterministic": True}
    train(gpu_config(corpus, training=settings), tmp_path / "gpu")
    train(gpu_config(corpus, training={**settings, "device": "cpu"}), tmp_path / "cpu")
    for ours, expected in zip(rows(tmp_path / "gpu"), rows(tmp_path / "cpu"), strict=True):
        if ours["kind"] in ("train", "val"):
            assert ours["loss"] == pytest.approx(expected["loss"], abs=2e-3)  # TF32 products


def test_accumulation_and_graphs_agree_with_the_plain_step(corpus: Path, tmp_path: Path) -> None:
    for name, settings in {
        "graphs": {"cuda_graphs": True},
        "plain": {"cuda_graphs": False},
        "accumulated": {"cuda_graphs": True, "micro_batch_size": 2},
    }.items():
        train(gpu_config(corpus, training={"compile": False, "deterministic": True, **settings}), tmp_path / name)
    assert rows(tmp_path / "graphs") == rows(tmp_path / "plain")
    for ours, expected in zip(rows(tmp_path / "accumulated"), rows(tmp_path / "plain"), strict=True):
        if ours["kind"] == "train":
            assert ours["loss"] == pytest.approx(expected["loss"], abs=0.02)


def test_a_run_can_move_between_gpu_and_cpu(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        stop_at(6, patch)
        train(gpu_config(corpus), tmp_path / "run")
    outcome, _ = train(gpu_config(corpus, training={"device": "cpu"}), tmp_path / "run", resume=True)
    assert outcome.is_finished
