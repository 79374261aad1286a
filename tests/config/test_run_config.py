"""Configs: their sources, derived values, and comparison."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from coupled_adam.config.builtin_files import preset_text
from coupled_adam.config.run_config import differences, load_config, require_resumable, to_toml


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A valid config file, to be changed."""
    path = tmp_path / "experiment.toml"
    path.write_text(preset_text("tiny"))
    return path


def test_a_file_a_preset_and_a_run_folder_give_the_same_config(file: Path) -> None:
    (file.parent / "config.toml").write_text(to_toml(load_config("tiny")))
    assert load_config(str(file)) == load_config("tiny") == load_config(str(file.parent))


def test_a_presets_name_wins_over_a_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.toml").write_text(to_toml(load_config("tiny", ["seed=9"])))
    monkeypatch.chdir(tmp_path)
    assert load_config("tiny").seed == 1
    assert load_config("./tiny").seed == 9


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("training.tokens=5B", "training.tokens", 5_000_000_000),
        ("training.tokens=300k", "training.tokens", 300_000),
        ("training.tokens=1.5M", "training.tokens", 1_500_000),
        ("training.tokens=2e6", "training.tokens", 2_000_000),
        ("optimizer.lr=1", "optimizer.lr", 1.0),
        ("optimizer.embeddings=adamw", "optimizer.embeddings", "adamw"),
        ('optimizer.embeddings="adamw"', "optimizer.embeddings", "adamw"),
        ("training.compile=false", "training.compile", False),
        ("training.compile=auto", "training.compile", "auto"),
        ("checkpoints.minutes=none", "checkpoints.minutes", None),
        ("log.wandb=none", "log.wandb", None),
        ("log.wandb=2024", "log.wandb", "2024"),  # text, although it looks like a number
        ("data.folder=2024-01-01", "data.folder", "2024-01-01"),
        ("data.folder=none", "data.folder", "none"),  # a folder cannot be unset, so this is its name
        ("data.folder=a=b", "data.folder", "a=b"),
        ("data.folder=1\nseed = 2", "data.folder", "1\nseed = 2"),  # cannot set another key
        (" seed = 7 ", "seed", 7),
        ("schedule.warmup=1%", "schedule.warmup", "1%"),
        ("schedule.warmup=12", "schedule.warmup", 12),
    ],
)
def test_an_override_is_read_as_toml_or_as_text(override: str, key: str, value: object) -> None:
    config: Any = load_config("tiny", [override])
    for part in key.split("."):
        config = getattr(config, part)
    assert config == value
    assert type(config) is type(value)


def test_the_last_override_wins() -> None:
    assert load_config("tiny", ["seed=2", "seed=3"]).seed == 3


def test_configs_are_immutable() -> None:
    config: Any = load_config("tiny")
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 3
    with pytest.raises(ValidationError, match="frozen"):
        config.model.layers = 3


def test_reading_a_config_does_not_load_torch() -> None:
    script = "import sys; from coupled_adam.config.run_config import load_config; load_config('tiny'); "
    script += "from coupled_adam.config.study_config import load_study; load_study('demo'); "
    script += "from coupled_adam.training import estimates; estimates.preset_table(); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_reading_configs_loads_none_of_the_layers_above() -> None:
    script = "import pkgutil, sys, coupled_adam.config as config\n"
    script += "for module in pkgutil.iter_modules(config.__path__): __import__(f'coupled_adam.config.{module.name}')\n"
    script += "print(*(name for name in sys.modules if name.startswith('coupled_adam.')))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    rooms = {name.split(".")[1] for name in run.stdout.split()}
    assert "config" in rooms
    assert rooms <= {"base", "config", "data", "models", "tokenizer", "byte_level_bpe", "metrics", "paper_tasks"}


def test_the_name_documented_in_version_0_1_still_works() -> None:
    from coupled_adam.training.config import load_config as documented

    assert documented is load_config


def test_tokens_determine_the_number_of_whole_steps() -> None:
    steps = [load_config("tiny", [f"training.tokens={tokens}"]).total_steps for tokens in (307_199, 307_200, 308_223)]
    assert steps == [299, 300, 300]


@pytest.mark.parametrize(("warmup", "steps"), [("0", 0), ("20", 20), ("1%", 3), ("1.1%", 4), ("0.01%", 1), ("0%", 0)])
def test_a_share_of_the_run_is_rounded_up(warmup: str, steps: int) -> None:
    assert load_config("tiny", [f"schedule.warmup={warmup}"]).warmup_steps == steps


def test_ranks_share_the_batch() -> None:
    config = load_config("tiny", ["training.micro_batch_size=4"])
    assert [config.micro_batch_size(ranks) for ranks in (1, 2, 4, 8, 16)] == [4, 4, 4, 2, 1]
    assert load_config("tiny").micro_batch_size(2) == 8


def test_ranks_that_cannot_share_the_batch_are_refused() -> None:
    with pytest.raises(ValueError, match=r"training.batch_size = 16.*\b3\b"):
        load_config("tiny").micro_batch_size(3)
    config = load_config("tiny", ["training.batch_size=12", "training.micro_batch_size=4"])
    with pytest.raises(ValueError, match=r"micro_batch_size = 4.*\b6\b"):
        config.micro_batch_size(2)


def test_differences_are_dotted_keys_in_order() -> None:
    overrides = ["log.every=3", "seed=2", "optimizer.lr=1e-4", "checkpoints.minutes=none"]
    changed = load_config("tiny", overrides)
    assert differences(load_config("tiny"), changed) == ["seed", "optimizer.lr", "checkpoints.minutes", "log.every"]
    assert differences(changed, changed) == []


@pytest.mark.parametrize(
    "override",
    [
        "name=other",
        "log.every=3",
        "log.wandb=project",
        "checkpoints.keep=9",
        "checkpoints.minutes=none",
        "training.micro_batch_size=4",
        "training.device=cpu",
        "training.compile=false",
        "training.cuda_graphs=false",
        "training.deterministic=true",
        "training.parallel=ddp",
        "training.threads=1",
    ],
)
def test_a_run_resumes_with_other_hardware_and_other_logs(override: str) -> None:
    require_resumable(load_config("tiny"), load_config("tiny", [override]))


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("seed=2", "seed = 1, now 2"),
        ("model.layers=3", "model.layers = 2, now 3"),
        ("data.order=epochs", 'data.order = "random", now "epochs"'),
        ("optimizer.embeddings=adamw", 'optimizer.embeddings = "coupled", now "adamw"'),
        ("optimizer.max_grad_norm=0", "optimizer.max_grad_norm = 1.0, now 0.0"),
        ("schedule.warmup=1%", 'schedule.warmup = 20, now "1%"'),
        ("training.tokens=1M", "training.tokens = 307200, now 1_000_000"),
        ("training.batch_size=32", "training.batch_size = 16, now 32"),
        ("training.precision=bf16", 'training.precision = "auto", now "bf16"'),
    ],
)
def test_a_run_does_not_resume_with_settings_that_change_its_result(override: str, line: str) -> None:
    with pytest.raises(ValueError, match="'tiny'") as error:
        require_resumable(load_config("tiny"), load_config("tiny", [override, "log.every=3"]))
    assert str(error.value).splitlines()[1:] == [line]
