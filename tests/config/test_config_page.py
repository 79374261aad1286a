"""docs/training-config.md agrees with the config classes, and its examples are valid."""

import re
from pathlib import Path

import pytest
from config_reference import PAGE, PART, reference

from coupled_adam.config.builtin_files import PRESETS
from coupled_adam.config.run_config import MATTERS_FOR_RESUME, Config, load_config
from coupled_adam.config.schema import all_keys

TEXT = PAGE.read_text(encoding="utf-8")


def section(heading: str) -> str:
    return TEXT.partition(f"## {heading}\n")[2].partition("\n## ")[0]


def test_the_reference_matches_the_classes() -> None:
    found = PART.search(TEXT)
    assert found is not None
    assert found[0] == reference(), "run: python tests/config/config_reference.py"


def test_every_key_is_explained() -> None:
    assert [key for key, field in all_keys(Config).items() if not field.description] == []
    for key in all_keys(Config):
        assert f"| `{key.rpartition('.')[2]}` |" in TEXT


def test_the_example_file_is_valid(tmp_path: Path) -> None:
    [example] = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "experiment.toml").write_text(example)
    config = load_config(str(tmp_path / "experiment.toml"))
    assert (config.name, config.total_steps, config.warmup_steps) == ("experiment", 5004, 51)


def test_the_command_sets_existing_keys() -> None:
    overrides = re.findall(r"--set (\S+=\S+)", TEXT.partition("```bash")[2].partition("```")[0])
    config = load_config("gpt2-125m", overrides)
    assert (config.optimizer.embeddings, config.training.tokens, config.seed) == ("adamw", 10**10, 2)


def test_the_error_messages_shown_are_the_actual_ones() -> None:
    overrides = ["model.layer=3", "optimizer.embeddings=adam", "training.tokens=5Q"]
    [shown] = re.findall(r"^```\n(--set model\.layer=3: .*?)\n```$", TEXT, re.MULTILINE | re.DOTALL)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        load_config("tiny", overrides)
    assert str(error.value) == shown


def test_the_presets_are_named() -> None:
    assert [name for name in PRESETS if f"`{name}`" not in TEXT] == []


def test_keys_that_may_change_on_resume_are_listed() -> None:
    free = all_keys(Config).keys() - MATTERS_FOR_RESUME
    listed = set(re.findall(r"`(\w+)`", section("Resuming")))
    assert {
        key.removeprefix("training.").removeprefix("data.")
        for key in free
        if not key.startswith(("log.", "checkpoints."))
    } == listed
