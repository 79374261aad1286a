"""Runs with an output bias: scored with it, and refused by `export`."""

import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
from small_runs import small_config, train, write_corpus

from coupled_adam.commands.export import export
from coupled_adam.evaluation.downstream.requests_file import TokenRequest
from coupled_adam.evaluation.downstream.scoring import score_requests
from coupled_adam.evaluation.export import export_model
from coupled_adam.evaluation.weights import load_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("biased")
    train(small_config(write_corpus(folder / "corpus"), model={"output_bias": "unigram"}), folder / "run")
    return folder / "run"


def test_requests_are_scored_with_the_bias(run: Path) -> None:
    model, _, _ = load_run(run)
    requests = [TokenRequest(context=(3, 1), continuation=(4, 1, 7)), TokenRequest(context=(9,), continuation=(2,))]
    for request, score in zip(requests, score_requests(model, requests), strict=True):
        tokens = torch.tensor([*request.context, *request.continuation])
        with torch.no_grad():
            log_p = torch.log_softmax(model(tokens[None, :-1])[0].double(), dim=-1)
        positions = range(len(request.context) - 1, len(tokens) - 1)
        expected = sum(float(log_p[position, tokens[position + 1]]) for position in positions)
        assert score.log_likelihood == pytest.approx(expected, abs=1e-5)
        assert score.is_greedy == all(int(log_p[at].argmax()) == int(tokens[at + 1]) for at in positions)


def test_export_refuses_the_run_and_writes_nothing(run: Path, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(export)
    result = CliRunner().invoke(app, [str(run), str(tmp_path / "model")])
    assert result.exit_code == 2
    assert "model.output_bias" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "model").exists()


def test_export_refuses_the_model(run: Path, tmp_path: Path) -> None:
    model, _, _ = load_run(run)
    with pytest.raises(ValueError, match=r"model\.output_bias"):
        export_model(model.config, dict(model.named_parameters()), None, tmp_path / "model")
    assert not (tmp_path / "model").exists()
