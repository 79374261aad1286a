"""Gradients of pseudo-training and the updates from them, compared with training steps and real optimizers."""

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from theory_models import H, V, small_model, windows
from torch import nn

from coupled_adam.optimizer import CoupledAdamW
from coupled_adam.optimizer.reference import reference_init, reference_step
from coupled_adam.theory import pseudo_training
from coupled_adam.theory.identity import gradient_by_formula
from coupled_adam.theory.pseudo_training import PseudoTraining
from coupled_adam.theory.updates import TableState, update_sum

BETAS, EPS, MOMENTUM, LR = (0.9, 0.95), 1e-8, 0.9, 1e-2


def pseudo(model, max_grad_norm=1.0, **options):
    return PseudoTraining(model, max_grad_norm=max_grad_norm, autocast=nullcontext, **options)


def nothing(hidden, targets):
    pass


def ordinary_gradients(model, batch, max_grad_norm, z_loss=0.0):
    """Gradients of all parameters in a training step, by name, and the norm before clipping."""
    model = copy.deepcopy(model)
    model(batch[:, :-1], batch[:, 1:], z_loss=z_loss).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm or math.inf)
    return {name: parameter.grad for name, parameter in model.named_parameters()}, float(norm)


def same_updates(a, b, tolerance=1e-5):
    torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance * float(b.abs().max()))


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05])
def test_parts_of_a_tied_table_add_up_to_the_clipped_gradient_of_training(architecture, max_grad_norm):
    model = small_model(architecture=architecture)
    found = pseudo(model, max_grad_norm).gradients(windows(6), nothing)
    expected, norm = ordinary_gradients(model, windows(6), max_grad_norm)
    same_updates(found.output + found.input, expected[model.input_table_name])
    assert found.clip_factor == pytest.approx(min(1, (max_grad_norm or math.inf) / (norm + 1e-6)), rel=1e-5)
    assert (found.clip_factor < 1) == (max_grad_norm > 0)


def test_tables_of_an_untied_model_have_their_own_gradients():
    model = small_model(tied=False)
    found = pseudo(model, 0.05).gradients(windows(6), nothing)
    expected, _ = ordinary_gradients(model, windows(6), 0.05)
    same_updates(found.output, expected[model.output_table_name])
    same_updates(found.input, expected[model.input_table_name])


def test_the_output_part_follows_the_papers_formula_and_the_input_part_the_input_tokens():
    model, batch = small_model(), windows(6)
    found = pseudo(model, 0.0).gradients(batch, nothing)
    hidden = model.hidden_states(batch[:, :-1]).detach().flatten(0, 1)
    targets = batch[:, 1:].flatten()
    formula = gradient_by_formula(hidden.double(), model.lm_head.weight.detach().double(), targets) / len(targets)
    same_updates(found.output, formula)
    came_in = torch.zeros(V, dtype=torch.bool).index_fill_(0, batch[:, :-1].flatten(), True)
    assert torch.equal(found.input.abs().sum(1) > 0, came_in)


def test_gradients_of_pieces_add_up_to_those_of_the_whole_batch(monkeypatch):
    model = small_model()
    whole = pseudo(model).gradients(windows(7), nothing)
    monkeypatch.setitem(pseudo_training.TOKENS_AT_ONCE, "cpu", 30)  # two samples at a time, and one left over
    sizes = []
    parts = pseudo(model).gradients(windows(7), lambda hidden, targets: sizes.append(len(targets)))
    assert sizes == [24, 24, 24, 12]
    same_updates(parts.output, whole.output)
    same_updates(parts.input, whole.input)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)


def test_the_gradients_include_the_z_loss_of_the_run():
    model = small_model()
    found = pseudo(model, 0.0, z_loss=0.1).gradients(windows(6), nothing)
    expected, _ = ordinary_gradients(model, windows(6), 0.0, z_loss=0.1)
    same_updates(found.output + found.input, expected[model.input_table_name])


def test_the_model_is_not_changed():
    model = small_model()
    before = copy.deepcopy(model.state_dict())
    pseudo(model).gradients(windows(6), nothing)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.fixture(scope="module")
def gradients():
    """Of five batches, clipped."""
    training = pseudo(small_model(), 0.5)
    return [training.gradients(windows(6, seed), nothing) for seed in range(5)]


@pytest.fixture(scope="module")
def state(gradients):
    return state_after(gradients)


def state_after(gradients):
    state = TableState(betas=BETAS, eps=EPS, momentum=MOMENTUM)
    for each in gradients:
        state.add({"output": each.output, "input": each.input})
    return state


def last_update(optimizer, table, gradients):
    """The last update of a real optimizer at a learning rate of one."""
    for each in gradients:
        before = table.detach().clone()
        table.grad = (each.output + each.input).to(table.dtype)
        optimizer.step()
    return (table.detach() - before) / LR


@pytest.mark.parametrize("name", ["sgd", "adam", "coupled"])
def test_updates_match_the_real_optimizers(name, gradients, state):
    table = nn.Parameter(torch.zeros(V, H, dtype=torch.float64))
    options = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": 0.0}
    real = {
        "sgd": lambda: torch.optim.SGD([table], lr=LR, momentum=MOMENTUM),
        "adam": lambda: torch.optim.AdamW([table], **options),
        "coupled": lambda: CoupledAdamW([{"params": [table], "coupled": True}], **options),
    }[name]()
    update = state.update(name)
    same_updates(update["output"] + update["input"], last_update(real, table, gradients))


@pytest.mark.parametrize("coupled", [False, True])
def test_updates_match_algorithm_1(coupled, gradients, state):
    reference = reference_init(torch.zeros(V, H))
    for each in gradients:
        before = reference.embeddings
        reference = reference_step(reference, each.output + each.input, lr=1, betas=BETAS, eps=EPS, coupled=coupled)
    update = state.update("coupled" if coupled else "adam")
    same_updates(update["output"] + update["input"], reference.embeddings - before)
    v_hat = reference.second_moment / (1 - BETAS[1] ** len(gradients))
    same_updates(state.second_moment(), v_hat.mean(1))


def test_sum_of_updates_of_the_output_layer_vanishes_except_for_adam(state):
    mean = torch.ones(H, dtype=torch.float64)
    sums = {name: update_sum(name, state.update(name), mean) for name in ("sgd", "adam", "coupled")}
    assert sums["sgd"].output < 1e-6
    assert sums["coupled"].output < 1e-6
    assert sums["adam"].output > 0.05
    # The remaining sum of the others comes from the input layer.
    for name in ("sgd", "coupled"):
        assert sums[name].total == pytest.approx(sums[name].input, rel=1e-4)
        assert sums[name].input > 0.01


@given(st.integers(0, 2**31), st.integers(1, 4), st.floats(0, 0.99), st.floats(0, 0.999))
@settings(max_examples=30)
def test_sums_vanish_for_any_output_gradients(seed, batches, beta1, beta2):
    generator = torch.Generator().manual_seed(seed)
    state = TableState(betas=(beta1, beta2), eps=EPS, momentum=beta1)
    table = torch.randn(V, H, generator=generator, dtype=torch.float64)
    for _ in range(batches):
        hidden = torch.randn(9, H, generator=generator, dtype=torch.float64)
        targets = torch.randint(V, (9,), generator=generator)
        state.add({"output": gradient_by_formula(hidden, table, targets)})
    for name in ("sgd", "coupled"):
        found = update_sum(name, state.update(name), table.mean(0))
        assert found.total < 1e-12
        assert found.input == 0


def test_update_sum_by_loops():
    generator = torch.Generator().manual_seed(1)
    output, input = torch.randn(2, V, H, generator=generator)
    mean = torch.randn(H, generator=generator, dtype=torch.float64)
    found = update_sum("adam", {"output": output, "input": input}, mean)
    rows = [[float(a) + float(b) for a, b in zip(*pair, strict=True)] for pair in zip(output, input, strict=True)]
    total = [sum(row[h] for row in rows) for h in range(H)]
    lengths = sum(math.hypot(*row) for row in rows)
    assert found.total == pytest.approx(math.hypot(*total) / lengths, rel=1e-5)
    assert found.total_norm == pytest.approx(math.hypot(*total), rel=1e-5)
    assert found.output == pytest.approx(math.hypot(*output.double().sum(0).tolist()) / lengths, rel=1e-5)
    assert found.input_norm == pytest.approx(math.hypot(*input.double().sum(0).tolist()), rel=1e-5)
    dot = sum(a * b for a, b in zip(total, mean.tolist(), strict=True))
    assert found.cosine_with_mean == pytest.approx(dot / math.hypot(*total) / math.hypot(*mean.tolist()), rel=1e-5)


def test_an_update_of_zero_has_sums_of_zero():
    found = update_sum("sgd", {"output": torch.zeros(V, H)}, torch.ones(H, dtype=torch.float64))
    assert (found.total, found.output, found.input, found.cosine_with_mean) == (0, 0, 0, None)
