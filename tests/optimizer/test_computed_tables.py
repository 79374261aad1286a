"""Tables whose weight is not a parameter (parametrized, pruned, adaptive or transposed) are never overlooked.

Letters: V vocabulary rows, H hidden size.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from group_models import GPT, H, Parts, V, coupled_names, names
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm
from torch.nn.utils import weight_norm as legacy_weight_norm

from coupled_adam import CoupledAdamW
from coupled_adam.optimizer.groups import param_groups

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


COMPUTED: dict[str, tuple[Callable[[nn.Module], Any], list[str], str]] = {
    "weight_norm": (
        parametrizations.weight_norm,
        ["parametrizations.weight.original0", "parametrizations.weight.original1"],
        "remove_parametrizations",
    ),
    "legacy weight_norm": (legacy_weight_norm, ["weight_g", "weight_v"], "remove_weight_norm"),
    "prune": (lambda module: prune.l1_unstructured(module, "weight", 0.5), ["weight_orig"], "prune.remove"),
    "legacy spectral_norm": (spectral_norm, ["weight_orig"], "remove_spectral_norm"),
    "parametrization": (
        lambda module: parametrize.register_parametrization(module, "weight", Doubled()),
        ["parametrizations.weight.original"],
        "remove_parametrizations",
    ),
}
computed = pytest.mark.parametrize(("compute", "sources", "remedy"), COMPUTED.values(), ids=COMPUTED)


def hugging_face_llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": H, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=V, **sizes))


def plain_gpt() -> nn.Module:
    return GPT(tied=False)


@computed
@pytest.mark.parametrize(
    ("build", "embedding"),
    [(plain_gpt, "wte.weight"), (hugging_face_llama, "model.embed_tokens.weight")],
    ids=["plain", "hugging face"],
)
def test_a_computed_head_is_an_error_that_names_its_source_tensors(
    build: Callable[[], nn.Module], embedding: str, compute: Callable[[nn.Module], Any], sources: list[str], remedy: str
) -> None:
    model = build()
    compute(model.lm_head)
    for couple in ("output", "all"):
        with pytest.raises(ValueError, match=f"couple='{couple}': the head 'lm_head'") as error:
            CoupledAdamW(model, couple=couple)
        assert all(f"'lm_head.{source}'" in str(error.value) for source in sources)
        assert remedy in str(error.value)
    assert coupled_names(param_groups(model, couple="input")) == [embedding]
    baseline = param_groups(model, couple="none")
    assert {f"lm_head.{source}" for source in sources} <= set(names(baseline)["no_decay"])
    assert "lm_head" in baseline.summary()


@computed
def test_a_padded_computed_head_is_an_error_too(
    compute: Callable[[nn.Module], Any], sources: list[str], remedy: str
) -> None:
    model = Parts(tokens=nn.Embedding(V, H), fc_out=nn.Linear(H, 128))
    compute(model.fc_out)
    with pytest.raises(ValueError, match="the head 'fc_out'"):
        param_groups(model)


@pytest.mark.parametrize("kind", ["prune", "parametrization"])
def test_a_head_computed_from_one_tensor_can_be_coupled_by_its_name(kind: str) -> None:
    compute, (source,), _ = COMPUTED[kind]
    model = GPT(tied=False)
    compute(model.lm_head)
    name = f"lm_head.{source}"
    with pytest.raises(ValueError, match="the head 'lm_head'") as error:
        param_groups(model)
    assert f"couple=[{name!r}]" in str(error.value)
    groups = param_groups(model, couple=[name])
    assert coupled_names(groups) == [name]
    assert names(groups)["input_embeddings"] == ["wte.weight"]


def test_the_two_tensors_of_weight_norm_are_not_suggested() -> None:
    model = GPT(tied=False)
    parametrizations.weight_norm(model.lm_head)
    with pytest.raises(ValueError, match="the head 'lm_head'") as error:
        param_groups(model)
    assert "couple=['lm_head" not in str(error.value)


@computed
def test_a_computed_embedding_does_not_hide_the_head(
    compute: Callable[[nn.Module], Any], sources: list[str], remedy: str
) -> None:
    model = GPT(tied=False)
    compute(model.wte)
    assert coupled_names(param_groups(model)) == ["lm_head.weight"]
    with pytest.raises(ValueError, match="couple='input': the embedding 'wte'"):
        param_groups(model, couple="input")


def test_a_computed_embedding_without_a_head_is_an_error() -> None:
    model = Parts(tokens=nn.Embedding(V, H))
    prune.l1_unstructured(model.tokens, "weight", 0.5)
    for couple in ("output", "input", "all"):
        with pytest.raises(ValueError, match="'tokens'"):
            param_groups(model, couple=couple)
    assert names(param_groups(model, couple=["tokens.weight_orig"])) == {"coupled": ["tokens.weight_orig"]}


def test_pruning_a_tied_head_names_the_table_they_share() -> None:
    model = GPT(tied=True)
    prune.l1_unstructured(model.lm_head, "weight", 0.5)
    with pytest.raises(ValueError, match=r"the head 'lm_head'.*couple=\['wte\.weight'\]"):
        param_groups(model)


def test_computed_layers_that_are_not_heads_are_treated_like_others() -> None:
    model = GPT(tied=False, width=V)
    for block in model.h:
        parametrizations.weight_norm(block.fc)
    model.pooler = parametrizations.weight_norm(nn.Linear(H, H))
    assert coupled_names(param_groups(model)) == ["lm_head.weight"]


def test_an_adaptive_softmax_is_an_error_that_explains() -> None:
    model = Parts(
        tokens=nn.Embedding(V, H), fc=nn.Linear(H, 40), loss=nn.AdaptiveLogSoftmaxWithLoss(H, V, cutoffs=[20, 60])
    )
    for couple in ("output", "all"):
        with pytest.raises(ValueError, match=r"'loss'.*AdaptiveLogSoftmaxWithLoss"):
            param_groups(model, couple=couple)
    assert coupled_names(param_groups(model, couple="input")) == ["tokens.weight"]
    assert names(param_groups(model, couple="none"))["decay"] == ["fc.weight"]


def test_an_adaptive_softmax_inside_or_around_a_hugging_face_model_is_an_error() -> None:
    model = hugging_face_llama()
    model.lm_head = nn.AdaptiveLogSoftmaxWithLoss(H, V, cutoffs=[20])
    with pytest.raises(ValueError, match=r"'lm_head'.*AdaptiveLogSoftmaxWithLoss"):
        param_groups(model)
    around = Parts(backbone=model.model, loss=nn.AdaptiveLogSoftmaxWithLoss(H, V, cutoffs=[20]))
    with pytest.raises(ValueError, match=r"'loss'.*AdaptiveLogSoftmaxWithLoss"):
        param_groups(around)
    assert coupled_names(param_groups(around, couple="input")) == ["backbone.embed_tokens.weight"]


class Transposed(nn.Module):
    """As in TransformerLens: logits are `x @ W_U`."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(V, H)
        self.W_U = nn.Parameter(torch.zeros(H, V))


@pytest.mark.parametrize(
    ("build", "head"),
    [
        (Transposed, "W_U"),
        (lambda: Parts(tokens=nn.Embedding(V, H), final=nn.Conv1d(H, V, 1)), "final"),
    ],
    ids=["(H, V)", "convolution"],
)
def test_a_head_without_one_row_per_token_is_an_error(build: Callable[[], nn.Module], head: str) -> None:
    with pytest.raises(ValueError, match=rf"'{head}' \(100, 16\).*couple='input'"):
        param_groups(build())
    groups = names(param_groups(build(), couple="input"))
    assert groups["input_embeddings"] == ["tokens.weight"]
    assert "decay" not in groups


def test_a_head_whose_weight_is_not_a_parameter_is_an_error() -> None:
    model = Parts(tokens=nn.Embedding(V, H), out=nn.Linear(H, V))
    weight = model.out.weight.detach()
    del model.out.weight
    model.out.register_buffer("weight", weight)
    with pytest.raises(ValueError, match=r"'out' \(100, 16\).*couple='input'"):
        param_groups(model)
