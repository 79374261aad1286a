"""Batches: pure functions of (seed, step, sample) on any ranks; every window once per epoch; uniform starts."""

import itertools
import pickle
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from coupled_adam.base.errors import UserError
from coupled_adam.data.batches import Batches, mix, permuted
from coupled_adam.data.tokens import Tokens

V = 50257


def tokens_of(folder: Path, lengths: list[int], dtype: str = "uint16") -> Tokens:
    """Shards of the given lengths; token k of the whole is k."""
    paths, start = [], 0
    for number, length in enumerate(lengths):
        paths.append(folder / f"{dtype}-{len(lengths)}-{number}.bin")
        np.arange(start, start + length).astype(np.dtype(dtype).newbyteorder("<")).tofile(paths[-1])
        start += length
    return Tokens(paths, dtype, V, "the split")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    return tokens_of(tmp_path_factory.mktemp("shards"), [1000, 7, 1, 350, 642])


@pytest.mark.parametrize("order", ["random", "epochs"])
@given(data=st.data())
@settings(max_examples=60)
def test_samples_do_not_depend_on_how_the_batch_is_split(shards: Tokens, order: str, data: st.DataObject) -> None:
    batch_size = data.draw(st.integers(1, 40))
    context = data.draw(st.integers(1, 300))
    step = data.draw(st.one_of(st.integers(0, 200), st.integers(2**40, 2**41)))
    seed = data.draw(st.integers(0, 2**64 - 1))
    whole = Batches(shards, context, batch_size, seed, order).samples(step, 0, batch_size)
    assert whole.shape == (batch_size, context + 1)
    assert whole.dtype == torch.int64
    # Tokens count upwards, so every window shows its start and that nothing is missing.
    assert torch.equal(whole, whole[:, :1] + torch.arange(context + 1))
    cuts = sorted(data.draw(st.lists(st.integers(0, batch_size), max_size=6)))
    bounds = itertools.pairwise([0, *cuts, batch_size])
    # New objects, as on other ranks and in resumed runs.
    parts = [Batches(shards, context, batch_size, seed, order).samples(step, start, stop) for start, stop in bounds]
    assert torch.equal(torch.cat(parts), whole)


@given(st.integers(1, 2500), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
@settings(max_examples=150)
def test_the_shuffle_is_a_permutation_of_any_size(size: int, key: int, other: int) -> None:
    places = np.arange(size, dtype=np.uint64)
    found = permuted(places, size, np.full(size, key, np.uint64))
    assert np.array_equal(np.sort(found), places)
    if size > 30 and key != other:
        assert not np.array_equal(found, permuted(places, size, np.full(size, other, np.uint64)))


@given(windows=st.integers(1, 400), context=st.integers(1, 5), batch_size=st.integers(1, 70), seed=st.integers(0, 999))
@settings(max_examples=30)
def test_every_window_is_seen_once_per_epoch(
    tmp_path_factory: pytest.TempPathFactory, windows: int, context: int, batch_size: int, seed: int
) -> None:
    left_over = seed % context
    tokens = tokens_of(tmp_path_factory.mktemp("epoch"), [windows * context + 1 + left_over])
    batches = Batches(tokens, context, batch_size, seed, "epochs")
    steps = -(-3 * windows // batch_size)
    seen = torch.cat([batches.samples(step, 0, batch_size) for step in range(steps)])[:, 0].tolist()
    epochs = [seen[start : start + windows] for start in range(0, 3 * windows, windows)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(0, windows * context, context))
    if windows > 30:
        assert epochs[0] != epochs[1] != epochs[2]
        assert epochs[0] != sorted(epochs[0])
        other = Batches(tokens, context, windows, seed + 1, "epochs").samples(0, 0, windows)[:, 0].tolist()
        assert other != epochs[0]


def test_random_starts_are_uniform_and_independent(tmp_path: Path) -> None:
    places, context = 250, 10
    batches = Batches(tokens_of(tmp_path, [places + context]), context, 500, seed=7)
    starts = torch.stack([batches.samples(step, 0, 500)[:, 0] for step in range(100)])  # (steps, B)
    assert stats.chisquare(np.bincount(starts.flatten(), minlength=places)).pvalue > 0.001
    # Neighbours in the batch, in time and in the seed are independent.
    other = Batches(batches.tokens, context, 500, seed=8)
    seeds = torch.stack([other.samples(step, 0, 500)[:, 0] for step in range(100)])
    for pair in ((starts[:, 1:], starts[:, :-1]), (starts[1:], starts[:-1]), (starts, seeds)):
        assert stats.pearsonr(pair[0].flatten(), pair[1].flatten()).pvalue > 0.001
    # The last start is the last position where a window fits.
    assert starts.min() == 0
    assert starts.max() == places - 1


def test_the_shuffle_puts_every_window_equally_often_at_every_place() -> None:
    size, epochs = 13, 6500
    keys = mix(np.arange(epochs, dtype=np.uint64))
    counts = np.zeros((size, size))
    for place in range(size):
        found = permuted(np.full(epochs, place, np.uint64), size, keys)
        counts[place] = np.bincount(found.astype(np.int64), minlength=size)
    assert stats.chisquare(counts.flatten()).pvalue > 0.001


def test_the_numbers_match_splitmix64() -> None:
    """The first outputs for the seed 1234567, as in the public reference implementation."""
    state = np.uint64(1234567) + np.arange(3, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert mix(state).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def splitmix(state: int) -> int:
    """SplitMix64 with Python integers."""
    state = (state + 0x9E3779B97F4A7C15) % 2**64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % 2**64
    return state ^ (state >> 31)


def feistel(cell: int, rows: int, columns: int, key: int) -> int:
    row, column = divmod(cell, columns)
    for number in (0, 2, 4, 6):
        row = (row + splitmix((splitmix((key + number) % 2**64) + column) % 2**64)) % rows
        column = (column + splitmix((splitmix((key + number + 1) % 2**64) + row) % 2**64)) % columns
    return row * columns + column


def test_batches_never_change_between_versions(shards: Tokens) -> None:
    """A run may resume after an update of this package, so the order of the data is part of the format."""
    context, batch_size, seed = 7, 5, 2**63 + 11
    windows = (2000 - 1) // context
    rows, columns = 17, 17  # the smallest square with at least 285 cells, without an unused column
    for step in (0, 1, 56, 57, 58, 10**12):
        starts, epoch_starts = [], []
        for sample in range(batch_size):
            number = splitmix((splitmix((splitmix(seed) + step) % 2**64) + sample) % 2**64)
            starts.append(number % (2000 - context))
            epoch, place = divmod(step * batch_size + sample, windows)
            key = splitmix((2**64 - 1 - splitmix(seed) + epoch) % 2**64)
            place = feistel(place, rows, columns, key)
            while place >= windows:
                place = feistel(place, rows, columns, key)
            epoch_starts.append(place * context)
        assert Batches(shards, context, batch_size, seed).samples(step, 0, batch_size)[:, 0].tolist() == starts
        epochs = Batches(shards, context, batch_size, seed, "epochs")
        assert epochs.samples(step, 0, batch_size)[:, 0].tolist() == epoch_starts


@pytest.mark.parametrize(("start", "length"), [(0, 2000), (998, 12), (1000, 7), (1007, 1), (5, 0), (1999, 1), (999, 2)])
def test_reading_crosses_shards(shards: Tokens, start: int, length: int) -> None:
    assert len(shards) == 2000
    assert shards.read(start, length).tolist() == list(range(start, start + length))


@pytest.mark.parametrize(("start", "length"), [(0, 2001), (2000, 1), (-1, 1), (5, -1)])
def test_reading_beyond_the_end_is_refused(shards: Tokens, start: int, length: int) -> None:
    with pytest.raises(UserError, match=rf"the split: .* {start} .* {start + length}\b.*\b2000\b"):
        shards.read(start, length)


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "int64"])
def test_all_number_types_are_read(tmp_path: Path, dtype: str) -> None:
    tokens = tokens_of(tmp_path, [40, 3, 50000], dtype)
    assert tokens.read(30, 40).tolist() == list(range(30, 70))
    assert tokens.windows(np.array([30, 0, 50000]), 15).tolist() == [list(range(s, s + 15)) for s in (30, 0, 50000)]


def test_a_token_beyond_the_vocabulary_is_refused_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    np.array([*range(100), V], "<u2").tofile(path)
    tokens = Tokens([path], "uint16", V, "data/x, split train")
    assert tokens.read(0, 100).max() == 99
    with pytest.raises(UserError, match=r"data/x, split train: .*token 50257\b.*\b50257 tokens"):
        Batches(tokens, 100, 1, seed=0).samples(0, 0, 1)


def test_a_split_shorter_than_a_window_is_refused(tmp_path: Path) -> None:
    tokens = tokens_of(tmp_path, [64])
    for order in ("random", "epochs"):
        assert Batches(tokens, 63, 3, 0, order).samples(5, 0, 3)[:, 0].tolist() == [0, 0, 0]
        with pytest.raises(UserError, match=r"the split: .*\b64 tokens.*context 64\b.*\b65\b"):
            Batches(tokens, 64, 3, 0, order)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"context": 0}, r"context\b.* 0\b.*batch_size\b.* 4\b"),
        ({"batch_size": 0}, r"context\b.* 8\b.*batch_size\b.* 0\b"),
        ({"order": "shuffled"}, "order.*'shuffled'.*random, epochs"),
    ],
)
def test_bad_arguments_are_refused(shards: Tokens, arguments: dict[str, object], named: str) -> None:
    with pytest.raises(UserError, match=named):
        Batches(**{"tokens": shards, "context": 8, "batch_size": 4, "seed": 0, **arguments})


@pytest.mark.parametrize("samples", [(-1, 0, 4), (0, -1, 4), (0, 3, 2), (0, 0, 5)])
def test_samples_outside_the_batch_are_refused(shards: Tokens, samples: tuple[int, int, int]) -> None:
    with pytest.raises(UserError, match=r"step >= 0\b.*0 <= start <= stop <= batch_size = 4"):
        Batches(shards, 8, 4, seed=0).samples(*samples)


def test_no_samples_are_an_empty_tensor(shards: Tokens) -> None:
    assert Batches(shards, 8, 4, seed=0).samples(3, 2, 2).shape == (0, 9)


def test_pickling_for_another_process_sends_file_names_and_not_tokens(tmp_path: Path) -> None:
    tokens = tokens_of(tmp_path, [30000, 10])
    packed = pickle.dumps(tokens)
    assert len(packed) < 1000
    assert pickle.loads(packed).read(29995, 10).tolist() == list(range(29995, 30005))


@pytest.mark.parametrize("order", ["random", "epochs"])
@pytest.mark.parametrize("shard_count", [1, 50])
def test_a_batch_takes_about_a_millisecond(tmp_path: Path, order: str, shard_count: int) -> None:
    tokens = tokens_of(tmp_path, [50000 // shard_count] * shard_count)
    batches = Batches(tokens, 1024, 96, 0, order)
    times = []
    for step in range(50):
        started = time.perf_counter()
        batches.samples(step, 0, 96)
        times.append(time.perf_counter() - started)
    # 0.2 ms on an idle machine; the best of many, because this machine may be busy.
    assert min(times) < 2e-3
