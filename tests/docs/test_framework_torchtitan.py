"""The section on torchtitan, if it is installed: its container with one more name, alone and on two ranks."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from coupled_adam import CoupledAdamW

pytestmark = pytest.mark.timeout(300)


@dataclass(kw_only=True, slots=True)
class ParamGroupConfig:
    pattern: str
    optimizer_name: str
    optimizer_kwargs: dict[str, Any] = field(default_factory=dict)


class OptimizersContainer:
    """A stand-in for the parts of torchtitan 0.3.0 on the page: a Config, groups by pattern, factories by name."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        param_groups: list[ParamGroupConfig] = field(default_factory=list)

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        return {"AdamW": torch.optim.AdamW}[name]

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        (model,) = model_parts
        left = dict(model.named_parameters())
        groups = []
        for group in config.param_groups:
            names = [name for name in left if re.search(group.pattern, name)]
            params = [left.pop(name) for name in names]
            groups.append({"params": params, "param_names": names, "fused": False, **group.optimizer_kwargs})
        assert {group.optimizer_name for group in config.param_groups} == {"CoupledAdamW"}
        self.optimizers = [self._resolve_optimizer_factory("CoupledAdamW")(groups)]


@pytest.fixture
def coupled_titan(framework_files: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    stand_in = ModuleType("torchtitan.components.optimizer")
    stand_in.OptimizersContainer, stand_in.ParamGroupConfig = OptimizersContainer, ParamGroupConfig
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    import coupled_titan

    return coupled_titan


def titan_shape(tied: bool) -> nn.Module:
    """The parameter names of a torchtitan decoder; a tied table has the name of the embedding."""
    block = nn.ModuleDict({"attention_norm": nn.RMSNorm(8), "wo": nn.Linear(8, 8)})
    parts = {"tok_embeddings": nn.Embedding(11, 8), "layers": nn.ModuleDict({"0": block}), "norm": nn.RMSNorm(8)}
    model = nn.ModuleDict(parts | {"lm_head": nn.Linear(8, 11, bias=False)})
    if tied:
        model["tok_embeddings"].weight = model["lm_head"].weight
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_the_config_couples_the_head_and_decays_matrices_only(coupled_titan: ModuleType, tied: bool) -> None:
    model = titan_shape(tied)
    options = {"table": r"tok_embeddings\.weight$"} if tied else {}
    config = coupled_titan.coupled_adamw(lr=2e-3, weight_decay=0.3, row_exponent=0.25, **options)
    (optimizer,) = coupled_titan.CoupledOptimizers(config, model_parts=[model]).optimizers
    assert isinstance(optimizer, CoupledAdamW)
    held = {p: group for group in optimizer.param_groups for p in group["params"]}
    assert held.keys() == set(model.parameters())
    for name, p in model.named_parameters():
        is_head = p is model["lm_head"].weight
        assert held[p]["coupled"] == is_head, name
        assert held[p]["row_exponent"] == (0.25 if is_head else 0.0), name
        assert held[p]["weight_decay"] == (0.3 if name.endswith("wo.weight") else 0.0), name
        assert held[p]["lr"] == 2e-3, name


def test_other_names_use_torchtitans_own_optimizers(coupled_titan: ModuleType) -> None:
    resolve = coupled_titan.CoupledOptimizers._resolve_optimizer_factory
    assert resolve("AdamW") is torch.optim.AdamW
    assert resolve("CoupledAdamW") is CoupledAdamW


@pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.usefixtures("framework_files")
def test_torchtitans_container_trains_saves_and_resumes_by_algorithm_1(ranks: int) -> None:
    script = Path(__file__).with_name("torchtitan_run.py")
    path = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, str(script)], env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert [Path(f"outcome.rank{rank}").read_text() for rank in range(ranks)] == ["ok"] * ranks
