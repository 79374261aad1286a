"""Model, data and comparisons shared by the scenarios.

All ranks use the same batches, so averaging gradients over ranks is exact, and sharded and unsharded training can be
compared with tight tolerances.

Legend: V vocabulary rows, H hidden size, B batch, T time.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional as F

from coupled_adam import CoupledAdamW

V, H, B, T = 13, 8, 3, 5  # 13 rows are uneven on 2 and on 4 ranks
STEPS = 6
LR = 1e-2
TOLERANCE = 1e-6

Scenario = Callable[[], None]


def runs_on(*ranks: int) -> Callable[[Scenario], Scenario]:
    """Mark a function as a scenario for these numbers of ranks."""

    def mark(scenario: Scenario) -> Scenario:
        scenario.ranks = ranks
        return scenario

    return mark


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H)
        self.fc = nn.Linear(H, 10)
        self.proj = nn.Linear(10, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.proj(F.gelu(self.fc(self.norm(x))))


class GPT(nn.Module):
    """GPT-2 without attention. Returns the loss, because FSDP2 warns about outputs that are views, such as logits."""

    def __init__(self, *, tied: bool, vocabulary: int = V) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Embedding(vocabulary, H)
        self.wpe = nn.Embedding(T, H)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.ln_f = nn.LayerNorm(H)
        self.lm_head = nn.Linear(H, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight
        for table in (self.wte, self.wpe, self.lm_head):
            nn.init.normal_(table.weight, std=0.1)
        # Not zeros: after a few steps the rounding of small gradients would be relatively large.
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter, std=0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens % self.wte.num_embeddings
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))  # (B, T, H)
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))  # (B, T, V)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def mesh_of(*shape: int) -> DeviceMesh:
    """A mesh over all ranks; two dimensions are called "dp" and "tp"."""
    names = {1: ("all",), 2: ("dp", "tp")}[len(shape)]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def random_tensor(*shape: int, seed: int) -> Tensor:
    """The same normal numbers on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def place(tensor: Tensor, mesh: DeviceMesh, placements: Iterable[Placement]) -> DTensor:
    """Distribute a tensor that all ranks have over a mesh."""
    # Not only distribute_tensor: it refuses uneven _StridedShard (torch 2.13), which redistribute supports.
    replicated = distribute_tensor(tensor.clone(), mesh, [Replicate()] * mesh.ndim)
    return replicated.redistribute(placements=tuple(placements))


def full(tensor: Tensor) -> Tensor:
    """The full tensor, on every rank."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def backward(model: nn.Module, step: int, scale: Callable[[Tensor], Tensor] = lambda loss: loss) -> None:
    """Compute the gradients of this step's batch, the same on every rank."""
    tokens = torch.randint(1000, (B, T), generator=torch.Generator().manual_seed(step))
    model.zero_grad()
    scale(model(tokens)).backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int] = range(STEPS)) -> None:
    for step in steps:
        backward(model, step)
        optimizer.step()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest deviation, relative to the largest element."""
    deviation = (full(actual).double() - full(expected).double()).abs().max()
    return (deviation / full(expected).double().abs().max().clamp_min(1e-30)).item()


def assert_close(what: str, actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    error = relative_error(actual, expected)
    assert error < tolerance, f"{what}: relative error {error:.2e}, expected less than {tolerance:.0e}"


def assert_same_parameters(model: nn.Module, reference: nn.Module) -> None:
    parameters, expected = dict(model.named_parameters()), dict(reference.named_parameters())
    assert parameters.keys() == expected.keys(), f"{parameters.keys()} and {expected.keys()} differ"
    for name in expected:
        assert_close(name, parameters[name], expected[name])


def assert_same_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, reference: nn.Module, reference_optimizer: torch.optim.Optimizer
) -> None:
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        state, expected_state = optimizer.state[parameter], reference_optimizer.state[expected]
        assert state.keys() == expected_state.keys(), f"{name}: state has {state.keys()}"
        for key in expected_state:
            assert_close(f"{key} of {name}", state[key], expected_state[key])


def assert_trains_like_unsharded(model: nn.Module, reference: nn.Module, **options: object) -> None:
    """Train a sharded and an unsharded model, each on its own gradients, and compare their parameters."""
    optimizer = CoupledAdamW(model, lr=LR, weight_decay=0.1, **options)
    reference_optimizer = CoupledAdamW(reference, lr=LR, weight_decay=0.1, **options)
    train(model, optimizer)
    train(reference, reference_optimizer)
    assert_same_parameters(model, reference)


def assert_follows_unsharded(model: nn.Module, reference: nn.Module, **options: object) -> None:
    """Train a sharded and an unsharded model on the gradients of the sharded one; compare state as well.

    A parallel forward pass, or a gradient norm summed in another order, rounds differently, and later gradients would
    amplify the difference. With equal gradients the optimizers can be compared with tight tolerances.
    """
    optimizer = CoupledAdamW(model, lr=LR, weight_decay=0.1, **options)
    reference_optimizer = CoupledAdamW(reference, lr=LR, weight_decay=0.1, **options)
    for step in range(STEPS):
        backward(model, step)
        backward(reference, step)
        for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
            gradient = full(parameter.grad).clone()
            assert_close(f"gradient of {name}", gradient, expected.grad, tolerance=1e-4)
            expected.grad = gradient
        optimizer.step()
        reference_optimizer.step()
        if "max_grad_norm" in options:
            assert_close("grad_norm", optimizer.grad_norm, reference_optimizer.grad_norm)
    assert_same_parameters(model, reference)
    assert_same_state(model, optimizer, reference, reference_optimizer)
