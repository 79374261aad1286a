"""The Triton kernels on a real GPU: exact, deterministic, without synchronisation, at any size."""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from side_streams import side_stream
from torch import Tensor, nn

from coupled_adam import CoupledAdamW
from coupled_adam.optimizer import blockwise, family_blockwise, table_step

sys.path.insert(0, str(Path(__file__).parents[1] / "optimizer"))
from oracle import assert_matches, coupled, gradients, oracle, relative_error, run, table
from test_against_adamw import LanguageModel

pytestmark = pytest.mark.gpu
SHAPES = [(1, 1), (1, 5), (7, 1), (53, 19), (1000, 768), (517, 2560), (70_001, 33), (50_304, 768)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"fused": True},
    {"capturable": True},
    {"foreach": True, "weight_decay": 0.1, "lr": 0.1},
    {"fused": True, "maximize": True, "scale_exponent": 3.0},
    {"betas": (0.0, 0.5), "scale_exponent": -2.5},
    {"betas": (0.0, 0.99), "fused": True, "maximize": True, "weight_decay": 0.1},
    {"betas": (0.0, 0.99), "capturable": True},
    {"fused": True, "betas": (0.9, 0.0), "weight_decay": 0.1},
]
ORACLE_OPTIONS = ("lr", "betas", "eps", "weight_decay", "scale_exponent", "maximize")


def to_oracle(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key in ORACLE_OPTIONS}


@pytest.fixture(params=["triton", "blockwise"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both implementations on the GPU; the second runs if Triton is missing."""
    if request.param == "blockwise":
        monkeypatch.setattr(table_step, "kernels_for", lambda tensor: blockwise)
        monkeypatch.setattr(table_step, "family_kernels_for", lambda tensor: family_blockwise)
    else:
        assert table_step.kernels_for(torch.zeros(1, device="cuda")).__name__.endswith("triton_kernels")
    name: str = request.param
    return name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_and_dtype_gives_the_updates_of_algorithm_1(
    path: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    param = table(shape, dtype, "cuda")
    grads = gradients(shape, 4, dtype, "cuda")
    expected = oracle(param, grads)
    optimizer = coupled(param)
    run(optimizer, param, grads)
    assert_matches(optimizer, param, expected)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_gives_the_updates_of_algorithm_1(path: str, options: dict[str, Any]) -> None:
    param = table((530, 190), device="cuda")
    grads = gradients((530, 190), 10, device="cuda")
    expected = oracle(param, grads, **to_oracle(options))
    optimizer = coupled(param, **options)
    run(optimizer, param, grads)
    assert_matches(optimizer, param, expected)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "gradient transposed"])
def test_any_stride_is_accepted(layout: str) -> None:
    values = table((210, 180), device="cuda")
    grads = gradients((210, 180), 4, device="cuda")
    if layout == "transposed":
        param = nn.Parameter(values.detach().t().contiguous().t())
    elif layout == "sliced":
        param = nn.Parameter(torch.zeros(210, 400, device="cuda")[:, 3:183].copy_(values.detach()))
    else:
        param, grads = values, [grad.t().contiguous().t() for grad in grads]
    expected = oracle(param, grads)
    optimizer = coupled(param)
    for grad in grads:
        param.grad = grad
        optimizer.step()
    assert_matches(optimizer, param, expected)


def test_tables_of_more_than_2_to_the_31_elements() -> None:
    V, H = 1_050_001, 2048
    assert V * H > 2**31
    torch.manual_seed(0)
    param = nn.Parameter(torch.zeros(V, H, dtype=torch.bfloat16, device="cuda"))
    param.grad = torch.randn(V, H, dtype=torch.bfloat16, device="cuda")
    mean_square = sum(block.double().square().sum(0) for block in param.grad.split(50_000)) / V
    coupled(param, lr=1.0).step()
    for rows in (slice(0, 3), slice(V // 2, V // 2 + 3), slice(V - 3, V)):
        expected = -param.grad[rows].double() / (mean_square.sqrt() + 1e-8)
        assert relative_error(param[rows], expected) < 5e-3


def test_two_runs_are_bitwise_equal() -> None:
    results = []
    for _ in range(2):
        param = table((50_304, 768), device="cuda")
        optimizer = coupled(param, fused=True, max_grad_norm=1.0)
        run(optimizer, param, gradients((50_304, 768), 3, device="cuda"))
        results.append((param.detach().clone(), optimizer.state[param]["exp_avg_sq"]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1.0, 1e10, 3e18, 1e25, 3e38])
@pytest.mark.parametrize("shape", [(53, 19), (50_304, 768)], ids=str)
def test_column_sums_of_huge_gradients_equal_float64_sums(
    shape: tuple[int, int], size: float, dtype: torch.dtype
) -> None:
    grad = (torch.rand(shape, device="cuda") * size).to(dtype)
    sums = table_step.kernels_for(grad).column_square_sums(grad)
    assert sums.dtype == torch.float64
    torch.testing.assert_close(sums.sum(0), grad.double().square().sum(0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"max_grad_norm": 1.0}], ids=str)
@pytest.mark.parametrize("size", [3e18, 1e20])
def test_updates_with_huge_gradients_follow_algorithm_1(path: str, size: float, options: dict[str, Any]) -> None:
    param = table((530, 190), device="cuda")
    grads = gradients((530, 190), 3, device="cuda")
    grads[0] = grads[0].sign() * size
    if "max_grad_norm" in options:
        clipped = [grad.double() / (grad.double().norm() + 1e-6).clamp(min=1.0) for grad in grads]
    else:
        clipped = grads
    expected = oracle(param, clipped)
    optimizer = coupled(param, **options)
    run(optimizer, param, grads)
    assert_matches(optimizer, param, expected)


@pytest.mark.parametrize("where", ["table", "standard"])
@pytest.mark.parametrize("size", [1e19, 3e38])
@pytest.mark.parametrize("flags", [{}, {"fused": True}], ids=str)
def test_clipped_parameters_survive_gradients_that_adamw_survives(
    path: str, flags: dict[str, Any], size: float, where: str
) -> None:
    param, other = table((230, 60), device="cuda"), nn.Parameter(torch.randn(70, 30, device="cuda"))
    optimizer = CoupledAdamW([{"params": [param], "coupled": True}, {"params": [other]}], max_grad_norm=1.0, **flags)
    for number in range(3):
        for each in (param, other):
            each.grad = torch.randn_like(each)
        if number == 0:
            chosen = param if where == "table" else other
            chosen.grad = chosen.grad.sign() * size
        optimizer.step()
    for each in (param, other):
        assert each.isfinite().all()
        assert all(value.isfinite().all() for value in optimizer.state[each].values())


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_fused_step_never_waits_for_the_device(clip: float | None, scaled: bool) -> None:
    model = LanguageModel().cuda()
    optimizer = CoupledAdamW(model, fused=True, max_grad_norm=clip)
    scale, found_inf = torch.tensor(8.0, device="cuda"), torch.zeros((), device="cuda")
    for _ in range(2):
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        if scaled:
            optimizer.grad_scale, optimizer.found_inf = scale, found_inf
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_no_temporary_of_the_size_of_the_table_is_allocated() -> None:
    shape = (50_304, 768)
    without_momentum = {"betas": (0.0, 0.99), "fused": True, "max_grad_norm": 0.1, "maximize": True}
    for options in (
        {},
        {"fused": True, "max_grad_norm": 0.1},
        {"maximize": True, "weight_decay": 0.1},
        without_momentum,
        {**without_momentum, "row_exponent": 1.0, "mean_free": True},
    ):
        param = table(shape, device="cuda")
        optimizer = coupled(param, **options)
        run(optimizer, param, gradients(shape, 1, device="cuda"))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, grad = torch.cuda.memory_allocated(), param.grad
        assert grad is not None
        version = grad._version
        optimizer.step()
        assert torch.cuda.max_memory_allocated() - before < 8 * 2**20
        assert grad._version == version


@pytest.mark.parametrize("overflow_at", [None, 0, 2])
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("unscale", [False, True], ids=["scaled", "unscaled"])
@pytest.mark.parametrize("flags", [{}, {"fused": True}], ids=["foreach", "fused"])
def test_grad_scaler_equals_unscaled_training(
    flags: dict[str, Any], unscale: bool, clip: float | None, overflow_at: int | None
) -> None:
    torch.manual_seed(0)
    scaled = LanguageModel().cuda()
    plain = copy.deepcopy(scaled)
    options = {"lr": 0.01, "weight_decay": 0.1, "max_grad_norm": clip}
    scaled_optimizer, plain_optimizer = CoupledAdamW(scaled, **options, **flags), CoupledAdamW(plain, **options)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    for number in range(4):
        tokens = torch.randint(0, 23, (4, 9), device="cuda")
        for model, factor in ((scaled, scaler.get_scale()), (plain, 1.0)):
            loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            model.zero_grad()
            (scaler.scale(loss) if factor != 1.0 else loss).backward()
        if number == overflow_at:
            scaled.embedding.weight.grad[2, 1] = float("inf")
        if unscale:
            scaler.unscale_(scaled_optimizer)
        scaler.step(scaled_optimizer)
        scaler.update()
        if number != overflow_at:
            plain_optimizer.step()
    for mine, theirs in zip(scaled.parameters(), plain.parameters(), strict=True):
        assert relative_error(mine, theirs) < 2e-6
    assert {state["step"].item() for state in scaled_optimizer.state.values()} == {4 if overflow_at is None else 3}


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("flags", [{}, {"fused": True}], ids=["foreach", "fused"])
def test_cuda_graph_replays_the_step(path: str, flags: dict[str, Any], clip: float | None) -> None:
    torch.manual_seed(0)
    captured = LanguageModel().cuda()
    eager = copy.deepcopy(captured)
    lr = torch.tensor(0.01, device="cuda")
    options = {"lr": lr, "capturable": True, "max_grad_norm": clip, **flags}
    optimizer, eager_optimizer = CoupledAdamW(captured, **options), CoupledAdamW(eager, **options)
    for model in (captured, eager):
        for param in model.parameters():
            param.grad = torch.zeros_like(param)

    def new_gradients() -> None:
        for mine, theirs in zip(captured.parameters(), eager.parameters(), strict=True):
            mine.grad.copy_(torch.randn_like(mine))
            theirs.grad.copy_(mine.grad)

    with side_stream():
        for _ in range(2):
            new_gradients()
            optimizer.step()
            eager_optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for factor in (1.0, 0.5, 0.1):
        new_gradients()
        lr.fill_(0.01 * factor)
        graph.replay()
        eager_optimizer.step()
    for mine, theirs in zip(captured.parameters(), eager.parameters(), strict=True):
        assert relative_error(mine, theirs) < 1e-6
    assert optimizer.state[captured.embedding.weight]["step"].item() == 5


@pytest.mark.parametrize("clip", [None, 0.1])
def test_compiled_step_equals_the_eager_one(clip: float | None) -> None:
    torch.manual_seed(0)
    compiled_model = LanguageModel().cuda()
    eager_model = copy.deepcopy(compiled_model)
    compiled_optimizer = CoupledAdamW(compiled_model, max_grad_norm=clip)
    eager_optimizer = CoupledAdamW(eager_model, max_grad_norm=clip)
    torch._dynamo.reset()
    compiled_step = torch.compile(compiled_optimizer.step)
    for _ in range(4):
        for mine, theirs in zip(compiled_model.parameters(), eager_model.parameters(), strict=True):
            mine.grad = torch.randn_like(mine)
            theirs.grad = mine.grad.clone()
        compiled_step()
        eager_optimizer.step()
    table_error = relative_error(compiled_model.embedding.weight, eager_model.embedding.weight)
    assert table_error < 1e-6


@pytest.mark.parametrize("flags", [{}, {"fused": True}, {"foreach": False}, {"capturable": True}], ids=str)
def test_standard_groups_are_bitwise_equal_to_adamw(flags: dict[str, Any]) -> None:
    mine = [nn.Parameter(torch.randn(64, 30, device="cuda")) for _ in range(3)]
    theirs = copy.deepcopy(mine)
    beside = table((230, 60), device="cuda")
    optimizer = CoupledAdamW([{"params": mine}, {"params": [beside], "coupled": True}], **flags)
    reference = torch.optim.AdamW(theirs, **flags)
    for _ in range(5):
        beside.grad = torch.randn_like(beside)
        for left, right in zip(mine, theirs, strict=True):
            left.grad = torch.randn_like(left)
            right.grad = left.grad.clone()
        optimizer.step()
        reference.step()
    for left, right in zip(mine, theirs, strict=True):
        assert torch.equal(left, right)


def full_gradient(param: Tensor) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(param.shape[0])
    return torch.randn(param.shape, device="cuda", generator=generator)


def test_fsdp2_on_one_gpu_equals_the_plain_model(tmp_path: Path) -> None:
    """One rank, but the real path: DTensor, NCCL, and the asynchronous all-reduce with the Triton kernels."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        plain = LanguageModel().cuda()
        sharded = copy.deepcopy(plain)
        fully_shard(sharded)
        for clip in (None, 0.1):
            optimizers = CoupledAdamW(plain, max_grad_norm=clip), CoupledAdamW(sharded, max_grad_norm=clip)
            for _ in range(3):
                for mine, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
                    theirs.grad = full_gradient(theirs)
                    mine.grad = distribute_tensor(theirs.grad.clone(), mine.device_mesh, mine.placements)
                for optimizer in optimizers:
                    optimizer.step()
        for mine, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
            assert relative_error(mine.full_tensor(), theirs) < 1e-6
    finally:
        dist.destroy_process_group()
