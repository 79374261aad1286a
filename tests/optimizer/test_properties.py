"""Invariants of Coupled Adam for any gradients."""

import itertools

import hypothesis.strategies as st
import torch
from hypothesis import given
from hypothesis.extra.numpy import arrays
from oracle import coupled, oracle, relative_error, run
from torch import Tensor, nn

from coupled_adam.optimizer import blockwise
from coupled_adam.optimizer.table import Hyperparameters, Table

ROWS, COLUMNS = 12, 3
# Zero, or large enough that its square does not vanish in float32.
numbers = st.floats(-100, 100, width=32).filter(lambda x: x == 0 or abs(x) > 1e-3)
gradient_lists = st.lists(arrays("float32", (ROWS, COLUMNS), elements=numbers), min_size=1, max_size=4).map(
    lambda values: [torch.from_numpy(value) for value in values]
)
exponents = st.floats(-5, 5)


def trained(grads: list[Tensor], **options: float) -> Tensor:
    param = nn.Parameter(torch.linspace(-1, 1, ROWS * COLUMNS).reshape(ROWS, COLUMNS).to(grads[0].dtype))
    run(coupled(param, lr=0.1, **options), param, grads)
    return param.detach()


@given(gradient_lists, exponents)
def test_sum_of_updates_vanishes_when_the_gradients_sum_to_zero(grads: list[Tensor], exponent: float) -> None:
    grads = [grad.double() - grad.double().mean(0, keepdim=True) for grad in grads]
    param = nn.Parameter(torch.zeros(ROWS, COLUMNS, dtype=torch.float64))
    optimizer = coupled(param, lr=0.1, scale_exponent=exponent)
    for grad in grads:
        before = param.detach().clone()
        run(optimizer, param, [grad])
        update = param.detach() - before
        assert update.sum(0).abs().max() <= 1e-9 * max(update.abs().max(), 1e-3)


def test_sum_of_updates_does_not_vanish_with_adamw() -> None:
    """The paper's point; it also proves that the test above can fail."""
    grad = torch.tensor([[3.0], [-1.0], [-2.0]])
    param = nn.Parameter(torch.zeros(3, 1))
    optimizer = torch.optim.AdamW([param], lr=0.1, weight_decay=0.0)
    run(optimizer, param, [grad])
    assert param.detach().sum().abs() > 0.05


@given(gradient_lists, st.permutations(range(ROWS)))
def test_permuted_vocabulary_gives_permuted_updates(grads: list[Tensor], order: list[int]) -> None:
    param = nn.Parameter(torch.zeros(ROWS, COLUMNS, dtype=torch.float64))
    permuted = nn.Parameter(torch.zeros(ROWS, COLUMNS, dtype=torch.float64))
    run(coupled(param), param, [grad.double() for grad in grads])
    run(coupled(permuted), permuted, [grad.double()[order] for grad in grads])
    torch.testing.assert_close(permuted.detach(), param.detach()[order], rtol=1e-9, atol=1e-12)


@given(gradient_lists, exponents)
def test_any_gradients_give_the_updates_of_algorithm_1(grads: list[Tensor], exponent: float) -> None:
    param = nn.Parameter(torch.linspace(-1, 1, ROWS * COLUMNS).reshape(ROWS, COLUMNS))
    expected = oracle(param, grads, lr=0.1, scale_exponent=exponent)
    run(coupled(param, lr=0.1, scale_exponent=exponent), param, grads)
    assert relative_error(param, expected.embeddings) < 1e-5


@given(gradient_lists, st.lists(st.integers(1, ROWS - 1), unique=True, max_size=4))
def test_sharded_table_is_updated_as_a_whole_one(grads: list[Tensor], cuts: list[int]) -> None:
    """Each shard is updated separately; only the column sums of squares are added over the shards."""
    sizes = [end - start for start, end in itertools.pairwise([0, *sorted(cuts), ROWS])]
    whole = nn.Parameter(torch.linspace(-1, 1, ROWS * COLUMNS, dtype=torch.float64).reshape(ROWS, COLUMNS))
    hyper = Hyperparameters(0.1, 0.9, 0.999, 1e-8, 0.0, 1.0, False)
    shards = [
        Table(
            rows=ROWS,
            param=part.clone(),
            grad=part,
            exp_avg=torch.zeros_like(part),
            exp_avg_sq=torch.zeros(1, COLUMNS, dtype=torch.float64),
            step=torch.tensor(0.0),
            hyper=hyper,
            width=COLUMNS,
            real_rows=len(part),
        )
        for part in whole.detach().split(sizes)
    ]
    for grad in grads:
        for shard, part in zip(shards, grad.double().split(sizes), strict=True):
            shard.grad = part
        sums = torch.cat([blockwise.column_square_sums(shard.grad) for shard in shards])
        for shard in shards:
            blockwise.apply_update(shard, blockwise.advance_second_moment(shard, sums, None), None)
    run(coupled(whole, lr=0.1), whole, [grad.double() for grad in grads])
    torch.testing.assert_close(torch.cat([shard.param for shard in shards]), whole.detach(), rtol=1e-10, atol=1e-12)


@given(gradient_lists)
def test_scale_exponent_two_doubles_the_step(grads: list[Tensor]) -> None:
    """2^-n under the square root: n = 2 halves the denominator, so the effective learning rate doubles."""
    start = trained([torch.zeros(ROWS, COLUMNS)])
    normal = trained(grads, eps=0.0) - start
    doubled = trained(grads, eps=0.0, scale_exponent=2.0) - start
    torch.testing.assert_close(doubled, 2 * normal, rtol=1e-4, atol=1e-5, equal_nan=True)
