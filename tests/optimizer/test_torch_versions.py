"""Private names of torch that the package uses: exactly those listed in docs/torch-versions.md."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import coupled_adam
from coupled_adam import BatchedMuon, CoupledAdamW, check_muon, hidden_matrices
from coupled_adam.optimizer import torch_versions

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "torch-versions.md").read_text(encoding="utf-8")
PACKAGE = Path(coupled_adam.__file__).parent


def dotted(node: ast.expr) -> str:
    """The dotted name of an expression such as torch.optim.Muon; '' for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    inner = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inner}.{node.attr}" if isinstance(node, ast.Attribute) and inner else ""


def names_of_torch(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "torch")
        elif isinstance(node, ast.Attribute) and (name := dotted(node)).startswith("torch."):
            yield name


def is_private(name: str) -> bool:
    return any(re.match(r"_[a-z]", component) for component in name.split("."))


USED = {file.relative_to(PACKAGE): set(names_of_torch(file)) for file in sorted(PACKAGE.rglob("*.py"))}


def test_every_private_name_of_torch_is_on_the_page_and_no_other() -> None:
    section = PAGE.partition("## Private names\n")[2].partition("\n## ")[0]
    listed = set(filter(is_private, re.findall(r"`(torch\.[\w.]+)`", section)))
    used = {name for names in USED.values() for name in names if is_private(name)}
    # `torch._dynamo` in `torch._dynamo.reset` is the same use.
    assert {name for name in used if not any(other.startswith(f"{name}.") for other in used)} == listed


def test_the_optimizer_imports_private_names_of_torch_in_one_file() -> None:
    for file, names in USED.items():
        if file.parts[0] == "optimizer" and file.name != "torch_versions.py":
            assert not [name for name in names if is_private(name) and "_foreach_" not in name], file


def test_no_module_needs_torch_muon() -> None:
    assert not [file for file, names in USED.items() if "torch.optim.Muon" in names]


def test_muon_helpers_work_with_a_torch_without_muon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 9, bias=False))
    matrices = hidden_matrices(model)
    muon, coupled = BatchedMuon(matrices), CoupledAdamW(model, exclude=matrices)
    check_muon(model, muon, coupled)
    before = model[1].weight.detach().clone()
    model(torch.tensor([1, 2])).sum().backward()
    muon.step()
    coupled.step()
    assert not torch.equal(model[1].weight, before)


class OldAdamW(torch.optim.AdamW):
    """`_init_group` with its torch 2.6 arguments."""

    def _init_group(
        self,
        group: dict[str, Any],
        params_with_grad: list[Tensor],
        grads: list[Tensor],
        amsgrad: bool,
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        max_exp_avg_sqs: list[Tensor],
        state_steps: list[Tensor],
    ) -> bool:
        assert amsgrad is False
        for p in group["params"]:
            params_with_grad.append(p)
            grads.append(p.grad)
            self.state[p] = {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq", "step")}
            exp_avgs.append(self.state[p]["exp_avg"])
            exp_avg_sqs.append(self.state[p]["exp_avg_sq"])
            state_steps.append(self.state[p]["step"])
        assert not max_exp_avg_sqs
        return False


def test_a_group_is_collected_with_the_arguments_of_torch_2_6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_versions, "AdamW", OldAdamW)
    monkeypatch.setattr(torch_versions, "TAKES_AMSGRAD", True)
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.full((3,), 2.0)
    optimizer = OldAdamW([p])
    lists: list[list[Tensor]] = [[] for _ in range(6)]
    assert torch_versions.collect_adamw_group(optimizer, optimizer.param_groups[0], *lists) is False
    params, grads, exp_avgs, exp_avg_sqs, _, steps = lists
    assert params[0] is p
    assert grads[0] is p.grad
    for key, found in (("exp_avg", exp_avgs), ("exp_avg_sq", exp_avg_sqs), ("step", steps)):
        assert found[0] is optimizer.state[p][key]


def test_the_oldest_supported_version_is_the_oldest_on_the_page() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (floor,) = (line.partition(">=")[2] for line in project["dependencies"] if line.startswith("torch>"))
    versions = re.findall(r"^\| (\d+\.\d+)\.\d+ \|", PAGE, re.MULTILINE)
    assert floor == min(versions, key=lambda version: [int(part) for part in version.split(".")])
