"""The package: the cost of its import, and its public names."""

import subprocess
import sys

import coupled_adam


def modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint('\\n'.join({{name.partition('.')[0] for name in sys.modules}}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_importing_the_optimizer_loads_only_torch_and_numpy() -> None:
    extra = modules_after("from coupled_adam import CoupledAdamW") - modules_after("import torch, numpy")
    assert extra == {"coupled_adam"}


def test_importing_the_optimizer_does_not_load_slow_parts_of_torch() -> None:
    code = "import sys, coupled_adam; coupled_adam.CoupledAdamW; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(result.stdout.split())
    assert not loaded & {"torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "triton"}


def test_public_names_are_listed_and_found() -> None:
    assert {"CoupledAdamW", "param_groups", "convert_state_dict"} <= set(dir(coupled_adam))
    assert coupled_adam.CoupledAdamW.__name__ == "CoupledAdamW"
    assert not hasattr(coupled_adam, "no_such_name")
