"""The tensors of a checkpoint, and creating the state of an optimizer without a step."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import Optimizer

from coupled_adam import CoupledAdamW
from coupled_adam.training.checkpoint.save_and_load import CheckpointWriter, load, newest_good
from coupled_adam.training.checkpoint.training_state import make_optimizer_state, training_tensors

V, H = 11, 6


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Embedding(V, H)
        self.block = nn.Linear(H, H)
        self.lm_head = nn.Linear(H, V, bias=False)
        self.lm_head.weight = self.wte.weight
        with torch.no_grad():
            self.block.bias.zero_()
            self.block.bias[0] = -0.0  # a careless zero update would make it 0.0

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.dropout(self.wte(tokens), 0.3)  # uses the generator
        return F.cross_entropy(self.lm_head(self.block(x)), tokens.roll(1))


def train(model: nn.Module, optimizers: list[Optimizer], steps: range) -> None:
    for step in steps:
        tokens = torch.randint(V, (20,), generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        model(tokens).backward()
        for optimizer in optimizers:
            optimizer.step()


def adamw(**options: object) -> Callable[[nn.Module], list[Optimizer]]:
    return lambda model: [torch.optim.AdamW(model.parameters(), lr=1e-2, **options)]


def coupled(**options: object) -> Callable[[nn.Module], list[Optimizer]]:
    return lambda model: [CoupledAdamW(model, lr=1e-2, max_grad_norm=0.1, **options)]


def sgd_and_adamw(model: nn.Module) -> list[Optimizer]:
    sgd = torch.optim.SGD([model.wte.weight], lr=1e-1, momentum=0.9, fused=True)
    return [sgd, torch.optim.AdamW(model.block.parameters(), lr=1e-2, fused=True)]


OPTIMIZERS = {
    "adamw": adamw(),
    "adamw-foreach": adamw(foreach=True),
    "adamw-fused": adamw(fused=True),
    "adamw-maximize": adamw(maximize=True),
    "adamw-amsgrad": adamw(amsgrad=True),
    "adam": lambda model: [torch.optim.Adam(model.parameters(), lr=1e-2)],
    "coupled": coupled(),
    "coupled-fused": coupled(fused=True),
    "sgd": sgd_and_adamw,
    "sgd-without-momentum": lambda model: [torch.optim.SGD(model.parameters(), lr=1e-2)],
}


@pytest.fixture(params=OPTIMIZERS)
def make_optimizers(request: pytest.FixtureRequest) -> Callable[[nn.Module], list[Optimizer]]:
    return OPTIMIZERS[request.param]


def bits(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, t in tensors.items()}


def test_a_resumed_run_is_bitwise_equal_to_the_uninterrupted_one(
    tmp_path: Path, make_optimizers: Callable[[nn.Module], list[Optimizer]]
) -> None:
    model = Model()
    optimizers = make_optimizers(model)
    train(model, optimizers, range(3))  # state created by the optimizers themselves
    writer = CheckpointWriter(tmp_path, keep=1)
    writer.save(3, training_tensors(model, optimizers), {})
    train(model, optimizers, range(3, 6))
    expected = bits(training_tensors(model, optimizers))
    writer.wait()

    resumed = Model()
    resumed_optimizers = make_optimizers(resumed)
    make_optimizer_state(resumed_optimizers)
    torch.manual_seed(99)
    load(newest_good(tmp_path, on_skip=pytest.fail), training_tensors(resumed, resumed_optimizers))
    train(resumed, resumed_optimizers, range(3, 6))
    assert bits(training_tensors(resumed, resumed_optimizers)) == expected


def test_the_state_equals_that_of_the_first_step(make_optimizers: Callable[[nn.Module], list[Optimizer]]) -> None:
    model, stepped = Model(), Model()
    optimizers, stepped_optimizers = make_optimizers(model), make_optimizers(stepped)
    parameters = bits(dict(model.named_parameters()))
    make_optimizer_state(optimizers)
    assert bits(dict(model.named_parameters())) == parameters
    assert all(parameter.grad is None for parameter in model.parameters())
    train(stepped, stepped_optimizers, range(1))
    made, expected = training_tensors(model, optimizers), training_tensors(stepped, stepped_optimizers)
    assert made.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (made[name].shape, made[name].dtype) == (tensor.shape, tensor.dtype), name
        assert made[name].device == tensor.device, name
        assert not made[name].requires_grad, name
        if name.startswith("optimizer"):
            assert not made[name].any(), name


def test_creating_the_state_in_advance_does_not_change_the_run(
    make_optimizers: Callable[[nn.Module], list[Optimizer]],
) -> None:
    results = []
    for in_advance in (False, True):
        model = Model()
        optimizers = make_optimizers(model)
        if in_advance:
            make_optimizer_state(optimizers)
        torch.manual_seed(1)
        train(model, optimizers, range(4))
        results.append(bits(training_tensors(model, optimizers)))
    assert results[0] == results[1]


def test_existing_state_and_gradients_are_left_alone(
    make_optimizers: Callable[[nn.Module], list[Optimizer]],
) -> None:
    model = Model()
    optimizers = make_optimizers(model)
    train(model, optimizers, range(2))
    before = bits(training_tensors(model, optimizers))
    gradients = [parameter.grad for parameter in model.parameters()]
    make_optimizer_state(optimizers)
    assert bits(training_tensors(model, optimizers)) == before
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))


def test_the_second_moment_of_a_coupled_table_is_one_row(tmp_path: Path) -> None:
    model = Model()
    (optimizer,) = coupled()(model)
    make_optimizer_state([optimizer])
    assert optimizer.grad_norm is None, "no step was taken"
    tensors = training_tensors(model, [optimizer])
    assert tensors["optimizer.wte.weight.exp_avg_sq"].shape == (1, H)
    assert tensors["optimizer.block.weight.exp_avg_sq"].shape == (H, H)


def test_counters_of_capturable_optimizers_are_on_the_device_of_the_parameters() -> None:
    """On meta, a device other than the host that every machine has."""
    model = Model().to("meta")
    for optimizers in (adamw(capturable=True)(model), [CoupledAdamW(model, capturable=True)]):
        make_optimizer_state(optimizers)
        devices = {state["step"].device.type for state in optimizers[0].state.values()}
        assert devices == {"meta"}


def test_names_do_not_include_wrappers_of_the_model() -> None:
    model = Model()
    optimizers = adamw()(model)
    make_optimizer_state(optimizers)
    names = training_tensors(model, optimizers).keys()
    parameters = ["wte.weight", "block.weight", "block.bias"]  # lm_head.weight is wte.weight
    state = [f"optimizer.{name}.{key}" for name in parameters for key in ("step", "exp_avg", "exp_avg_sq")]
    assert sorted(names) == sorted([*(f"model.{name}" for name in parameters), *state, "rng.cpu"])
    compiled = torch.compile(model)
    wrapped = nn.DataParallel(compiled)
    for other in (compiled, wrapped):
        assert any(name.startswith(("module.", "_orig_mod.")) for name, _ in other.named_parameters())
        assert training_tensors(other, optimizers).keys() == names


def test_persistent_buffers_belong_to_the_state() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_buffer("angles", torch.ones(2), persistent=False)
    tensors = training_tensors(model, [])
    assert "model.1.running_mean" in tensors
    assert "model.angles" not in tensors
    assert tensors["model.0.weight"].data_ptr() == model[0].weight.data_ptr()


def test_frozen_parameters_get_no_optimizer_state() -> None:
    model = Model()
    model.block.weight.requires_grad_(False)
    optimizers = adamw()(model)
    make_optimizer_state(optimizers)
    assert model.block.weight not in optimizers[0].state


def test_an_optimizer_of_another_model_is_refused() -> None:
    optimizers = adamw()(Model())
    make_optimizer_state(optimizers)
    with pytest.raises(ValueError, match=r"\boptimizer .*\bparameter .*\bmodel\b"):
        training_tensors(Model(), optimizers)


def test_an_unknown_optimizer_is_refused() -> None:
    optimizer = torch.optim.Adagrad(Model().parameters())
    with pytest.raises(ValueError, match=r"\bAdagrad\b.*\btorch\.optim\.AdamW\b.*\bCoupledAdamW\b"):
        make_optimizer_state([optimizer])
