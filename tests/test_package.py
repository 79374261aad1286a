"""The package itself: what importing it costs, and what it shows."""

import pkgutil
import subprocess
import sys
from collections import Counter

import coupled_adam

# To become empty: no name may be added.
STILL_TWICE = {"config", "embeddings", "metrics", "results", "theory", "training"}
STILL_AS_IN_THE_STANDARD_LIBRARY = {"statistics"}


def modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint('\\n'.join({{name.partition('.')[0] for name in sys.modules}}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_importing_the_optimizer_brings_nothing_but_torch_and_numpy() -> None:
    extra = modules_after("from coupled_adam import CoupledAdamW") - modules_after("import torch, numpy")
    assert extra == {"coupled_adam"}


def test_importing_the_optimizer_leaves_the_slow_parts_of_torch_alone() -> None:
    code = "import sys, coupled_adam; coupled_adam.CoupledAdamW; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(result.stdout.split())
    assert not loaded & {"torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "triton"}


def test_public_names_are_listed_and_found() -> None:
    assert {"CoupledAdamW", "param_groups", "convert_state_dict"} <= set(dir(coupled_adam))
    assert coupled_adam.CoupledAdamW.__name__ == "CoupledAdamW"
    assert not hasattr(coupled_adam, "no_such_name")


def test_no_module_has_the_name_of_another_or_of_the_standard_library() -> None:
    # A command is named as its user types it, and may have the name of the room it calls.
    commands = "coupled_adam.commands."
    names = [
        module.name.rpartition(".")[2]
        for module in pkgutil.walk_packages(coupled_adam.__path__, "coupled_adam.")
        if not module.name.startswith(commands)
    ]
    twice = {name for name, count in Counter(names).items() if count > 1}
    assert twice <= STILL_TWICE
    assert set(names) & sys.stdlib_module_names <= STILL_AS_IN_THE_STANDARD_LIBRARY
