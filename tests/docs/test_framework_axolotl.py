"""The section on axolotl: the plugin, called as axolotl calls it, and by axolotl itself if it is installed."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from coupled_adam import CoupledAdamW


class Config:
    """The config that axolotl passes to plugins: unset keys are None."""

    def __init__(self, **given: object) -> None:
        self.__dict__.update(given)

    def __getattr__(self, name: str) -> None:
        return None


@pytest.fixture
def plugin_class(framework_files: Path, monkeypatch: pytest.MonkeyPatch) -> type:
    base = ModuleType("axolotl.integrations.base")
    base.BasePlugin = type("BasePlugin", (), {})
    monkeypatch.setitem(sys.modules, base.__name__, base)
    from coupled_axolotl import CoupledAdamWPlugin

    return CoupledAdamWPlugin


@pytest.mark.parametrize("hook", ["create_optimizer", "post_trainer_create"])
def test_both_hooks_give_the_optimizer_the_model_and_the_settings(plugin_class: type, hook: str) -> None:
    from tiny import LanguageModel

    cfg = Config(learning_rate="2e-3", weight_decay=0.2, adam_beta2=0.95)
    trainer = SimpleNamespace(model=LanguageModel(), optimizer_cls_and_kwargs=None)
    optimizer = getattr(plugin_class(), hook)(cfg, trainer)
    if hook == "post_trainer_create":
        # OptimizerMixin.create_optimizer of axolotl 0.19.0 calls the factory with the model, the arguments, the dict.
        factory, options = trainer.optimizer_cls_and_kwargs
        optimizer = factory()(trainer.model, object(), **options)
    assert isinstance(optimizer, CoupledAdamW)
    assert {"lr": 2e-3, "weight_decay": 0.2, "betas": (0.9, 0.95)}.items() <= optimizer.defaults.items()
    (coupled,) = (group for group in optimizer.param_groups if group["coupled"])
    assert coupled["params"] == [trainer.model.head.weight]


def test_without_settings_torchs_defaults_are_used(plugin_class: type) -> None:
    from tiny import LanguageModel

    optimizer = plugin_class().create_optimizer(Config(learning_rate=1e-3), SimpleNamespace(model=LanguageModel()))
    assert {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}.items() <= optimizer.defaults.items()


@pytest.mark.skipif(find_spec("axolotl") is None, reason="axolotl is not installed")
@pytest.mark.usefixtures("framework_files")
def test_axolotls_trainer_uses_the_optimizer_of_the_plugin() -> None:
    script = Path(__file__).with_name("axolotl_run.py")
    path = os.pathsep.join([str(Path.cwd()), str(script.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert outcome == {"optimizer": "CoupledAdamW", "create_optimizer was called": False}
