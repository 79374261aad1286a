"""The troubleshooting table of docs/using-coupledadamw.md: every message is raised by what the page says raises it."""

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from page_examples import USING_PAGE, save_files
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from coupled_adam import CoupledAdamW, convert_state_dict, param_groups

SECTION = USING_PAGE.read_text(encoding="utf-8").partition("\n## Troubleshooting\n")[2]
MESSAGES = re.findall(r"^\| `(.+?)` \|", SECTION, re.MULTILINE)
CAUSES: dict[str, Callable[[], None]] = {}


def raises(message: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(cause: Callable[[], None]) -> Callable[[], None]:
        CAUSES[message] = cause
        return cause

    return register


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process alone, and tiny.py."""
    save_files(USING_PAGE, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    sys.modules.pop("tiny", None)


@pytest.mark.parametrize("message", MESSAGES)
def test_message_is_raised_as_the_page_has_it(message: str) -> None:
    if "another FSDP group" in message and torch.__version__ < "2.13":
        pytest.skip("torch checks this from 2.13 on")
    pattern = ".*".join(re.escape(part) for part in message.split("…"))
    cause = CAUSES[message]
    with pytest.raises(BaseException, match=f"(?s){pattern}"):  # torch's CheckpointException is no Exception
        cause()


def test_every_cause_is_in_the_table() -> None:
    assert sorted(MESSAGES) == sorted(CAUSES)


def test_an_optimizer_built_before_fully_shard_never_sees_a_gradient() -> None:
    model = language_model()
    optimizer = CoupledAdamW(model)
    fully_shard(model, mesh=mesh())
    backward(model)
    optimizer.step()
    assert not any(optimizer.state.values())


def test_differentiable_coupled_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="differentiable=True is not supported"):
        CoupledAdamW([{"params": [nn.Parameter(torch.ones(3, 2))], "coupled": True, "differentiable": True}])


def language_model(**options: object) -> nn.Module:
    from tiny import LanguageModel

    return LanguageModel(**options)


def backward(model: nn.Module) -> None:
    from tiny import batches, loss_of

    loss_of(model, next(batches(1))).backward()


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (1,))


def adamw_state(model: nn.Module) -> dict[str, object]:
    adamw = torch.optim.AdamW(model.parameters())
    backward(model)
    adamw.step()
    return adamw.state_dict()


@raises("No coupled group among the … given")
def _() -> None:
    CoupledAdamW(language_model().parameters())


@raises("Invalid couple value: … without a model")
def _() -> None:
    CoupledAdamW(language_model().parameters(), couple="all")


@raises("couple pattern … matches no trainable parameter")
def _() -> None:
    CoupledAdamW(language_model(), couple=["module.head.weight"])


@raises("the vocabulary table is ambiguous, candidates are …")
def _() -> None:
    CoupledAdamW(nn.ModuleList([nn.Embedding(5, 2), nn.Linear(2, 5), nn.Embedding(7, 2), nn.Linear(2, 7)]))


@raises("Invalid couple value: … would make this AdamW under another name")
def _() -> None:
    CoupledAdamW(language_model(), couple="none")


@raises("couple='output': … has no output layer over the vocabulary")
def _() -> None:
    CoupledAdamW(nn.EmbeddingBag(5, 2))


@raises("couple=…: the … cannot be coupled, because …")
def _() -> None:
    model = language_model(tied=False)
    nn.utils.parametrizations.weight_norm(model.head)
    CoupledAdamW(model)


@raises("group …: these groups were given to another optimizer")
def _() -> None:
    groups = param_groups(language_model())
    torch.optim.AdamW(groups)
    CoupledAdamW(groups)


@raises("no vocabulary table found")
def _() -> None:
    CoupledAdamW(nn.Linear(2, 5))


@raises("the tables to couple are frozen …")
def _() -> None:
    model = language_model()
    model.head.weight.requires_grad = False
    CoupledAdamW(model)


@raises("coupled group …: tensor … has shape …, expected (V, H)")
def _() -> None:
    CoupledAdamW([{"params": [nn.Parameter(torch.ones(3))], "coupled": True}])


@raises("group …: max_grad_norm is …, but … for the optimizer")
def _() -> None:
    CoupledAdamW([{"params": [nn.Parameter(torch.ones(3, 2))], "coupled": True, "max_grad_norm": 1.0}])


@raises("no coupled table (…) has a gradient, but other parameters have")
def _() -> None:
    model = language_model(tied=False)
    optimizer = CoupledAdamW(model)
    model.head.weight = model.embedding.weight
    backward(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


@raises("tensor … has shape …, but its state …")
def _() -> None:
    model = language_model()
    optimizer = CoupledAdamW(model)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    model.head.weight.data = torch.zeros(model.head.weight.shape[0] + 1, model.head.weight.shape[1])
    optimizer.step()


@raises("Invalid max_grad_norm value: … under ZeroRedundancyOptimizer")
def _() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(3, 2))], "coupled": True}]
    ZeroRedundancyOptimizer(groups, optimizer_class=CoupledAdamW, max_grad_norm=1.0)


@raises("Invalid amsgrad value: True")
def _() -> None:
    CoupledAdamW(language_model(), amsgrad=True)


@raises("CoupledAdamW does not support sparse gradients")
def _() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    optimizer = CoupledAdamW(embedding)
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()


@raises("the model is sharded by FullyShardedDataParallel (FSDP1)")
def _() -> None:
    CoupledAdamW(FullyShardedDataParallel(language_model(), device_id=torch.device("cpu")))


@raises("Parameter … is shared with a parameter already managed by another FSDP group")
def _() -> None:
    model = language_model()
    for module in (model.embedding, model.head, model):
        fully_shard(module, mesh=mesh())
    backward(model)


@raises("state dict has groups of … parameters, the optimizer of …")
def _() -> None:
    model = language_model()
    CoupledAdamW(model).load_state_dict(adamw_state(model))


@raises("state dict and optimizer have different parameters")
def _() -> None:
    model, other = language_model(), language_model(tied=False)
    names = [name for name, _ in other.named_parameters()]
    convert_state_dict(adamw_state(other), CoupledAdamW(model), param_names=names)


@raises("state of …: exp_avg has shape …, the parameter …")
def _() -> None:
    model, larger = language_model(), language_model(H=32)
    optimizer = CoupledAdamW(larger)
    backward(larger)
    optimizer.step()
    CoupledAdamW(model).load_state_dict(optimizer.state_dict())


@raises("state of …: … is a plain tensor, but the parameter is sharded")
def _() -> None:
    model = language_model()
    optimizer = CoupledAdamW(model)
    backward(model)
    optimizer.step()
    CoupledAdamW(fully_shard(language_model(), mesh=mesh())).load_state_dict(optimizer.state_dict())


@raises("Size mismatch between saved … and current")
def _() -> None:
    model = language_model()
    adamw = torch.optim.AdamW(param_groups(model, couple="none"))
    dcp.save({"optimizer": get_optimizer_state_dict(model, adamw)}, checkpoint_id="adamw")
    dcp.load({"optimizer": get_optimizer_state_dict(model, CoupledAdamW(model))}, checkpoint_id="adamw")


@raises("Missing key in checkpoint state_dict: …")
def _() -> None:
    model = language_model()
    adamw = torch.optim.AdamW(param_groups(model, couple="none"))
    dcp.save(get_optimizer_state_dict(model, adamw), checkpoint_id="adamw")
    dcp.load(get_optimizer_state_dict(model, CoupledAdamW(model)), checkpoint_id="adamw")


@raises("gradient norm is nan: non-finite values in …")
def _() -> None:
    model = language_model()
    optimizer = CoupledAdamW(model, error_if_nonfinite=True)
    backward(model)
    model.head.weight.grad[0, 0] = float("nan")
    optimizer.step()
