"""Runs whose loss has a penalty on the mean embedding, or whose logits are capped."""

from pathlib import Path

import pytest
import torch
from small_runs import rows, small_config, train

from coupled_adam.base.errors import UserError
from coupled_adam.evaluation.run_export import export_run
from coupled_adam.evaluation.weights import load_run
from coupled_adam.models.initial import initialise
from coupled_adam.models.model_config import build_model
from coupled_adam.theory.measure import theory_of_run


def first_loss(folder: Path) -> float:
    return next(row["loss"] for row in rows(folder) if row["kind"] == "train" and row["step"] == 1)


def last(folder: Path, kind: str, key: str) -> float:
    return [row[key] for row in rows(folder) if row["kind"] == kind][-1]


def test_mu_loss_is_part_of_the_training_loss_and_pulls_the_mean_to_the_origin(corpus: Path, tmp_path: Path) -> None:
    log = {"every": 1, "monitor_every": 1}
    without = small_config(corpus, optimizer={"embeddings": "adamw"}, log=log)
    config = small_config(corpus, optimizer={"embeddings": "adamw", "mu_loss": 100.0}, log=log)
    train(without, tmp_path / "without")
    train(config, tmp_path / "with")
    model = build_model(config.to_model_config())
    initialise(model, config.seed)
    _, _, known = load_run(tmp_path / "with")
    assert known is not None
    table = model.get_parameter(model.output_table_name).detach()[: known.vocabulary_size].double()
    expected = 100.0 * float((table.sum(0) / len(table)).square().sum())
    assert first_loss(tmp_path / "with") - first_loss(tmp_path / "without") == pytest.approx(expected, rel=1e-3)
    lengths = [last(tmp_path / name, "embeddings", "mu_norm") for name in ("with", "without")]
    assert lengths[0] < 0.5 * lengths[1]
    # The validation loss is the cross-entropy alone.
    assert last(tmp_path / "with", "val", "loss") == pytest.approx(last(tmp_path / "without", "val", "loss"), abs=0.3)


def test_a_capped_run_keeps_its_cap_and_cannot_be_exported(corpus: Path, tmp_path: Path) -> None:
    train(small_config(corpus, model={"logit_cap": 0.1}), tmp_path / "run")
    model, config, _ = load_run(tmp_path / "run")
    assert config.model.logit_cap == 0.1
    with torch.no_grad():
        assert model(torch.arange(16)[None]).abs().max() <= 0.1
    with pytest.raises(UserError, match=r"model\.logit_cap"):
        export_run(tmp_path / "run", tmp_path / "hf", on_skip=lambda _: None)


@pytest.mark.parametrize("sections", [{"model": {"logit_cap": 30.0}}, {"optimizer": {"mu_loss": 0.1}}])
def test_the_theory_refuses_a_loss_that_it_does_not_cover(
    corpus: Path, tmp_path: Path, sections: dict[str, dict[str, float]]
) -> None:
    checkpoints = {"every": None, "milestones": 2, "keep": 1}
    train(small_config(corpus, checkpoints=checkpoints, **sections), tmp_path / "run")
    ((section, values),) = sections.items()
    with pytest.raises(UserError, match=rf"{section}\.{next(iter(values))}"):
        theory_of_run(tmp_path / "run", batches=1)
