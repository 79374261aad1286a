"""Every path of the coupled update, compared with the literal Algorithm 1."""

from types import ModuleType

import pytest
import torch
from oracle import assert_matches, coupled, gradients, oracle, run, table

from coupled_adam.optimizer.reference import reference_step

triton_kernels = pytest.importorskip("coupled_adam.optimizer.triton_kernels", reason="triton is not installed")
OPTIONS = [
    {},
    {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-3},
    {"weight_decay": 0.1, "lr": 0.1},
    {"scale_exponent": 3.0},
    {"scale_exponent": -2.5, "maximize": True, "weight_decay": 0.05},
    {"betas": (0.0, 0.5)},
    {"betas": (0.0, 0.95), "maximize": True, "weight_decay": 0.05},
    {"betas": (0.9, 0.0)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_gives_the_updates_of_algorithm_1(path: ModuleType, options: dict) -> None:
    param = table((53, 19))
    grads = gradients((53, 19), 10)
    expected = oracle(param, grads, **options)
    optimizer = coupled(param, **options)
    run(optimizer, param, grads)
    assert_matches(optimizer, param, expected)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.999)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (7, 1), (33, 300), (50, 256)], ids=str)
def test_every_shape_and_dtype_gives_the_updates_of_algorithm_1(
    path: ModuleType, dtype: torch.dtype, shape: tuple[int, int], betas: tuple[float, float]
) -> None:
    param = table(shape, dtype)
    grads = gradients(shape, 3, dtype)
    expected = oracle(param, grads, betas=betas)
    optimizer = coupled(param, betas=betas)
    run(optimizer, param, grads)
    assert_matches(optimizer, param, expected)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.999)], ids=str)
def test_float64_parameters_are_updated_in_float64(betas: tuple[float, float]) -> None:
    param = table((53, 19), torch.float64)
    grads = gradients((53, 19), 10, torch.float64)
    expected = oracle(param, grads, betas=betas)
    optimizer = coupled(param, betas=betas)
    run(optimizer, param, grads)
    assert_matches(optimizer, param, expected)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.999)], ids=str)
@pytest.mark.parametrize("layout", ["transposed", "sliced", "gradient transposed"])
def test_any_stride_is_accepted(path: ModuleType, layout: str, betas: tuple[float, float]) -> None:
    values = table((21, 18))
    grads = gradients((21, 18), 4)
    if layout == "transposed":
        param = torch.nn.Parameter(values.detach().t().contiguous().t())
        assert param.stride() == (1, 21)
    elif layout == "sliced":
        param = torch.nn.Parameter(torch.zeros(21, 40)[:, 3:21].copy_(values.detach()))
        assert param.stride() == (40, 1)
    else:
        param = values
        grads = [grad.t().contiguous().t() for grad in grads]
    expected = oracle(param, grads, betas=betas)
    optimizer = coupled(param, betas=betas)
    for grad in grads:
        param.grad = grad
        optimizer.step()
    assert_matches(optimizer, param, expected)


@pytest.mark.parametrize(
    "flags", [{"fused": True}, {"capturable": True}, {"foreach": True}, {"foreach": False}], ids=str
)
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.999)], ids=str)
def test_every_flag_of_adamw_gives_the_same_updates(path: ModuleType, flags: dict, betas: tuple[float, float]) -> None:
    param = table((40, 8))
    grads = gradients((40, 8), 10)
    expected = oracle(param, grads, betas=betas)
    optimizer = coupled(param, betas=betas, **flags)
    run(optimizer, param, grads)
    assert_matches(optimizer, param, expected)


def test_step_count_on_the_device_is_exact_at_the_first_step(path: ModuleType) -> None:
    """1 - beta2^t in float32 would be wrong by 3e-5 at t = 1 and beta2 = 0.999."""
    param = table((40, 8))
    grads = gradients((40, 8), 1)
    expected = oracle(param, grads, lr=10.0)
    optimizer = coupled(param, lr=torch.tensor(10.0), capturable=True)
    run(optimizer, param, grads)
    assert_matches(optimizer, param, expected)


def test_lr_may_be_a_tensor_that_changes(path: ModuleType) -> None:
    param = table((40, 8))
    grads = gradients((40, 8), 6)
    expected = oracle(param, grads[:3], lr=0.1)
    for grad in grads[3:]:
        expected = reference_step(expected, grad, lr=0.01)
    lr = torch.tensor(0.1)
    optimizer = coupled(param, lr=lr)
    run(optimizer, param, grads[:3])
    lr.fill_(0.01)
    run(optimizer, param, grads[3:])
    assert_matches(optimizer, param, expected)


def test_triton_sums_are_bitwise_reproducible() -> None:
    grad = gradients((300, 70), 1)[0]
    if torch.cuda.is_available():
        grad = grad.cuda()
    first = triton_kernels.column_square_sums(grad)
    assert torch.equal(first, triton_kernels.column_square_sums(grad))
    torch.testing.assert_close(first.sum(0).double(), grad.double().square().sum(0), rtol=1e-6, atol=0)
