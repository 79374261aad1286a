"""The model card's text about the optimizer of the blocks' matrices."""

from coupled_adam.config.run_config import load_config
from coupled_adam.evaluation.model_card import Training, model_card


def lines_with(word: str, *settings: str) -> list[str]:
    config = load_config("tiny", list(settings))
    card = model_card(config.to_model_config(), Training(config, 1), None)
    return [line for line in card.splitlines() if word in line]


def test_the_card_names_muon_and_its_settings_if_it_trained_the_matrices() -> None:
    assert lines_with("Muon") == []
    [line] = lines_with("Muon", "optimizer.matrices=muon", "optimizer.muon.lr_factor=2", "optimizer.muon.momentum=0.9")
    for part in ("2", "momentum 0.9", "match_rms_adamw", "weight decay 0.1"):
        assert part in line
    [line] = lines_with("Muon", "optimizer.matrices=muon", "optimizer.muon.weight_decay=0.0")
    assert line.endswith("weight decay 0")
