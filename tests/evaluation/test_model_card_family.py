"""The model card of a run with a member of the family of second moments."""

from typing import Any

import pytest

from coupled_adam.config.run_config import load_config
from coupled_adam.evaluation.model_card import Training, model_card


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"row_exponent": 0.25, "mean_free": "true"}, "partially coupled (y = 0.25, mean-free)"),
        ({"row_exponent": 1.0, "scale_exponent": 2.0}, "factored"),
        ({"row_exponent": 0.25, "row_exponent_start": 1.0, "anneal": 10}, "partially coupled (y = 1 to 0.25)"),
        ({"scale_exponent": 2.0}, "Coupled Adam: one second moment"),
    ],
)
def test_card_names_the_member_that_trained_the_embeddings(settings: dict[str, Any], expected: str) -> None:
    config = load_config("tiny", [f"optimizer.{key}={value}" for key, value in settings.items()])
    card = model_card(config.to_model_config(), Training(config, 1), None)
    [line] = [line for line in card.splitlines() if "embeddings: " in line]
    assert expected in line
    assert ("scale exponent 2" in line) == ("scale_exponent" in settings)
