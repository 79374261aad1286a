"""BatchedMuon compared with a literal Muon and with torch.optim.Muon, and the usual uses of an optimizer."""

import copy
import io
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from muon_reference import (
    assert_follows_reference,
    gradients_like,
    matrices,
    muon_reference,
    newton_schulz,
    relative_error,
    run,
)
from test_torch_features import peak_bytes
from torch import nn

from coupled_adam.optimizer import BatchedMuon, muon_step
from coupled_adam.optimizer.newton_schulz import COEFFICIENTS, orthogonalised

beside_torch = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon: torch 2.9 or newer")
SHAPES = ((6, 10), (10, 6), (8, 8), (6, 10), (1, 7), (7, 1), (10, 6))


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float32_iteration_follows_the_literal_one_in_float64(
    nesterov: bool, adjust: str | None, dtype: torch.dtype
) -> None:
    params = matrices(*SHAPES, dtype=dtype)
    starts = [p.detach().clone() for p in params]
    steps = gradients_like(params, 5)
    optimizer = BatchedMuon(params, lr=0.02, nesterov=nesterov, adjust_lr_fn=adjust, ns_dtype="float32")
    run(optimizer, params, steps)
    assert_follows_reference(
        optimizer, params, starts, steps, lr=0.02, nesterov=nesterov, adjust=adjust, momentum_error=1e-5
    )


def test_every_option_of_the_iteration_has_an_effect() -> None:
    params = matrices((5, 9))
    start, steps = params[0].detach().clone(), gradients_like(params, 3)
    coefficients = (2.0, -1.5, 0.5)
    optimizer = BatchedMuon(
        params,
        lr=0.1,
        weight_decay=0.5,
        momentum=0.5,
        ns_coefficients=coefficients,
        ns_steps=9,
        ns_dtype="float32",
    )
    run(optimizer, params, steps)
    options = {"lr": 0.1, "weight_decay": 0.5, "momentum": 0.5, "coefficients": coefficients, "steps": 9}
    expected, _ = muon_reference(start, [step[0] for step in steps], **options)
    assert relative_error(params[0], expected) < 1e-5


def test_a_matrix_is_divided_by_a_norm_of_at_least_eps() -> None:
    tiny = torch.full((1, 2, 3), 1e-9, dtype=torch.float32)
    expected = newton_schulz(tiny[0].double(), eps=1e-4)
    assert relative_error(orthogonalised(tiny.clone(), COEFFICIENTS, 5, 1e-4)[0], expected) < 1e-5


@beside_torch
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_bfloat16_iteration_agrees_with_torch_within_bfloat16(dtype: torch.dtype, adjust: str) -> None:
    shapes = ((48, 64), (64, 48), (48, 64), (32, 32))
    ours, theirs = matrices(*shapes, dtype=dtype), matrices(*shapes, dtype=dtype)
    with torch.no_grad():
        torch._foreach_mul_([*ours, *theirs], 1e-3)  # small, so that a bfloat16 parameter can follow the updates
    steps = gradients_like(ours, 5)
    options = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": adjust}
    mine, other = BatchedMuon(ours, **options), torch.optim.Muon(theirs, **options)
    starts = [p.detach().clone().double() for p in ours]
    run(mine, ours, steps)
    run(other, theirs, steps)
    for p, q, start in zip(ours, theirs, starts, strict=True):
        moved, expected = p.double() - start, q.double() - start
        # Each of five updates is rounded to eight bits, and a bfloat16 parameter again after each.
        tolerance = 0.02 if dtype == torch.float32 else 0.03
        assert (moved - expected).norm() < tolerance * expected.norm()
        assert torch.equal(mine.state[p]["momentum_buffer"], other.state[q]["momentum_buffer"])


def test_weight_decay_of_a_bfloat16_matrix_is_not_rounded_away_under_a_tensor_lr() -> None:
    """1 - lr * decay rounds to 1 in bfloat16, but over a thousand steps it matters."""
    moved = []
    for lr in (1e-2, torch.tensor(1e-2)):
        p = nn.Parameter(torch.full((4, 4), 1.0, dtype=torch.bfloat16))
        p.grad = torch.zeros_like(p)
        optimizer = BatchedMuon([p], lr=lr, weight_decay=0.3)
        optimizer.step()
        moved.append(1 - p[0, 0].item())
    assert moved[0] == moved[1] == 2**-8  # 0.997 rounded


@settings(max_examples=25)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=8),
    most_elements=st.integers(1, 100),
    small_elements=st.sampled_from([0, 12, 1000]),
)
def test_batched_matrices_are_updated_as_one_by_one(
    shapes: list[tuple[int, int]], most_elements: int, small_elements: int
) -> None:
    """Including small ones of different shapes in one batch, as on a GPU."""
    together, alone = matrices(*shapes), matrices(*shapes)
    steps = gradients_like(together, 2)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(muon_step, "BATCH_ELEMENTS", most_elements)
        patched.setattr(muon_step, "small_elements", lambda device: small_elements)
        run(BatchedMuon(together, lr=0.02, ns_dtype="float32"), together, steps)
    for i, p in enumerate(alone):
        run(BatchedMuon([p], lr=0.02, ns_dtype="float32"), [p], [[step[i]] for step in steps])
    for p, q in zip(together, alone, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@settings(max_examples=20)
@given(rows=st.integers(2, 7), columns=st.integers(2, 7), seed=st.integers(0, 1000))
def test_update_rotates_with_its_gradient(rows: int, columns: int, seed: int) -> None:
    """The update of Q G R is Q (update of G) R for orthogonal Q and R."""
    generator = torch.Generator().manual_seed(seed)
    gradient = torch.randn(rows, columns, generator=generator)
    Q, R = (torch.linalg.qr(torch.randn(n, n, generator=generator))[0] for n in (rows, columns))
    moved = []
    for g in (gradient, Q @ gradient @ R):
        p = nn.Parameter(torch.zeros(rows, columns))
        run(BatchedMuon([p], lr=1.0, ns_dtype="float32"), [p], [[g]])
        moved.append(p.detach())
    torch.testing.assert_close(Q @ moved[0] @ R, moved[1], rtol=1e-3, atol=1e-4)


def test_on_a_gpu_small_matrices_share_a_batch_and_large_or_long_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon_step, "small_elements", lambda device: 64)
    found = [
        [tuple(matrix.param.shape) for matrix in batch]
        for batch in muon_step.batches(
            [
                muon_step.MuonMatrix(p, p, p, p)
                for p in matrices((4, 16), (12, 4), (4, 17), (4, 4), (3, 13), (16, 4), (3, 3), (5, 5))
            ],
            most_elements=1000,
        )
    ]
    assert found == [[(4, 4), (4, 16), (12, 4), (16, 4)], [(4, 17)], [(3, 13)], [(3, 3)], [(5, 5)]]


def test_update_has_singular_values_near_one() -> None:
    p = nn.Parameter(torch.zeros(32, 96))
    run(BatchedMuon([p], lr=1.0), [p], gradients_like([p], 1))
    values = torch.linalg.svdvals(p.detach())
    assert values.min() > 0.5
    assert values.max() < 1.3


@beside_torch
@pytest.mark.parametrize("direction", ["from torch", "to torch"])
def test_state_dicts_are_exchangeable_with_torch(direction: str) -> None:
    kinds = (torch.optim.Muon, BatchedMuon) if direction == "from torch" else (BatchedMuon, torch.optim.Muon)
    params = matrices((6, 10), (10, 6))
    steps = gradients_like(params, 4)
    options = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.3, "adjust_lr_fn": "match_rms_adamw"}
    first = kinds[0](params, **options)
    run(first, params, steps[:2])
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second = kinds[1](params, lr=1.0)
    second.load_state_dict(torch.load(buffer, weights_only=True))
    for p in params:
        assert torch.equal(first.state[p]["momentum_buffer"], second.state[p]["momentum_buffer"])
    for key, value in options.items():
        assert second.param_groups[0][key] == value
    run(second, params, steps[2:])


@beside_torch
def test_the_live_group_keeps_options_that_a_torch_file_lacks() -> None:
    params = matrices((3, 4), (4, 3))
    groups = [{"params": params[:1], "ns_dtype": "float32"}, {"params": params[1:], "capturable": True}]
    optimizer = BatchedMuon(groups)
    plain = torch.optim.Muon([{"params": params[:1]}, {"params": params[1:]}])
    optimizer.load_state_dict(plain.state_dict())
    assert [group["ns_dtype"] for group in optimizer.param_groups] == ["float32", "bfloat16"]
    assert [group["capturable"] for group in optimizer.param_groups] == [False, True]


def test_resumed_run_is_bitwise_equal() -> None:
    straight, resumed = matrices(*SHAPES), matrices(*SHAPES)
    steps = gradients_like(straight, 6)
    run(BatchedMuon(straight, lr=0.02), straight, steps)
    before = BatchedMuon(resumed, lr=0.02)
    run(before, resumed, steps[:3])
    after = BatchedMuon(resumed, lr=1.0)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    run(after, resumed, steps[3:])
    assert all(torch.equal(p, q) for p, q in zip(straight, resumed, strict=True))


def test_copies_and_pickles_continue_as_the_original() -> None:
    model = nn.Linear(5, 3, bias=False)
    optimizer = BatchedMuon(model.parameters(), lr=0.02)
    steps = gradients_like(list(model.parameters()), 2)
    run(optimizer, list(model.parameters()), steps[:1])
    copies = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    run(optimizer, list(model.parameters()), steps[1:])
    for other_model, other in copies:
        run(other, list(other_model.parameters()), steps[1:])
        assert torch.equal(other_model.weight, model.weight)


def test_creating_the_state_before_the_first_step_changes_nothing() -> None:
    early, late = matrices((4, 6)), matrices((4, 6))
    steps = gradients_like(early, 2)
    optimizer = BatchedMuon(early, lr=0.02)
    optimizer.make_state()
    assert list(optimizer.state[early[0]]) == ["momentum_buffer"]
    run(optimizer, early, steps)
    run(BatchedMuon(late, lr=0.02), late, steps)
    assert torch.equal(early[0], late[0])


def test_tensor_lr_equals_a_number_and_follows_its_changes() -> None:
    number, tensor = matrices(*SHAPES), matrices(*SHAPES)
    steps = gradients_like(number, 4)
    lr = torch.tensor(0.02)
    of_number, of_tensor = BatchedMuon(number, lr=0.02), BatchedMuon(tensor, lr=lr, capturable=True)
    run(of_number, number, steps[:2])
    run(of_tensor, tensor, steps[:2])
    of_number.param_groups[0]["lr"] = 0.01
    lr.fill_(0.01)
    run(of_number, number, steps[2:])
    run(of_tensor, tensor, steps[2:])
    for p, q in zip(number, tensor, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_schedulers_and_closures_work_as_with_torch() -> None:
    p = nn.Parameter(torch.zeros(3, 4))
    p.grad = torch.ones_like(p)
    optimizer = BatchedMuon([p], lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    assert optimizer.step(lambda: 7.0) == 7.0
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_matrices_without_a_gradient_or_with_a_zero_gradient() -> None:
    params = matrices((3, 4), (3, 4), (4, 3))
    starts = [p.detach().clone() for p in params]
    optimizer = BatchedMuon(params, lr=0.1, weight_decay=0.0)
    params[0].grad = torch.zeros(3, 4)
    params[2].grad = torch.ones(4, 3)
    optimizer.step()
    assert torch.equal(params[0], starts[0])
    assert torch.equal(params[1], starts[1])
    assert not optimizer.state[params[1]]
    assert not torch.equal(params[2], starts[2])


def test_a_nan_spoils_its_own_matrix_and_no_other() -> None:
    params = matrices((3, 4), (3, 4))
    steps = gradients_like(params, 1)
    steps[0][0][1, 2] = math.nan
    run(BatchedMuon(params), params, steps)
    assert params[0].isnan().all()
    assert params[1].isfinite().all()


def test_gradients_are_not_modified() -> None:
    params = matrices((3, 4), (4, 3))
    steps = gradients_like(params, 1)
    run(BatchedMuon(params), params, steps)
    for p, gradient in zip(params, steps[0], strict=True):
        assert torch.equal(p.grad, gradient)


def test_transposed_parameters_are_updated_in_place() -> None:
    base = torch.zeros(4, 6)
    p = nn.Parameter(base.T)
    twin = nn.Parameter(torch.zeros(6, 4))
    steps = gradients_like([p], 2)
    run(BatchedMuon([p], ns_dtype="float32"), [p], steps)
    run(BatchedMuon([twin], ns_dtype="float32"), [twin], steps)
    torch.testing.assert_close(base.T, twin.detach())


def test_grad_scaler_unscales_before_the_step_and_skips_infinite_gradients() -> None:
    scaled, plain = matrices((4, 6)), matrices((4, 6))
    gradient = gradients_like(plain, 1)[0][0]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = BatchedMuon(scaled, lr=0.1)
    scaler.scale((scaled[0] * gradient).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    run(BatchedMuon(plain, lr=0.1), plain, [[gradient]])
    torch.testing.assert_close(scaled[0], plain[0])
    before = scaled[0].detach().clone()
    optimizer.zero_grad()
    scaler.scale((scaled[0] * math.inf).sum()).backward()
    scaler.step(optimizer)
    assert torch.equal(scaled[0], before)


def test_compiled_step_equals_the_eager_one() -> None:
    compiled, eager = matrices((4, 6), (6, 4), (5, 5)), matrices((4, 6), (6, 4), (5, 5))
    steps = gradients_like(eager, 3)
    optimizer = BatchedMuon(compiled, lr=torch.tensor(0.02), capturable=True, ns_dtype="float32")
    step = torch.compile(optimizer.step, backend="aot_eager")
    for gradients in steps:
        for p, gradient in zip(compiled, gradients, strict=True):
            p.grad = gradient.clone()
        step()
    run(BatchedMuon(eager, lr=0.02, ns_dtype="float32"), eager, steps)
    for p, q in zip(compiled, eager, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ns_dtype", ["bfloat16", "float32"])
def test_temporary_memory_depends_on_the_batch_and_not_on_the_number_of_matrices(
    ns_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muon_step, "BATCH_ELEMENTS", 4 * 64 * 256)
    peaks = []
    for count in (16, 64):
        params = matrices(*[(64, 256), (256, 64)] * (count // 2))
        optimizer = BatchedMuon(params, ns_dtype=ns_dtype)
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        peaks.append(peak_bytes(optimizer.step))
    assert peaks[1] <= 4 * (4 * 4 * 64 * 256)  # four times a batch in float32
    assert peaks[1] < 1.1 * peaks[0]


@pytest.mark.parametrize("shape", [(3,), (), (2, 3, 4)])
def test_a_tensor_that_is_not_a_matrix_is_named(shape: tuple[int, ...]) -> None:
    named = [("w", nn.Parameter(torch.zeros(2, 3))), ("odd.weight", nn.Parameter(torch.zeros(shape)))]
    with pytest.raises(ValueError, match=r"odd\.weight"):
        BatchedMuon(named)
    with pytest.raises(ValueError, match="tensor 0"):
        BatchedMuon([nn.Parameter(torch.zeros(shape))])


def test_a_refused_group_is_not_added() -> None:
    optimizer = BatchedMuon(matrices((2, 3)))
    with pytest.raises(ValueError, match="group 1"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lr", -1.0),
        ("lr", torch.tensor([1.0, 2.0])),
        ("weight_decay", -0.1),
        ("momentum", 1.0),
        ("momentum", -0.1),
        ("eps", -1.0),
        ("ns_steps", 0),
        ("ns_steps", 100),
        ("ns_coefficients", (1.0, 2.0)),
        ("adjust_lr_fn", "moonshot"),
        ("ns_dtype", "float16"),
    ],
)
def test_an_invalid_option_is_named(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=option):
        BatchedMuon(matrices((2, 3)), **{option: value})


def test_complex_matrices_and_sparse_gradients_are_refused() -> None:
    with pytest.raises(ValueError, match="complex"):
        BatchedMuon([("w", nn.Parameter(torch.zeros(2, 3, dtype=torch.complex64)))])
    p = nn.Parameter(torch.zeros(2, 3))
    p.grad = torch.zeros(2, 3).to_sparse()
    with pytest.raises(ValueError, match="sparse"):
        BatchedMuon([p]).step()
