"""The keys of Muon and of single tables: valid and invalid values, and configs without them."""

import tomllib
from pathlib import Path

import pytest

from coupled_adam.config.builtin_files import PRESETS
from coupled_adam.config.run_config import MATTERS_FOR_RESUME, Config, differences, load_config, values_by_key
from coupled_adam.config.schema import all_keys
from coupled_adam.config.toml_writing import to_toml
from coupled_adam.study.config_hash import config_hash, settings_that_differ

UNTIED = "model.tied=false"
MUON = "optimizer.matrices=muon"
NEW = [
    "optimizer.matrices",
    *(
        f"optimizer.{name}.{key}"
        for name in ("tables", "input_table")
        for key in ("lr_factor", "beta1", "beta2", "eps")
    ),
    *(f"optimizer.muon.{key}" for key in ("lr_factor", "momentum", "weight_decay", "adjust_lr_fn")),
]


def mistakes(*settings: str) -> list[str]:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        load_config("tiny", list(settings))
    return str(error.value).splitlines()


def test_keys_have_dotted_names_and_affect_the_hash() -> None:
    assert set(NEW) <= all_keys(Config).keys()
    assert set(NEW) <= MATTERS_FOR_RESUME
    assert set(NEW) <= values_by_key(load_config("tiny")).keys()


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_train_the_matrices_by_adamw_and_no_table_separately(preset: str) -> None:
    optimizer = load_config(preset).optimizer
    assert optimizer.matrices == "adamw"
    for table in (optimizer.tables, optimizer.input_table):
        assert optimizer.betas_of(table) == (optimizer.beta1, optimizer.beta2)
        assert (optimizer.eps_of(table), table.lr_factor) == (optimizer.eps, 1.0)


def test_a_key_of_a_subsection_can_be_set() -> None:
    config = load_config("tiny", [UNTIED, MUON, "optimizer.muon.lr_factor=20", "optimizer.input_table.beta2=0.5"])
    assert config.optimizer.muon.lr_factor == 20
    assert config.optimizer.betas_of(config.optimizer.input_table) == (0.9, 0.5)
    assert config.optimizer.betas_of(config.optimizer.tables) == (0.9, 0.95)
    assert differences(config, load_config("tiny", [UNTIED, MUON])) == [
        "optimizer.input_table.beta2",
        "optimizer.muon.lr_factor",
    ]


def test_a_file_may_have_subsections_of_the_optimizer(tmp_path: Path) -> None:
    text = to_toml(load_config("tiny", [UNTIED, MUON, "optimizer.tables.eps=1e-6", "optimizer.muon.momentum=0.9"]))
    written = tomllib.loads(text)
    assert written["optimizer"]["tables"] == {"lr_factor": 1.0, "beta1": "none", "beta2": "none", "eps": 1e-6}
    assert written["optimizer"]["muon"]["weight_decay"] == "none"
    (tmp_path / "config.toml").write_text(text)
    read = load_config(str(tmp_path / "config.toml"))
    assert (read.optimizer.tables.eps, read.optimizer.muon.momentum) == (1e-6, 0.9)
    assert to_toml(read) == text


def test_an_older_file_without_these_keys_is_accepted(tmp_path: Path) -> None:
    lines, skipping = [], False
    for line in to_toml(load_config("tiny")).splitlines():
        skipping = line.startswith("[optimizer.") or (skipping and not line.startswith("["))
        if not skipping and not line.startswith("matrices"):
            lines.append(line)
    (tmp_path / "old.toml").write_text("\n".join(lines))
    assert "muon]" not in "\n".join(lines)
    assert load_config(str(tmp_path / "old.toml")) == load_config("tiny")


def test_only_a_key_that_is_set_changes_the_hash() -> None:
    """The hash of a run without them is that of version 0.1.0, which `test_study_rows` checks."""
    plain = load_config("tiny", [UNTIED])
    settings = [
        [MUON],
        [MUON, "optimizer.muon.lr_factor=2"],
        [MUON, "optimizer.muon.momentum=0.9"],
        [MUON, "optimizer.muon.weight_decay=0.0"],
        [MUON, "optimizer.muon.adjust_lr_fn=original"],
        *([f"optimizer.{name}.lr_factor=2"] for name in ("tables", "input_table")),
        ["optimizer.tables.beta1=0.8"],
        ["optimizer.tables.beta2=0.8"],
        ["optimizer.input_table.eps=1e-5"],
    ]
    configs = [load_config("tiny", [UNTIED, *each]) for each in settings]
    assert len({config_hash(config) for config in [plain, *configs]}) == len(settings) + 1
    assert config_hash(load_config("tiny", [UNTIED, "optimizer.matrices=adamw"])) == config_hash(plain)
    assert settings_that_differ(plain, configs[1]) == ["optimizer.matrices", "optimizer.muon.lr_factor"]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["optimizer.muon.lr_factor=2"], ["optimizer.muon.lr_factor = 2", "optimizer.matrices"]),
        (["optimizer.muon.momentum=0.9"], ["optimizer.muon.momentum = 0.9", "optimizer.matrices"]),
        (["optimizer.muon.weight_decay=0.5"], ["optimizer.muon.weight_decay = 0.5", "optimizer.matrices"]),
        (["optimizer.input_table.lr_factor=2"], ["optimizer.input_table.lr_factor = 2", "model.tied"]),
        (["optimizer.input_table.eps=1e-6"], ["optimizer.input_table.eps = 1e-06", "model.tied"]),
        ([MUON, "optimizer.muon.lr_factor=0"], ["optimizer.muon.lr_factor = 0", "above 0"]),
        ([MUON, "optimizer.muon.lr_factor=-3.0"], ["optimizer.muon.lr_factor = -3.0", "above 0"]),
        (["optimizer.tables.lr_factor=0.0"], ["optimizer.tables.lr_factor = 0.0", "above 0"]),
        (["optimizer.tables.beta2=1.0"], ["optimizer.tables.beta2 = 1.0"]),
        ([MUON, "optimizer.muon.adjust_lr_fn=moonshot"], ["optimizer.muon.adjust_lr_fn", '"match_rms_adamw"']),
        (["optimizer.matrices=sgd"], ["optimizer.matrices", '"muon"']),
        (
            ["optimizer.embeddings=sgd", "optimizer.sgd_factor=300", "optimizer.tables.lr_factor=2"],
            ["optimizer.tables.lr_factor = 2", "optimizer.sgd_factor"],
        ),
        (
            [UNTIED, "optimizer.embeddings=sgd", "optimizer.sgd_factor=300", "optimizer.couple=all",
             "optimizer.input_table.beta1=0.5"],
            ["optimizer.input_table.beta1 = 0.5"],
        ),
        (["optimizer.tables=3"], ["optimizer.tables is a section", "optimizer.tables.lr_factor"]),
        (["optimizer.tables.momentum=3"], ["optimizer.tables.momentum=3", "unknown key"]),
    ],
)  # fmt: skip
def test_each_mistake_is_one_line_that_names_the_key(settings: list[str], named: list[str]) -> None:
    [line] = mistakes(*settings)
    for part in named:
        assert part in line


@pytest.mark.parametrize(
    "settings",
    [
        [MUON],
        [MUON, "optimizer.embeddings=adamw"],
        [MUON, "optimizer.embeddings=sgd", "optimizer.sgd_factor=300"],
        [UNTIED, "optimizer.embeddings=sgd", "optimizer.sgd_factor=300", "optimizer.input_table.lr_factor=2"],
        ["optimizer.embeddings=adamw", "optimizer.tables.lr_factor=10"],
        ["optimizer.tables.eps=1e-6", "optimizer.tables.beta1=0.8"],
        [UNTIED, "optimizer.couple=all", "optimizer.input_table.lr_factor=0.5"],
    ],
)
def test_settings_with_an_effect_are_accepted(settings: list[str]) -> None:
    assert load_config("tiny", settings)


def test_a_value_in_place_of_a_section_is_reported(tmp_path: Path) -> None:
    text = to_toml(load_config("tiny")).partition("[optimizer.")[0] + "muon = 3\n"
    (tmp_path / "wrong.toml").write_text(text)
    with pytest.raises(ValueError, match=r"optimizer\.muon = 3"):
        load_config(str(tmp_path / "wrong.toml"))
    with pytest.raises(ValueError, match=r"optimizer\.muon = 3"):
        load_config(str(tmp_path / "wrong.toml"), ["optimizer.muon.lr_factor=2"])
