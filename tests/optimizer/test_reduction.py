"""Sums over ranks: one message per process group, for any sharding."""

from typing import Any

import pytest
import torch
from torch import Tensor

from coupled_adam.optimizer.sharding import PartialSum, Reduction


class Delivered:
    def wait(self) -> None:
        pass


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Record the messages in a world where every group has two ranks with equal values."""
    messages: list[tuple[str, int]] = []

    def all_reduce(message: Tensor, group: Any, async_op: bool) -> Delivered:
        assert async_op
        messages.append((group, message.numel()))
        message.mul_(2)
        return Delivered()

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    return messages


def test_each_group_gets_one_message_and_each_sum_is_reduced_over_all_its_groups(sent: list[tuple[str, int]]) -> None:
    by_tensor = PartialSum(torch.ones(1, 3), ("tp",))
    by_both = PartialSum(torch.ones(1, 4), ("dp", "tp"))
    by_data = PartialSum(torch.ones(()), ("dp",))
    local = PartialSum(torch.ones(2), ())
    Reduction([by_tensor, by_both, by_data, local]).wait()
    assert sorted(sent) == [("dp", 5), ("tp", 7)]
    assert by_tensor.values.tolist() == [[2.0] * 3]
    assert by_both.values.tolist() == [[4.0] * 4]
    assert by_data.values.item() == 2.0
    assert local.values.tolist() == [1.0, 1.0]


def test_sums_beyond_float32_are_sent_together_with_float32_ones(sent: list[tuple[str, int]]) -> None:
    wide, narrow = (
        PartialSum(torch.full((1, 2), 1e60, dtype=torch.float64), ("dp",)),
        PartialSum(torch.ones(3), ("dp",)),
    )
    Reduction([narrow, wide]).wait()
    assert sent == [("dp", 5)]
    assert wide.values.tolist() == [[2e60, 2e60]]
    assert narrow.values.tolist() == [2.0] * 3
    assert (wide.values.dtype, narrow.values.dtype) == (torch.float64, torch.float32)


def test_independent_messages_are_sent_at_the_same_time(sent: list[tuple[str, int]]) -> None:
    reduction = Reduction([PartialSum(torch.ones(2), ("dp",)), PartialSum(torch.ones(3), ("tp",))])
    assert sent == [("dp", 2), ("tp", 3)]
    reduction.wait()
    reduction.wait()
    assert len(sent) == 2
