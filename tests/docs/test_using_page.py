"""docs/using-coupledadamw.md and its reference: every example runs as written, with the result that the page states."""

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from elsewhere import SECONDS, assert_ran_elsewhere, marked, run_elsewhere
from page_checks import CHECKS
from page_examples import USING_PAGE, USING_REFERENCE, Example, read_examples, run_here, save_files
from torch import nn

from coupled_adam import CoupledAdamW

PAGES = (USING_PAGE, USING_REFERENCE)
EXAMPLES = [example for page in PAGES for example in read_examples(page) if not example.file]

pytestmark = pytest.mark.timeout(3 * SECONDS)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder as a reader has it, with tiny.py."""
    save_files(USING_PAGE, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("tiny", None)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the examples for several ranks, started together."""
    folder = tmp_path_factory.mktemp("elsewhere")
    run_elsewhere(EXAMPLES, "torchrun 2", "page_checks", folder, pages_with_files=[USING_PAGE])
    return folder


@pytest.mark.parametrize("example", [marked(example) for example in EXAMPLES if example.run in ("here", "gpu")])
@pytest.mark.usefixtures("folder")
def test_example_runs_as_written(example: Example) -> None:
    CHECKS[example.title](run_here(example))


@pytest.mark.parametrize("example", [marked(example) for example in EXAMPLES if example.run not in ("here", "gpu")])
def test_example_runs_as_written_in_its_own_processes(example: Example, elsewhere: Path) -> None:
    assert_ran_elsewhere(example, elsewhere)


def test_every_example_has_its_own_check_and_heading() -> None:
    assert sorted(example.title for example in EXAMPLES) == sorted(CHECKS)


def test_the_how_to_and_its_reference_link_to_each_other() -> None:
    how_to, reference = (page.read_text(encoding="utf-8") for page in PAGES)
    assert f"]({USING_REFERENCE.name})" in how_to
    assert f"]({USING_PAGE.name})" in reference


def test_the_reference_lists_every_argument_with_its_default() -> None:
    section = USING_REFERENCE.read_text(encoding="utf-8").partition("\n## Arguments\n")[2].partition("\n## ")[0]
    table = section.partition("\n\n| attribute")[0]
    listed: dict[str, str] = {}
    for names, default in re.findall(r"^\| (`.+?`) \| (.+?) \|", table, re.MULTILINE):
        arguments = re.findall(r"`(\w+)`", names)
        defaults = default.split(", ") if default.count(", ") + 1 == len(arguments) > 1 else [default] * len(arguments)
        listed |= dict(zip(arguments, defaults, strict=True))
    parameters = dict(list(inspect.signature(CoupledAdamW.__init__).parameters.items())[1:])
    assert listed.keys() == parameters.keys()
    assert listed.pop("params") == "required"
    assert {name: ast.literal_eval(text.strip("`")) for name, text in listed.items()} == {
        name: parameters[name].default for name in listed
    }


def test_load_state_dict_loads_and_keeps_the_options_listed_on_the_page() -> None:
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
