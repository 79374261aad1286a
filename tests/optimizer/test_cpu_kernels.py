"""The CPU implementation: compiled loops if numba is installed, and threads that share the rows of a table."""

import copy
import importlib
import itertools
import multiprocessing
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from call_counts import counted
from oracle import assert_matches, coupled, gradients, oracle, run, table
from torch import Tensor, nn

from coupled_adam.optimizer import blockwise, family_blockwise, row_threads
from coupled_adam.optimizer.table import Hyperparameters, Table

SHAPE = (301, 37)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1e6}, {"lr": torch.tensor(0.1)}, {"capturable": True}])
def test_large_contiguous_tables_use_the_compiled_loops(
    numba_loops: ModuleType, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], dtype: torch.dtype
) -> None:
    calls = counted(monkeypatch, numba_loops, ("column_square_sums", "apply_update"))
    param, grads = table(SHAPE, dtype), gradients(SHAPE, 3, dtype)
    expected = oracle(param, grads, lr=float(options.get("lr", 1e-3)))
    optimizer = coupled(param, **options)
    run(optimizer, param, grads)
    assert_matches(optimizer, param, expected)
    assert calls == ["column_square_sums", "apply_update"] * 3


@pytest.mark.parametrize("kind", ["float16", "float64", "transposed table", "transposed gradient", "small"])
def test_tables_that_the_loops_do_not_support_use_torch_operations(
    numba_loops: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    dtype = getattr(torch, kind) if kind.startswith("float") else torch.float32
    param, grads = table(SHAPE, dtype), gradients(SHAPE, 3, dtype)
    if kind == "transposed table":
        param = nn.Parameter(param.detach().t().contiguous().t())
    if kind == "transposed gradient":
        grads = [grad.t().contiguous().t() for grad in grads]
    if kind == "small":
        monkeypatch.setattr(blockwise, "NUMBA_ELEMENTS", param.numel() + 1)
    calls = counted(monkeypatch, numba_loops, ("column_square_sums", "apply_update"))
    expected = oracle(param, grads)
    optimizer = coupled(param)
    for grad in grads:
        param.grad = grad
        optimizer.step()
    assert_matches(optimizer, param, expected)
    assert "apply_update" not in calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("loops", ["numba", "torch operations"])
def test_a_step_gives_the_same_bits_for_any_number_of_threads(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    threads: Callable[[int], None],
    loops: str,
    dtype: torch.dtype,
) -> None:
    """The order of summation must not depend on the number or the speed of the threads."""
    if loops == "numba":
        request.getfixturevalue("numba_loops")
    else:
        monkeypatch.setattr(blockwise, "NUMBA_ELEMENTS", sys.maxsize)
        monkeypatch.setattr(blockwise, "ONE_THREAD_ELEMENTS", 5 * SHAPE[1])
    results = []
    for number in (1, 2, 2, 2, 5):
        threads(number)
        param = table(SHAPE, dtype)
        optimizer = coupled(param, max_grad_norm=0.1)
        grads = gradients(SHAPE, 5, dtype)
        run(optimizer, param, grads)
        # The float32 state would hide differences in a float64 sum.
        results.append((blockwise.column_square_sums(grads[0]), param.detach(), *optimizer.state[param].values()))
    for result in results[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(result, results[0], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
def test_a_partially_coupled_step_gives_the_same_bits_for_any_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
    threads: Callable[[int], None],
    max_grad_norm: float | None,
    dtype: torch.dtype,
) -> None:
    monkeypatch.setattr(blockwise, "NUMBA_ELEMENTS", sys.maxsize)
    monkeypatch.setattr(family_blockwise, "BLOCK_ELEMENTS", 5 * SHAPE[1])
    results = []
    for number in (1, 2, 2, 5):
        threads(number)
        param = table(SHAPE, dtype)
        optimizer = coupled(param, max_grad_norm=max_grad_norm, row_exponent=0.25, mean_free=True)
        run(optimizer, param, gradients(SHAPE, 5, dtype))
        results.append((param.detach(), *optimizer.state[param].values()))
    for result in results[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(result, results[0], strict=True))


def test_bfloat16_is_rounded_as_torch_rounds_it(numba_loops: ModuleType) -> None:
    """To nearest, ties to even; also next to overflow, among the smallest numbers, and NaN."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**15), 2**15, (512, 128), generator=generator, dtype=torch.int32).to(torch.int16)
    grad = bits.view(torch.bfloat16).clone()  # all kinds of numbers, including NaN
    grad[grad.isinf()] = torch.finfo(torch.bfloat16).max
    coefficient = (torch.randint(1, 2**16, (1, 128), generator=generator) / 2**15).float()
    exp_avg, param = torch.zeros_like(grad), torch.zeros_like(grad)
    hyper = Hyperparameters(1.0, 0.0, 0.5, 0.0, 0.0, 1.0, False)
    whole = Table(512, param, grad, exp_avg, torch.zeros(1, 128), torch.tensor(1.0), hyper, 128, 512)
    numba_loops.apply_update(whole, coefficient, 1.0)
    torch.testing.assert_close(exp_avg, grad, rtol=0, atol=0, equal_nan=True)
    expected = (coefficient * grad.float()).bfloat16()
    torch.testing.assert_close(param, expected, rtol=0, atol=0, equal_nan=True)
    assert param.isnan().any()
    assert param.isinf().any()


def test_gradients_are_not_written(numba_loops: ModuleType) -> None:
    param = table(SHAPE)
    optimizer = coupled(param, max_grad_norm=1e-3, maximize=True)
    param.grad = gradients(SHAPE, 1)[0]
    before = param.grad.clone()
    optimizer.step()
    assert torch.equal(param.grad, before)


def test_autograd_notices_that_a_table_was_written(numba_loops: ModuleType) -> None:
    param = table(SHAPE)
    optimizer = coupled(param)
    loss = param.square().sum()  # saves the table for the backward pass
    param.grad = gradients(SHAPE, 1)[0]
    optimizer.step()
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


def test_a_step_works_in_inference_mode(numba_loops: ModuleType) -> None:
    with torch.inference_mode():
        param = table(SHAPE)
        grads = gradients(SHAPE, 2)
        expected = oracle(param, grads)
        optimizer = coupled(param)
        run(optimizer, param, grads)
        assert_matches(optimizer, param, expected)


def test_a_forked_process_can_take_a_step(numba_loops: ModuleType) -> None:
    """Threads do not survive a fork: a child that waits for its parent's threads would hang."""
    param, grads = table(SHAPE), gradients(SHAPE, 2)
    optimizer = coupled(param)
    row_threads.run_on_threads(lambda: None, 3)
    run(optimizer, param, grads[:1])
    child_result = torch.zeros(SHAPE).share_memory_()

    def child() -> None:
        run(optimizer, param, grads[1:])
        child_result.copy_(param.detach())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking a process with threads
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
    process.join(60)
    if process.is_alive():
        process.kill()
    assert process.exitcode == 0
    run(optimizer, param, grads[1:])
    assert torch.equal(child_result, param.detach())


def test_an_error_in_any_thread_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        row_threads.run_on_threads(lambda: 1 / 0, 3)
    elsewhere = threading.Event()

    def fails_in_another_thread() -> None:
        if threading.current_thread() is threading.main_thread():
            elsewhere.wait(60)
            return
        elsewhere.set()
        raise KeyError("elsewhere")

    with pytest.raises(KeyError):
        row_threads.run_on_threads(fails_in_another_thread, 2)


def test_small_tables_do_not_import_numba() -> None:
    """Neither does importing the package; numba takes a second to load."""
    pytest.importorskip("numba")
    program = """
import sys, torch
from coupled_adam import CoupledAdamW
for rows in (1000, 70_000):
    table = torch.nn.Parameter(torch.zeros(rows, 64))
    table.grad = torch.ones_like(table)
    CoupledAdamW([{"params": [table], "coupled": True}]).step()
    print("numba" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "True"]


THREE_STEPS = """
import warnings
from oracle import assert_matches, coupled, gradients, oracle, run, table
from coupled_adam.optimizer import blockwise
blockwise.NUMBA_ELEMENTS = 1
param, grads = table((301, 37)), gradients((301, 37), 3)
expected, optimizer = oracle(param, grads), coupled(param)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    run(optimizer, param, grads)
assert_matches(optimizer, param, expected)
for warning in caught:
    print(warning.category.__name__, warning.message)
print("loops" if "coupled_adam.optimizer.numba_kernels" in sys.modules else "operations")
"""


def three_steps_after(preparation: str) -> str:
    """Return the output of three steps, checked against the oracle, in a process that first runs other code."""
    program = f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n{preparation}\n{THREE_STEPS}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_numba_torch_operations_are_used_silently() -> None:
    assert three_steps_after("sys.modules['numba'] = None") == "operations\n"


def test_a_broken_numba_is_reported_once() -> None:
    pytest.importorskip("numba")
    said = three_steps_after("sys.modules['numba.extending'] = None")
    assert re.fullmatch(r"UserWarning .*numba\.extending.*\noperations\n", said)


@pytest.mark.parametrize("trouble", ["no folder", "full disk"])
def test_compiled_loops_run_even_if_they_cannot_be_cached_on_disk(
    numba_loops: ModuleType, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    caching = pytest.importorskip("numba.core.caching")

    def fails(*_: Any) -> Any:
        raise RuntimeError("no locator available") if trouble == "no folder" else OSError(28, "No space left on device")

    if trouble == "no folder":
        monkeypatch.setattr(caching.FunctionCache, "__init__", fails)
    else:
        monkeypatch.setattr(caching.IndexDataCacheFile, "load", lambda *_: None)
        monkeypatch.setattr(caching.IndexDataCacheFile, "save", fails)
    param, grads = table(SHAPE), gradients(SHAPE, 2)
    expected = oracle(param, grads)
    optimizer = coupled(param)
    try:
        importlib.reload(numba_loops)  # compiles its loops again
        calls = counted(monkeypatch, numba_loops, ("column_square_sums", "apply_update"))
        run(optimizer, param, grads)
    finally:
        monkeypatch.undo()
        importlib.reload(numba_loops)
    assert_matches(optimizer, param, expected)
    assert calls == ["column_square_sums", "apply_update"] * 2


def test_a_cached_loop_is_compiled_again_if_the_code_it_shares_with_others_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numba_elements = pytest.importorskip("coupled_adam.optimizer.numba_elements")
    assert numba_elements.__file__ in numba_elements.SHARED_FILES
    shared = tmp_path / "shared.py"
    monkeypatch.setattr(numba_elements, "SHARED_FILES", (str(shared),))
    monkeypatch.syspath_prepend(tmp_path)
    name = f"loops_of_{tmp_path.name}"
    imports = "from coupled_adam.optimizer.numba_elements import compiled_loop"
    (tmp_path / f"{name}.py").write_text(f"{imports}\n@compiled_loop\ndef loop(x):\n    return x\n")

    def is_cached() -> bool:
        sys.modules.pop(name, None)
        loop = importlib.import_module(name).loop
        assert loop(2.0) == 2.0
        return bool(loop.stats.cache_hits)

    shared.write_text("FACTOR = 1")
    assert [is_cached(), is_cached()] == [False, True]
    shared.write_text("FACTOR = 2")
    assert [is_cached(), is_cached()] == [False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(60_000, 256), (2048, 768), (401, 64), (3, 5000)], ids=str)
def test_partial_sums_of_the_loops_stay_within_the_memory_limit(
    numba_loops: ModuleType, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    monkeypatch.undo()  # pieces of the usual size
    made: list[int] = []
    empty = torch.empty

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        tensor = empty(*args, **kwargs)
        made.append(tensor.numel() * tensor.itemsize)
        return tensor

    grad = torch.ones(shape, dtype=dtype)
    monkeypatch.setattr(torch, "empty", watched)
    sums = numba_loops.column_square_sums(grad)
    assert sums.tolist() == [[shape[0]] * shape[1]]
    assert sum(made) <= min(grad.numel() * grad.itemsize / 4, 6 * 2**20) + 64 * shape[1]


def test_concurrent_threads_stay_within_the_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    for shape, dtype, temporaries, elements in itertools.product(
        [(60_000, 256), (2048, 768), (401, 64), (1, 1), (5, 40_000), (300_000, 4096)],
        [torch.float32, torch.bfloat16, torch.float64],
        [1, 2, 3],
        [None, family_blockwise.BLOCK_ELEMENTS],
    ):
        whole = torch.empty(1, dtype=dtype).expand(shape)
        rows, threads = blockwise.blocks_at_a_time(whole, 4 * temporaries, elements)
        scratch = rows * threads * shape[1] * 4 * temporaries
        a_row = shape[1] * 4 * temporaries
        assert scratch <= min(whole.numel() * whole.itemsize / 4 + a_row, max(6 * 2**20, a_row))


@pytest.mark.parametrize("size", [1.0, 1e10, 1e19, 3e38])
@pytest.mark.parametrize("loops", ["numba", "torch operations", "compiled operations"])
def test_column_sums_of_finite_gradients_are_finite_and_exact(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, loops: str, size: float
) -> None:
    if loops == "numba":
        request.getfixturevalue("numba_loops")
    if loops == "compiled operations":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    grad = torch.rand(SHAPE, generator=torch.Generator().manual_seed(0)) * size
    grad[:, :5] /= size  # columns that do not overflow float32, next to those that do
    grad[::2, 5:9] /= size  # both in one column
    sums = blockwise.column_square_sums(grad)
    assert sums.dtype == torch.float64
    torch.testing.assert_close(sums.sum(0), grad.double().square().sum(0), rtol=1e-6, atol=0)
    grad[3, 1], grad[4, 20] = float("nan"), float("inf")
    sums = blockwise.column_square_sums(grad).sum(0)
    assert sums[1].isnan()
    assert sums[20].isinf()
    assert sums.isfinite().sum() == SHAPE[1] - 2


@pytest.mark.parametrize("loops", ["numba", "torch operations"])
@pytest.mark.parametrize("size", [1e19, 5e20])
def test_after_a_spike_updates_follow_algorithm_1(request: pytest.FixtureRequest, loops: str, size: float) -> None:
    """The spike is small enough for AdamW's own second moment to stay finite."""
    if loops == "numba":
        request.getfixturevalue("numba_loops")
    param, grads = table(SHAPE), gradients(SHAPE, 4)
    grads[0] = grads[0].sign() * size
    expected = oracle(param, grads)
    optimizer = coupled(param)
    run(optimizer, param, grads)
    assert_matches(optimizer, param, expected)


@pytest.mark.slow
def test_a_compiled_step_survives_a_spike() -> None:
    param, grads = table(SHAPE), gradients(SHAPE, 3)
    grads[1] = grads[1].sign() * 1e20
    eager = copy.deepcopy(param)
    optimizers = [coupled(param), coupled(eager)]
    torch._dynamo.reset()
    steps = [torch.compile(optimizers[0].step), optimizers[1].step]
    for grad in grads:
        param.grad, eager.grad = grad.clone(), grad.clone()
        for step in steps:
            step()
    torch.testing.assert_close(param, eager, rtol=1e-5, atol=1e-7)
    assert optimizers[0].state[param]["exp_avg_sq"].isfinite().all()
