"""docs/using-coupledadamw.md: every example runs as written and leaves behind what the page says."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from page_checks import CHECKS
from page_examples import USING_PAGE, Example, imported_modules, read_examples, run_here, save_files
from torch import nn

from coupled_adam import CoupledAdamW

EXAMPLES = [example for example in read_examples(USING_PAGE) if not example.file]
OPTIONAL_LIBRARIES = {"transformers", "accelerate", "lightning"}
SECONDS = 300  # for all examples that are run elsewhere in the same way

pytestmark = pytest.mark.timeout(3 * SECONDS)


def marked(example: Example) -> object:
    marks = [pytest.mark.gpu] if example.run == "gpu" else []
    return pytest.param(example, id=example.title, marks=marks)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A reader's folder: the current one, with tiny.py in it."""
    save_files(USING_PAGE, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("tiny", None)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the examples that need processes of their own: one start for each way of starting them."""
    folder = tmp_path_factory.mktemp("elsewhere")
    run_elsewhere("process", folder)
    run_elsewhere("torchrun 2", folder)
    return folder


@pytest.mark.parametrize("example", [marked(example) for example in EXAMPLES if example.run in ("here", "gpu")])
@pytest.mark.usefixtures("folder")
def test_example_runs_as_written(example: Example) -> None:
    CHECKS[example.title](run_here(example))


@pytest.mark.parametrize("example", [marked(example) for example in EXAMPLES if example.run not in ("here", "gpu")])
def test_example_runs_as_written_elsewhere(example: Example, elsewhere: Path) -> None:
    for library in {module.partition(".")[0] for module in imported_modules(example)} & OPTIONAL_LIBRARIES:
        # importorskip would import it, which takes seconds and is not needed in this process.
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    for rank in range({"process": 1, "torchrun 2": 2}[example.run]):
        outcome = elsewhere / str(example.first_line) / f"outcome.rank{rank}"
        log = elsewhere / f"{example.run}.log"
        assert outcome.exists(), f"{example}, rank {rank}: killed, or never started\n{log.read_text()[-6000:]}"
        assert outcome.read_text() == "ok", f"{example}, rank {rank}\n{outcome.read_text()}"


def test_every_example_has_a_check_and_a_heading_of_its_own() -> None:
    assert sorted(example.title for example in EXAMPLES) == sorted(CHECKS)


def test_load_state_dict_takes_and_keeps_what_the_page_says() -> None:
    def groups() -> list[dict[str, object]]:
        table, other = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2))
        return [{"params": [("table", table)], "coupled": True, "weight_decay": 0.25}, {"params": [("other", other)]}]

    live = {"lr": 2.0, "scale_exponent": 2.0, "max_grad_norm": 2.0, "error_if_nonfinite": True}
    of_file = {"lr": 1.0, "scale_exponent": 1.0, "max_grad_norm": 1.0, "error_if_nonfinite": False}
    written = CoupledAdamW(groups(), **of_file).state_dict()
    written["param_groups"][0]["weight_decay"] = 0.5

    same_groups = CoupledAdamW(groups(), **live)
    same_groups.load_state_dict(written)
    expected = {"coupled": True, **of_file, "error_if_nonfinite": True, "weight_decay": 0.5}
    assert expected.items() <= same_groups.param_groups[0].items()

    changed = CoupledAdamW(groups(), **of_file).state_dict()
    for group in changed["param_groups"]:
        group["max_grad_norm"] = 3.0
    same_groups.load_state_dict(changed)
    assert same_groups.defaults["max_grad_norm"] == 3.0

    table_last = CoupledAdamW(groups()[::-1], **live)
    table_last.load_state_dict(written)
    expected = {"coupled": True, **live, "weight_decay": 0.25}
    assert expected.items() <= table_last.param_groups[1].items()

    plain_groups = [{"params": group["params"]} for group in groups()]
    adamw = torch.optim.AdamW(plain_groups, lr=1.0, weight_decay=0.5)
    from_adamw = CoupledAdamW(groups(), **live)
    from_adamw.load_state_dict(adamw.state_dict())
    expected = {"coupled": True, **live, "lr": 1.0, "weight_decay": 0.25}
    assert expected.items() <= from_adamw.param_groups[0].items()
    assert from_adamw.param_groups[1]["weight_decay"] == 0.5


def run_elsewhere(way: str, folder: Path) -> None:
    """All examples that are run in a process of their own, or all on some ranks under torchrun."""
    examples = [example for example in EXAMPLES if example.run == way]
    for example in examples:
        (folder / str(example.first_line)).mkdir()
        save_files(USING_PAGE, folder / str(example.first_line))
    command = [sys.executable]
    if way != "process":
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", way.removeprefix("torchrun ")]
    command += [str(Path(__file__).with_name("run_example.py")), str(folder), *(example.title for example in examples)]
    # The examples for several ranks are written for CPUs; one core for each is what there may be.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    with (folder / f"{way}.log").open("w") as log:
        subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=SECONDS, check=False)
