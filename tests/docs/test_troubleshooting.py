"""The troubleshooting table of the CoupledAdamW reference: every message is raised by its documented cause."""

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from page_examples import USING_PAGE, USING_REFERENCE, save_files
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from coupled_adam import CoupledAdamW, convert_state_dict, param_groups

SECTION = USING_REFERENCE.read_text(encoding="utf-8").partition("\n## Troubleshooting\n")[2]
MESSAGES = re.findall(r"^\| `(.+?)` \|", SECTION, re.MULTILINE)
IS_FSDP_CHECKED = torch.__version__ >= "2.13"  # since this version torch refuses a parameter in two groups
CAUSES: dict[str, Callable[[], None]] = {}


def cause(function: Callable[[], None]) -> Callable[[], None]:
    """A user's mistake for which the page lists a message."""
    CAUSES[function.__name__] = function
    return function


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group with only this process, and tiny.py."""
    save_files(USING_PAGE, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    sys.modules.pop("tiny", None)


def rows_for(name: str) -> list[str]:
    """The messages on the page that this cause raises."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011  torch's CheckpointException is not an Exception
        CAUSES[name]()
    raised = str(caught.value)
    return [
        message
        for message in MESSAGES
        if re.search(".*".join(re.escape(part) for part in message.split("…")), raised, re.DOTALL)
    ]


def test_every_message_of_the_page_has_one_cause_and_every_cause_a_message() -> None:
    found = {name: rows_for(name) for name in CAUSES if name != "a_parameter_in_two_fsdp_groups" or IS_FSDP_CHECKED}
    assert {name: rows for name, rows in found.items() if len(rows) != 1} == {}
    missing = set(MESSAGES) - {rows[0] for rows in found.values()}
    assert len(missing) == len(CAUSES) - len(found)


def test_an_optimizer_built_before_fully_shard_never_gets_a_gradient() -> None:
    model = language_model()
    optimizer = CoupledAdamW(model)
    fully_shard(model, mesh=mesh())
    backward(model)
    optimizer.step()
    assert not any(optimizer.state.values())


def test_differentiable_coupled_groups_are_refused() -> None:
    with pytest.raises(ValueError, match=r"differentiable=True\b.*torch\.optim\.AdamW"):
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


@cause
def parameters_instead_of_the_model() -> None:
    CoupledAdamW(language_model().parameters())


@cause
def couple_without_a_model() -> None:
    CoupledAdamW(language_model().parameters(), couple="all")


@cause
def a_pattern_without_match() -> None:
    CoupledAdamW(language_model(), couple=["module.head.weight"])


@cause
def two_possible_vocabularies() -> None:
    CoupledAdamW(nn.ModuleList([nn.Embedding(5, 2), nn.Linear(2, 5), nn.Embedding(7, 2), nn.Linear(2, 7)]))


@cause
def couple_none() -> None:
    CoupledAdamW(language_model(), couple="none")


@cause
def a_model_without_a_head() -> None:
    CoupledAdamW(nn.EmbeddingBag(5, 2))


@cause
def a_computed_head() -> None:
    model = language_model(tied=False)
    nn.utils.parametrizations.weight_norm(model.head)
    CoupledAdamW(model)


@cause
def groups_of_another_optimizer() -> None:
    groups = param_groups(language_model())
    torch.optim.AdamW(groups)
    CoupledAdamW(groups)


@cause
def a_model_without_an_embedding() -> None:
    CoupledAdamW(nn.Linear(2, 5))


@cause
def a_frozen_table() -> None:
    model = language_model()
    model.head.weight.requires_grad = False
    CoupledAdamW(model)


@cause
def a_vector_in_a_coupled_group() -> None:
    CoupledAdamW([{"params": [nn.Parameter(torch.ones(3))], "coupled": True}])


@cause
def clipping_of_one_group() -> None:
    CoupledAdamW([{"params": [nn.Parameter(torch.ones(3, 2))], "coupled": True, "max_grad_norm": 1.0}])


@cause
def a_table_tied_later() -> None:
    model = language_model(tied=False)
    optimizer = CoupledAdamW(model)
    model.head.weight = model.embedding.weight
    backward(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


@cause
def a_table_resized_later() -> None:
    model = language_model()
    optimizer = CoupledAdamW(model)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    model.head.weight.data = torch.zeros(model.head.weight.shape[0] + 1, model.head.weight.shape[1])
    optimizer.step()


@cause
def clipping_under_zero() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(3, 2))], "coupled": True}]
    ZeroRedundancyOptimizer(groups, optimizer_class=CoupledAdamW, max_grad_norm=1.0)


@cause
def amsgrad() -> None:
    CoupledAdamW(language_model(), amsgrad=True)


@cause
def sparse_gradients() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    optimizer = CoupledAdamW(embedding)
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()


@cause
def fsdp1() -> None:
    CoupledAdamW(FullyShardedDataParallel(language_model(), device_id=torch.device("cpu")))


@cause
def a_table_that_was_flattened_late() -> None:
    model = language_model()
    optimizer = CoupledAdamW(model)
    backward(model)
    flat = nn.Parameter(model.head.weight.detach().flatten())
    optimizer.param_groups[0]["params"] = [flat]  # as DeepSpeed does
    optimizer.step()


@cause
def state_made_by_a_hook() -> None:
    model = language_model()
    optimizer = CoupledAdamW(model)
    backward(model)
    table = model.head.weight
    optimizer.state[table] = {key: torch.zeros_like(table) for key in ("exp_avg", "exp_avg_sq")}
    optimizer.step()


@cause
def a_parameter_in_two_fsdp_groups() -> None:
    model = language_model()
    for module in (model.embedding, model.head, model):
        fully_shard(module, mesh=mesh())
    backward(model)


@cause
def a_state_dict_of_other_groups() -> None:
    model = language_model()
    CoupledAdamW(model).load_state_dict(adamw_state(model))


@cause
def a_state_dict_of_other_parameters() -> None:
    model, other = language_model(), language_model(tied=False)
    names = [name for name, _ in other.named_parameters()]
    convert_state_dict(adamw_state(other), CoupledAdamW(model), param_names=names)


@cause
def a_state_dict_of_another_shape() -> None:
    model, larger = language_model(), language_model(H=32)
    optimizer = CoupledAdamW(larger)
    backward(larger)
    optimizer.step()
    CoupledAdamW(model).load_state_dict(optimizer.state_dict())


@cause
def a_plain_state_dict_for_a_sharded_model() -> None:
    model = language_model()
    optimizer = CoupledAdamW(model)
    backward(model)
    optimizer.step()
    CoupledAdamW(fully_shard(language_model(), mesh=mesh())).load_state_dict(optimizer.state_dict())


@cause
def a_checkpoint_of_adamw_with_other_sizes() -> None:
    model = language_model()
    adamw = torch.optim.AdamW(param_groups(model, couple="none"))
    dcp.save({"optimizer": get_optimizer_state_dict(model, adamw)}, checkpoint_id="adamw")
    dcp.load({"optimizer": get_optimizer_state_dict(model, CoupledAdamW(model))}, checkpoint_id="adamw")


@cause
def a_checkpoint_of_adamw_with_other_keys() -> None:
    model = language_model()
    adamw = torch.optim.AdamW(param_groups(model, couple="none"))
    dcp.save(get_optimizer_state_dict(model, adamw), checkpoint_id="adamw")
    dcp.load(get_optimizer_state_dict(model, CoupledAdamW(model)), checkpoint_id="adamw")


@cause
def a_nan_in_a_gradient() -> None:
    model = language_model()
    optimizer = CoupledAdamW(model, error_if_nonfinite=True)
    backward(model)
    model.head.weight.grad[0, 0] = float("nan")
    optimizer.step()
