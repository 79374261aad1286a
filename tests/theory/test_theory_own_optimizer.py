"""The sum of updates of the run's own optimizer: a member of the family next to SGD, Adam and Coupled Adam."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fabricated_theory import fabricate
from theory_models import H, V, milestone_run
from typer.testing import CliRunner

from coupled_adam.cli import app
from coupled_adam.optimizer.reference import reference_init, reference_step
from coupled_adam.study.theory_metrics import theory_metrics
from coupled_adam.theory.measure import theory_of_run
from coupled_adam.theory.record import OPTIMIZERS, UpdateSum, run_from_json
from coupled_adam.theory.story import findings
from coupled_adam.theory.theory_numbers import own_note, sums_table
from coupled_adam.theory.theory_plots import draw_update_sums
from coupled_adam.theory.updates import Member, TableState, update_sum, whole

BETAS, EPS, REAL = (0.9, 0.95), 1e-8, V - 3
PARTIAL = {"row_exponent": 0.25, "mean_free": True}
LABEL = "partially coupled (y = 0.25, mean-free)"
MEMBERS = [
    {"row_exponent": 0.25, "mean_free": True},
    {"row_exponent": 1.0, "mean_free": False},
    {"row_exponent": 1.0, "column_exponent": 0.0, "mean_free": True},
    {"column_exponent": 0.0, "scale_exponent": 2.0, "mean_free": False},
]


def member_of(**settings: Any) -> Member:
    defaults = {"scale_exponent": 0.0, "column_exponent": 1.0, "row_exponent": 0.0, "mean_free": False}
    return Member(**defaults | settings, vocabulary_size=REAL)


def gradients(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(-2, 0, V, dtype=torch.float64)[:, None]
    draw = [scale * torch.randn(2, V, H, generator=generator, dtype=torch.float64) for _ in range(count)]
    return [{"output": each[0], "input": each[1]} for each in draw]


@pytest.mark.parametrize("settings", MEMBERS)
def test_own_update_equals_the_reference_step_at_a_learning_rate_of_one(settings: dict[str, Any]) -> None:
    state = TableState(betas=BETAS, eps=EPS, momentum=0.9, member=member_of(**settings))
    reference = reference_init(torch.zeros(V, H))
    for gradient in gradients(4):
        state.add(gradient)
        before = reference.embeddings
        g = gradient["output"] + gradient["input"]
        reference = reference_step(reference, g, lr=1.0, betas=BETAS, eps=EPS, vocabulary_size=REAL, **settings)
        update = state.update("own")
        assert set(update) == {"output", "input"}
        torch.testing.assert_close(whole(update), (reference.embeddings - before)[:REAL], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("settings", MEMBERS)
def test_the_sum_vanishes_exactly_if_updates_are_mean_free(settings: dict[str, Any]) -> None:
    state = TableState(betas=BETAS, eps=EPS, momentum=0.9, member=member_of(**settings))
    for gradient in gradients(3):
        state.add(gradient)
    found = update_sum("own", state.update("own"), torch.ones(H, dtype=torch.float64))
    assert (found.total < 1e-12) == settings["mean_free"]
    assert found.optimizer == "own"


@pytest.fixture(scope="module")
def partial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return milestone_run(tmp_path_factory.mktemp("partial"), optimizer={"embeddings": "coupled", **PARTIAL})


def test_run_of_the_family_has_its_own_sums_in_table_json_page_and_metrics(partial: Path) -> None:
    pytest.importorskip("matplotlib")
    theory = theory_of_run(partial, batches=2)
    assert (theory.own, theory.member) == ("own", LABEL)
    for checkpoint in theory.checkpoints:
        assert checkpoint.optimizers == (*OPTIMIZERS, "own")
        assert checkpoint.update("own").total < 1e-7
        assert checkpoint.update("coupled").total > 1e-3  # the tied input layer moves it
        assert set(checkpoint.update_series) == {*OPTIMIZERS, "own"}
    assert run_from_json((partial / "theory" / "theory.json").read_text(), "theory.json") == theory
    labels = sums_table(theory).labels
    assert labels.count("own*") == 3
    assert not any(label.endswith("*") for label in labels if label != "own*")
    assert LABEL in own_note(theory)
    assert LABEL in findings(theory)[0]
    metrics = theory_metrics(theory)
    assert metrics["theory_updates_own"] == pytest.approx(0.0, abs=1e-7)
    result = CliRunner().invoke(app, ["theory", str(partial), "--batches", "2", "--json"])
    assert result.exit_code == 0, result.output
    [printed] = json.loads(result.stdout).values()
    assert [each["optimizer"] for each in printed["checkpoints"][0]["updates"]] == [*OPTIMIZERS, "own"]
    assert LABEL in (partial / "theory" / "theory.html").read_text()


def test_annealed_exponent_is_that_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from coupled_adam.theory import checkpoint_measures as checkpoint

    annealed = {"row_exponent": 0.25, "row_exponent_start": 1.0, "anneal": "100%"}
    run = milestone_run(tmp_path, optimizer={"embeddings": "coupled", **annealed})
    seen: list[float] = []
    made = checkpoint.member_of

    def noted(*arguments: Any) -> Member | None:
        member = made(*arguments)
        assert member is not None
        seen.append(member.row_exponent)
        return member

    monkeypatch.setattr(checkpoint, "member_of", noted)
    theory = theory_of_run(run, batches=1)
    total = max(each.step for each in theory.checkpoints)
    assert seen == pytest.approx([1.0 - 0.75 * each.step / total for each in theory.checkpoints])


@pytest.mark.parametrize(
    ("optimizer", "model", "own", "label"),
    [
        ({"embeddings": "adamw"}, {}, "adam", "Adam*"),
        ({"embeddings": "coupled"}, {}, "coupled", "Coupled*"),
        ({"embeddings": "coupled", "scale_exponent": 2.0}, {}, "coupled", "Coupled*"),
        ({"embeddings": "sgd", "sgd_factor": 10.0}, {}, "sgd", "SGD*"),
        ({"embeddings": "coupled", "couple": "input", **PARTIAL}, {"tied": False}, "adam", "Adam*"),
    ],
)
def test_other_runs_have_their_own_column_marked(
    optimizer: dict[str, Any], model: dict[str, Any], own: str, label: str, tmp_path: Path
) -> None:
    theory = theory_of_run(milestone_run(tmp_path, optimizer=optimizer, model=model), batches=1)
    assert (theory.own, theory.member) == (own, "")
    assert theory.checkpoints[0].optimizers == OPTIMIZERS
    labels = sums_table(theory).labels
    assert {each for each in labels if each.endswith("*")} == {label}
    assert theory_metrics(theory)["theory_updates_own"] == theory_metrics(theory)[f"theory_updates_{own}"]


def test_an_untied_input_table_has_the_sum_of_the_member_only_if_it_is_coupled(tmp_path: Path) -> None:
    for couple, expected in (("output", 3), ("all", 4)):
        run = milestone_run(
            tmp_path / couple, optimizer={"embeddings": "coupled", "couple": couple, **PARTIAL}, model={"tied": False}
        )
        theory = theory_of_run(run, batches=1)
        assert theory.own == "own"
        assert len(theory.checkpoints[0].input_updates) == expected
        assert sums_table(theory).labels.count("own*") == 2


def test_files_of_version_0_1_0_have_no_mark_and_are_read(tmp_path: Path) -> None:
    theory = fabricate(tmp_path / "run")
    stored = json.loads(theory.to_json())
    del stored["own"], stored["member"]
    old = run_from_json(json.dumps(stored), "theory.json")
    assert old.own is None
    assert own_note(old) == ""
    assert not any("*" in label for label in sums_table(old).labels)
    assert "theory_updates_own" not in theory_metrics(old)


def test_figure_has_a_line_for_the_runs_own(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plain = fabricate(tmp_path / "plain")
    checkpoints = [
        replace(each, updates=[*each.updates, UpdateSum("own", 1e-12, 1e-12, 0.0, 1, 1, 1, None)])
        for each in plain.checkpoints
    ]
    own = replace(plain, checkpoints=checkpoints, own="own", member=LABEL)
    figure = draw_update_sums({"plain": plain, "own": own})
    assert [len(axes.lines) for axes in figure.axes] == [3, 3, 3, 4, 4, 4]
    assert "the run's own" in {text.get_text() for text in figure.legends[0].get_texts()}
