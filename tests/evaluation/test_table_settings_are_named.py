"""The model card names the learning rate, betas and eps of a table that differ from those of the other weights."""

import pytest

from coupled_adam.config.run_config import load_config
from coupled_adam.evaluation.model_card import Training, model_card


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], []),
        (["optimizer.tables.lr_factor=3"], ["tied table: learning rate times 3"]),
        (
            ["model.tied=false", "optimizer.tables.eps=1e-6", "optimizer.input_table.beta2=0.99"],
            ["output table: eps 1e-6", "input table: beta2 0.99"],
        ),
    ],
)
def test_the_card_names_the_settings_of_a_table(settings: list[str], expected: list[str]) -> None:
    config = load_config("tiny", settings)
    assert config.optimizer.table_facts(tied=config.model.tied) == expected
    card = model_card(config.to_model_config(), Training(config, 1), None).splitlines()
    assert [line for line in card if " table: " in line] == [f"- {fact}" for fact in expected]
