"""The theory of a model whose logits have a bias: it uses the model's probabilities, and the sums vanish."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from theory_models import V, milestone_run, small_model, windows

from coupled_adam.evaluation.weights import load_run
from coupled_adam.theory.identity import identity_error
from coupled_adam.theory.measure import theory_of_run
from coupled_adam.theory.pseudo_training import PseudoTraining
from coupled_adam.theory.theory_folder import TheoryFolder
from coupled_adam.theory.token_statistics import TokenStatistics

K = 2


def biased_model(*, tied: bool) -> torch.nn.Module:
    model = small_model(tied=tied)
    generator = torch.Generator().manual_seed(5)
    model.lm_head.bias = torch.nn.Parameter(2 * torch.randn(V, generator=generator))
    return model


def test_token_statistics_and_the_identity_include_the_bias() -> None:
    model, batch = biased_model(tied=True), windows(6)
    hidden, targets = model.hidden_states(batch[:, :-1]).detach().flatten(0, 1), batch[:, 1:].flatten()
    found = TokenStatistics(model.lm_head.weight.detach(), model.lm_head.bias.detach())
    found.add(hidden, targets)
    p = torch.softmax(model(batch[:, :-1]).detach().double().flatten(0, 1), dim=1)  # (N, V)
    is_target = F.one_hot(targets, V).bool()
    for i in range(V):
        expected = p[~is_target[:, i], i].square().mean()
        assert float(found.x_false[i]) == pytest.approx(float(expected), rel=1e-4)
    assert identity_error(hidden, model.lm_head.weight, targets, model.lm_head.bias) < 1e-13


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_match_the_model_and_clipping_includes_the_bias(tied: bool) -> None:
    model, batch = biased_model(tied=tied), windows(6)
    model(batch[:, :-1], batch[:, 1:]).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    training = PseudoTraining(model, max_grad_norm=0.1, autocast=nullcontext)
    found = training.gradients(batch, lambda hidden, targets: None)
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    assert found.clip_factor == pytest.approx(0.1 / float(norm), rel=1e-4)
    total = found.output + found.input if tied else found.output
    torch.testing.assert_close(total, found.clip_factor * expected[model.output_table_name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kind", ["unigram", "learned"])
def test_a_run_with_a_bias_is_measured(kind: str, tmp_path: Path) -> None:
    run = milestone_run(tmp_path, model={"output_bias": kind})
    theory = theory_of_run(run, batches=K, checkpoints=[12])
    (numbers,) = theory.checkpoints
    assert numbers.identity_error < 1e-13
    # The probabilities add up to one, so the gradients of the head add up to zero.
    assert max(numbers.gradient_sums["output"]) < 1e-5
    model, config, corpus = load_run(run, checkpoint=12)
    from coupled_adam.data.batches import Batches

    assert corpus is not None
    order = Batches(corpus.tokens("train"), config.model.context, 8, config.seed, config.data.order)
    batches = torch.cat([order.samples(12 + number, 0, 8) for number in range(K)])
    with torch.no_grad():
        p = torch.softmax(model(batches[:, :-1]).double().flatten(0, 1), dim=1)
        loss = F.nll_loss(p.log(), batches[:, 1:].flatten())
    assert numbers.loss == pytest.approx(float(loss), rel=1e-5)
    is_target = F.one_hot(batches[:, 1:].flatten(), config.rows).bool()
    x_false = TheoryFolder(run).read_arrays(12).x_false
    expected = [float(p[~is_target[:, i], i].square().mean()) for i in range(config.rows)]
    assert x_false.tolist() == pytest.approx(expected, rel=1e-3)
