"""The same config on one process, with DDP and with FSDP2: real processes that communicate through gloo."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_worker import OPTIMIZERS
from small_runs import ENVIRONMENT, TORCHRUN, assert_same_tensors, rows, saved_tensors, small_config, train

WORKER = Path(__file__).with_name("parallel_worker.py")

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs: on 2 ranks of torchrun, then on 4 forked ranks, which resume one of the former."""
    folder = tmp_path_factory.mktemp("runs")
    for start, ranks in (([*TORCHRUN, "2"], []), ([sys.executable], ["4"])):
        command = [*start, str(WORKER), str(corpus), str(folder), *ranks]
        done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return one_process(corpus, tmp_path_factory.mktemp("reference") / "one")


def one_process(corpus: Path, folder: Path, **sections: Any) -> Path:
    train(small_config(corpus, **sections), folder)
    return folder


def assert_same_curve(run: Path, reference: Path) -> None:
    """Assert equality up to rounding at every step."""
    ours, theirs = rows(run), rows(reference)
    assert [(row["kind"], row["step"]) for row in ours] == [(row["kind"], row["step"]) for row in theirs]
    for row, expected in zip(ours, theirs, strict=True):
        if row["kind"] in ("train", "val"):
            assert row["loss"] == pytest.approx(expected["loss"], rel=2e-5), row["step"]
        if row["kind"] == "train":
            assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-4), row["step"]
        if row["kind"] == "embeddings":
            assert row["mu_norm"] == pytest.approx(expected["mu_norm"], rel=1e-3, abs=1e-7)


@pytest.mark.parametrize("name", ["ddp-2", "ddp-4", "fsdp2-2", "fsdp2-4", "ddp-accumulated-2", "fsdp2-accumulated-2"])
def test_any_parallelism_gives_the_loss_curve_of_one_process(name: str, runs: Path, reference: Path) -> None:
    assert_same_curve(runs / name, reference)
    expected = saved_tensors(reference)
    for tensor_name, tensor in saved_tensors(runs / name).items():
        if tensor_name.startswith("model."):
            torch.testing.assert_close(tensor, expected[tensor_name], rtol=1e-3, atol=2e-5, msg=tensor_name)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_sharded_embeddings_gives_the_curve_of_one_process(
    name: str, runs: Path, corpus: Path, tmp_path: Path
) -> None:
    assert_same_curve(runs / f"fsdp2-{name}-2", one_process(corpus, tmp_path / "one", optimizer=OPTIMIZERS[name]))


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_bf16_on_ranks_is_equal_up_to_rounding(mode: str, runs: Path, corpus: Path, tmp_path: Path) -> None:
    one = one_process(corpus, tmp_path / "one", training={"precision": "bf16"}, log={"val_every": 3})
    ours, theirs = rows(runs / f"{mode}-bf16-2"), rows(one)
    assert [(row["kind"], row["step"]) for row in ours] == [(row["kind"], row["step"]) for row in theirs]
    for row, expected in zip(ours, theirs, strict=True):
        if row["kind"] in ("train", "val"):
            assert row["loss"] == pytest.approx(expected["loss"], abs=2e-3), row


def test_an_untied_llama_gives_the_curve_of_one_process(runs: Path, corpus: Path, tmp_path: Path) -> None:
    reference = one_process(corpus, tmp_path / "one", model={"architecture": "llama", "tied": False})
    assert_same_curve(runs / "fsdp2-llama-2", reference)


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_a_run_resumed_on_as_many_ranks_is_bitwise_equal(mode: str, runs: Path) -> None:
    assert rows(runs / f"{mode}-resumed-2") == rows(runs / f"{mode}-2")
    assert_same_tensors(saved_tensors(runs / f"{mode}-resumed-2"), saved_tensors(runs / f"{mode}-2"))


def test_a_run_that_moves_from_two_to_four_ranks_is_equal_up_to_rounding(runs: Path) -> None:
    assert_same_curve(runs / "moved", runs / "fsdp2-2")


def test_a_mistake_is_reported_once_for_all_ranks(corpus: Path, tmp_path: Path) -> None:
    config = [f"--set=data.folder={corpus}", "--set=data.source=none", "--set=training.batch_size=3"]
    command = [*TORCHRUN, "2", "-m", "coupled_adam", "train", "tiny", *config, f"--out={tmp_path / 'run'}"]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert done.stderr.count("Error: training") == 1
    assert re.search(r"^Error: training\.batch_size = 3 .*\b2 ranks\b", done.stderr, re.MULTILINE), done.stderr
