"""The loss with rounded vocabulary tables, compared with a model built with them; the tables are restored."""

from pathlib import Path

import numpy as np
import pytest
import torch

from coupled_adam.data.tokens import Tokens
from coupled_adam.evaluation.held_out_loss import loss_over
from coupled_adam.evaluation.quantised_loss import quantised_losses, rounded_tables
from coupled_adam.models.language_model import LanguageModel
from coupled_adam.models.model_config import ModelConfig, build_model

VOCABULARY, WIDTH = 60, 40
LARGEST = {"int8": 127, "int4": 7}
COLUMNS = {"row": WIDTH, "group": 32}


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    path = tmp_path / "test.bin"
    np.random.default_rng(0).integers(0, VOCABULARY, 200).astype("<u2").tofile(path)
    return Tokens([path], "uint16", VOCABULARY, "test")


def small_model(tied: bool) -> LanguageModel:
    torch.manual_seed(1)
    model = build_model(ModelConfig("gpt2", 1, 2, WIDTH, 16, VOCABULARY, tied=tied))
    with torch.no_grad():
        for name in {model.input_table_name, model.output_table_name}:
            model.get_parameter(name).mul_(20)
    return model


def literally_rounded(table: torch.Tensor, integers: str, columns: int) -> torch.Tensor:
    """Round row by row, group by group, number by number."""
    rounded = table.clone()
    for row in range(table.shape[0]):
        for first in range(0, table.shape[1], columns):
            group = table[row, first : first + columns]
            scale = max(abs(float(value)) for value in group) / LARGEST[integers]
            rounded[row, first : first + columns] = torch.tensor(
                [round(float(value) / scale) * scale for value in group]
            )
    return rounded


@pytest.mark.parametrize("tied", [True, False])
def test_losses_match_a_model_with_rounded_tables(tied: bool, tokens: Tokens) -> None:
    model = small_model(tied)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = quantised_losses(model, tokens)
    assert found.keys() == {f"loss_{integers}_{scale}" for integers in LARGEST for scale in COLUMNS}
    for integers in LARGEST:
        for scale, columns in COLUMNS.items():
            other = small_model(tied)
            with torch.no_grad():
                for name in {other.input_table_name, other.output_table_name}:
                    table = other.get_parameter(name)
                    table.copy_(literally_rounded(table, integers, columns))
            assert found[f"loss_{integers}_{scale}"] == pytest.approx(loss_over(other, tokens).loss, abs=1e-5)
    exact = loss_over(model, tokens).loss
    differences = {key: abs(loss - exact) for key, loss in found.items() if loss is not None}
    assert 0 < differences["loss_int8_row"] < differences["loss_int4_row"]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_tables_are_restored_after_an_error() -> None:
    model = small_model(True)
    before = model.get_parameter(model.output_table_name).detach().clone()

    def interrupted() -> None:
        with rounded_tables(model, "int4", None):
            assert not torch.equal(model.get_parameter(model.output_table_name), before)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert torch.equal(model.get_parameter(model.output_table_name), before)
