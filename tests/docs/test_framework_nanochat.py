"""The section on nanochat: a third kind of group next to its optimizer, in its training script."""

import os
import subprocess
import sys
from pathlib import Path

import nanochat_shape
import pytest
import torch
from nanochat_shape import (
    HEAD,
    STEPS,
    VOCABULARY,
    H,
    MuonAdamW,
    NanochatShape,
    batch,
    groups_of,
    loss_of,
    multiplier,
    setup_optimizer,
    train,
)

from coupled_adam.optimizer.reference import reference_init, reference_step

pytestmark = pytest.mark.timeout(120)


def trained_by_algorithm_1(ranks: int) -> NanochatShape:
    """Train the head by the float64 Algorithm 1 and the rest by nanochat's optimizer, on the loss of all ranks."""
    model = NanochatShape()
    others = MuonAdamW(groups_of(model, "adamw")[1:])
    rates = [group["lr"] for group in others.param_groups]
    state = reference_init(model.lm_head.weight)
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model, torch.cat([batch(step, rank) for rank in range(ranks)])).backward()
        for group, rate in zip(others.param_groups, rates, strict=True):
            group["lr"] = rate * multiplier(step)
        others.step()
        settings = HEAD | {"lr": HEAD["lr"] * multiplier(step)}
        state = reference_step(state, model.lm_head.weight.grad, vocabulary_size=VOCABULARY, **settings)
        model.lm_head.weight.data.copy_(state.embeddings)
    return model


def assert_same_weights(model: dict[str, torch.Tensor], expected: NanochatShape) -> None:
    for name, weight in expected.state_dict().items():
        torch.testing.assert_close(
            model[name], weight, rtol=0, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.usefixtures("framework_files")
def test_the_head_is_coupled_and_the_rest_uses_nanochats_optimizer() -> None:
    model = NanochatShape()
    optimizer = setup_optimizer(model, MuonAdamW)
    train(model, optimizer, range(STEPS))
    assert_same_weights(model.state_dict(), trained_by_algorithm_1(ranks=1))
    assert sorted(group["kind"] for group in optimizer.param_groups) == ["adamw", "adamw", "coupled", "muon", "muon"]
    _, coupled = optimizer.optimizers
    assert tuple(coupled.state[model.lm_head.weight]["exp_avg_sq"].shape) == (1, H)


@pytest.mark.usefixtures("framework_files")
def test_a_run_resumes_from_the_state_dict_of_the_training_script() -> None:
    model = NanochatShape()
    optimizer = setup_optimizer(model, MuonAdamW)
    train(model, optimizer, range(2))
    torch.save([model.state_dict(), optimizer.state_dict()], "checkpoint.pt")
    weights, state = torch.load("checkpoint.pt")
    resumed = NanochatShape()
    resumed.load_state_dict(weights)
    resumed_optimizer = setup_optimizer(resumed, MuonAdamW)
    resumed_optimizer.load_state_dict(state)
    train(resumed, resumed_optimizer, range(2, STEPS))
    assert_same_weights(resumed.state_dict(), trained_by_algorithm_1(ranks=1))


def test_gradients_of_the_head_are_averaged_over_two_ranks(framework_files: Path) -> None:
    """nanochat has no DDP: without averaging, the heads of the ranks would diverge."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ranks = [
        subprocess.Popen([sys.executable, nanochat_shape.__file__, str(framework_files), str(rank)], env=environment)
        for rank in range(2)
    ]
    assert [rank.wait(100) for rank in ranks] == [0, 0]
    for rank in range(2):
        assert_same_weights(torch.load(framework_files / f"rank{rank}.pt"), trained_by_algorithm_1(ranks=2))
