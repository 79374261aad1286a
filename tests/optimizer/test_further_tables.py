"""Further tables: an encoder with its own vocabulary, and heads whose weights are computed."""

import pytest
import torch
from torch import nn

from coupled_adam.optimizer.groups import param_groups

V, H = 40, 8


class TwoVocabularies(nn.Module):
    """An encoder with its own vocabulary; the decoder's embedding is tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(V + 10, H)
        self.decoder = nn.Embedding(V, H)
        self.lm_head = nn.Linear(H, V, bias=False)
        self.lm_head.weight = self.decoder.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


class TwoHeads(nn.Module):
    """A tied head, and one whose weight is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(V, H)
        self.lm_head = nn.Linear(H, V, bias=False)
        self.lm_head.weight = self.wte.weight
        self.second_head = torch.nn.utils.parametrizations.weight_norm(nn.Linear(H, V, bias=False))


def test_a_head_tied_to_the_decoder_is_tied_even_if_the_input_table_is_the_encoders() -> None:
    model = TwoVocabularies()
    for couple, coupled in (("output", {"decoder"}), ("input", {"encoder", "decoder"})):
        groups = param_groups(model, couple=couple)
        roles = {table.name.partition(".")[0]: table.role for table in groups.tables}
        assert roles == {"decoder": "tied", "encoder": "input"}
        names = {name.partition(".")[0] for group in groups if group.get("coupled") for name, _ in group["params"]}
        assert names == coupled


def test_a_computed_head_next_to_a_tied_one_is_never_silently_left_to_adamw() -> None:
    model = TwoHeads()
    with pytest.raises(ValueError, match=r"couple='output'.*'second_head' \(40, 8\)"):
        param_groups(model)
    assert [table.name for table in param_groups(model, couple="none").computed] == ["second_head"]
