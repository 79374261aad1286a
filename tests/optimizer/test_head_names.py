"""Which Linears are heads by name, place and size, one condition at a time; and the advice if there is none."""

import pytest
from group_models import Parts, coupled_names, names
from torch import nn

from coupled_adam.optimizer.groups import param_groups
from coupled_adam.optimizer.inventory import Inventory

V, H = 100, 16


def linear(outputs: int, inputs: int = H) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


@pytest.mark.parametrize("name", ["lm_head", "embed_out", "unembed", "unembedding", "output_projection"])
@pytest.mark.parametrize("outputs", [2, V, 7 * V])
@pytest.mark.parametrize("place", ["outside", "in a layer"])
def test_a_name_that_only_heads_have_makes_a_head_of_any_size_and_place(name: str, outputs: int, place: str) -> None:
    head = Parts(**{name: linear(outputs)})
    model = Parts(tokens=nn.Embedding(V, H), layers=nn.ModuleList([head])) if place == "in a layer" else head
    model.tokens = nn.Embedding(V, H)
    assert [path.rpartition(".")[2] for path in Inventory(model).called_heads().values()] == [name]


@pytest.mark.parametrize("name", ["output", "output_layer", "head", "to_logits", "decoder", "proj_out"])
@pytest.mark.parametrize(
    ("outputs", "place", "is_head"),
    [
        (V, "outside", True),
        (V // 2, "outside", True),
        (V // 2 - 1, "outside", False),
        (7 * V, "outside", True),
        (V, "in a layer", False),
    ],
)
def test_a_name_shared_with_layers_makes_a_head_only_outside_the_layers_and_near_the_size_of_the_table(
    name: str, outputs: int, place: str, is_head: bool
) -> None:
    part = Parts(**{name: linear(outputs)})
    model = Parts(tokens=nn.Embedding(V, H), layers=nn.ModuleList([part])) if place == "in a layer" else part
    model.tokens = nn.Embedding(V, H)
    assert bool(Inventory(model).called_heads()) == is_head


def test_a_linear_with_another_name_is_not_called_a_head() -> None:
    assert Inventory(Parts(tokens=nn.Embedding(V, H), predict=linear(V))).called_heads() == {}


@pytest.mark.parametrize("outputs", [2, 7 * V])
def test_a_head_found_by_its_name_is_never_decayed_or_silently_left_to_adamw(outputs: int) -> None:
    model = Parts(tokens=nn.Embedding(V, H), fc=linear(40), lm_head=linear(outputs))
    with pytest.raises(ValueError, match=rf"'lm_head.weight' \({outputs}, {H}\)"):
        param_groups(model)
    assert names(param_groups(model, couple=["tokens.weight"]))["decay"] == ["fc.weight"]


class Tied(nn.Module):
    """A tied head with V = H, and further parts."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        self.tokens = nn.Embedding(H, H)
        self.lm_head = linear(H)
        self.lm_head.weight = self.tokens.weight
        for name, part in parts.items():
            setattr(self, name, part)


def test_next_to_a_square_tied_table_a_square_linear_is_not_a_head() -> None:
    groups = param_groups(Tied(pooler=linear(H)))
    assert coupled_names(groups) == ["tokens.weight"]
    assert names(groups)["decay"] == ["pooler.weight"]


@pytest.mark.parametrize("place", ["outside", "in a layer"])
def test_a_square_linear_called_a_head_is_one(place: str) -> None:
    part = linear(H) if place == "outside" else nn.ModuleList([Parts(proj=linear(H))])
    groups = param_groups(Tied(mtp_head=part))
    assert len(coupled_names(groups)) == 2
    assert "decay" not in names(groups)


def test_a_linear_that_is_not_square_is_a_further_head_only_outside_the_layers() -> None:
    groups = param_groups(Tied(second=linear(H, 8), layers=nn.ModuleList([Parts(fc=linear(H, 8))])))
    assert coupled_names(groups) == ["tokens.weight", "second.weight"]
    assert names(groups)["decay"] == ["layers.0.fc.weight"]


class Bert(nn.Module):
    """Hugging Face's accessor for the input, no head, and V = H."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        self.words = nn.Embedding(H, H)
        for name, part in parts.items():
            setattr(self, name, part)

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def get_output_embeddings(self) -> None:
        return None


def advice(model: nn.Module) -> str | None:
    """The example pattern in the message about several candidates."""
    with pytest.raises(ValueError, match="ambiguous") as error:
        param_groups(model)
    found = str(error.value).partition("for example couple=['")[2]
    return found.partition("']")[0] or None


@pytest.mark.parametrize(
    ("model", "advised"),
    [
        (Bert(pooler=linear(H)), "words.weight"),
        (Parts(wte=nn.Embedding(H, H), lm_head=linear(H), pooler=linear(H)), "lm_head.weight"),
        (Parts(wte=nn.Embedding(H, H), pooler=linear(H), to_logits=linear(H)), "to_logits.weight"),
        (Parts(wte=nn.Embedding(H, H), pooler=linear(H), own_head=linear(H), project=linear(H)), "own_head.weight"),
        (Parts(wte=nn.Embedding(H, H), pooler=linear(H), project=linear(H)), None),
        (Parts(wte=nn.Embedding(H, H), pooler=linear(H), project=linear(H, 8)), "project.weight"),
    ],
    ids=["no head", "head first", "head last", "head between", "no head known", "not square"],
)
def test_a_square_pooler_is_never_suggested(model: nn.Module, advised: str | None) -> None:
    assert advice(model) == advised
