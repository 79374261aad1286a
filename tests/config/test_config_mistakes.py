"""Every invalid key, value and path of a config gives one line with the problem and what is expected."""

import errno
import os
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from coupled_adam.base.errors import UserError
from coupled_adam.config import field_types
from coupled_adam.config.builtin_files import PRESETS, preset_text
from coupled_adam.config.explanations import SYNONYMS
from coupled_adam.config.field_types import Expected, Tokens, expected
from coupled_adam.config.run_config import Config, load_config
from coupled_adam.config.schema import all_keys

KINDS = {name: kind for name, kind in vars(field_types).items() if any(isinstance(x, Expected) for x in get_args(kind))}
BOUNDS = ("gt", "ge", "lt", "le")


def refused(spec: str | Path, *overrides: str) -> list[str]:
    """The lines of the error message; fails the test if the config is accepted."""
    with pytest.raises(ValueError) as error:  # noqa: PT011
        load_config(str(spec), overrides)
    assert type(error.value) is UserError
    return str(error.value).splitlines()


def keys_named(text: str) -> list[str]:
    """The keys and sections of a config that a text mentions."""
    known = {*all_keys(Config), *Config.model_fields}
    return [word for word in re.findall(r"[\w.]*\w", text) if word in known]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A valid config file, to be changed."""
    path = tmp_path / "experiment.toml"
    path.write_text(preset_text("tiny"))
    return path


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("model.layers=two", 'model.layers = "two"'),
        ("model.layers=2.0", "model.layers = 2.0"),
        ("model.layers=true", "model.layers = true"),
        ("model.layers=0", "model.layers = 0"),
        ("model.layers=", 'model.layers = ""'),
        ("model.layers=[1, 2]", "model.layers = [1, 2]"),
        ("model.layers=none", 'model.layers = "none"'),
        ("model.layers=3\nseed = 2", 'model.layers = "3\\nseed = 2"'),
        ("model.tied=1", "model.tied = 1"),
        ("model.tied=True", 'model.tied = "True"'),
        ("model.architecture=gpt3", 'model.architecture = "gpt3"'),
        ("optimizer.lr=0", "optimizer.lr = 0"),
        ("optimizer.lr=nan", "optimizer.lr = nan"),
        ("optimizer.lr=inf", "optimizer.lr = inf"),
        ("optimizer.lr=1e999", "optimizer.lr = inf"),
        ("optimizer.lr=fast", 'optimizer.lr = "fast"'),
        ("optimizer.beta2=1", "optimizer.beta2 = 1"),
        ("optimizer.weight_decay=-0.1", "optimizer.weight_decay = -0.1"),
        ("schedule.final_fraction=1.5", "schedule.final_fraction = 1.5"),
        ("schedule.warmup=101%", 'schedule.warmup = "101%"'),
        ("schedule.warmup=-1", "schedule.warmup = -1"),
        ("schedule.warmup=0.5", "schedule.warmup = 0.5"),
        ("training.tokens=5Q", 'training.tokens = "5Q"'),
        ("training.tokens=0", "training.tokens = 0"),
        ("training.tokens=-5B", 'training.tokens = "-5B"'),
        ("training.tokens=1.5", "training.tokens = 1.5"),
        ("training.tokens=true", "training.tokens = true"),
        ("training.compile=maybe", 'training.compile = "maybe"'),
        ("checkpoints.every=0", "checkpoints.every = 0"),
        ("checkpoints.keep=0", "checkpoints.keep = 0"),
        ("checkpoints.milestones=-1", "checkpoints.milestones = -1"),
        ("log.wandb=", 'log.wandb = ""'),
        ("seed=-1", "seed = -1"),
        ("seed=9223372036854775808", "seed = 9_223_372_036_854_775_808"),
        ("name=a/b", 'name = "a/b"'),
        ("data.folder=\udcff", 'data.folder = "\\U0000dcff"'),
    ],
)
def test_a_bad_value_is_one_line_with_key_value_and_what_is_expected(override: str, shown: str) -> None:
    field = all_keys(Config)[override.partition("=")[0]]
    [line] = refused("tiny", override)
    assert line.startswith(f"--set {shown}: ")
    assert line.endswith(expected(field))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_expectation_names_bounds_and_valid_examples(kind: Any) -> None:
    words = expected(FieldInfo.from_annotation(kind))
    numbers = [int(base) ** int(power or 1) for base, power in re.findall(r"\b(\d+)(?:\^(\d+))?", words)]
    bounds = [getattr(each, name, None) for each in FieldInfo.from_annotation(kind).metadata for name in BOUNDS]
    assert [bound for bound in bounds if bound is not None and bound not in numbers and kind is not Tokens] == []
    for example in re.findall(r'"(.+?)"', words):
        TypeAdapter(kind).validate_python(example)


@pytest.mark.parametrize(
    ("key", "choices"),
    [
        ("model.tied", "true false"),
        ("model.architecture", '"gpt2" "llama"'),
        ("training.compile", 'true false "auto"'),
        ("checkpoints.every", '"none"'),
        ("log.wandb", '"none"'),
    ],
)
def test_the_expectation_names_every_choice(key: str, choices: str) -> None:
    words = expected(all_keys(Config)[key])
    assert re.findall(r'\b(?:true|false)\b|"\w+"', words) == choices.split()


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("model.layer=2", "model.layers"),
        ("modell.layers=2", "model.layers"),
        ("lr=3e-4", "optimizer.lr"),
        ("training.lr=3e-4", "optimizer.lr"),
        ("optimizer.tables.lr=0.009", "optimizer.tables.lr_factor"),
        ("optimizer.muon.lr=0.009", "optimizer.muon.lr_factor"),
        ("optimizer.muon.beta1=0.5", "optimizer.beta1"),
        ("optimizer.sgd=1", "optimizer.embeddings"),
        ("optimizer.tables.betas=1", "optimizer.tables.beta1"),
        ("optimizer.row=0.25", "optimizer.row_exponent"),
        ("learning_rate=3e-4", "optimizer.lr"),
        ("optimizer.learning_rate=1", "optimizer.lr"),
        ("optimizer.weight_deacy=1", "optimizer.weight_decay"),
        ("batch=8", "training.batch_size"),
        ("training.steps=8", "training.tokens"),
        ("model.n_layer=8", "model.layers"),
        ("model.vocab-size=8", "model.vocabulary_size"),
        ("log.evry=8", "log.every"),
        ("checkpoints.evry=8", "checkpoints.every"),
        ("tokenz=5B", "training.tokens"),
        ("optmizer=2", "optimizer"),
        ("model.layers.x=2", "model.layers"),
        ("seed.x=2", "seed"),
    ],
)
def test_an_unknown_key_of_an_override_suggests_the_closest_one(override: str, near: str) -> None:
    [line] = refused("tiny", override)
    assert line.startswith(f"--set {override}: ")
    assert keys_named(line.removeprefix(f"--set {override}: ")) == [near]


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("xyzzy=3e-4", ["name", "seed", "[model]", "[optimizer]", "[log]"]),
        ("optimizer.xyzzy=1", ["embeddings", "lr", "scale_exponent", "max_grad_norm"]),
        ("model.xyzzy=2", ["architecture", "layers", "heads", "width", "vocabulary_size"]),
        ("schedule=cosine", ["schedule.kind", "schedule.warmup", "schedule.final_fraction", "schedule.decay"]),
        ("model.layers", ["section.key=value", "optimizer.lr=3e-4"]),
        ("=3", ["section.key=value", "optimizer.lr=3e-4"]),
        ("", ["section.key=value", "optimizer.lr=3e-4"]),
    ],
)
def test_an_override_that_resembles_no_key_lists_the_known_keys(override: str, names: list[str]) -> None:
    [line] = refused("tiny", override)
    said = line.removeprefix(f"--set {override}: ")
    assert said != line
    assert set(names) <= set(re.split("[ ,]+", said))


def test_every_synonym_refers_to_an_existing_key() -> None:
    assert set(SYNONYMS.values()) <= set(all_keys(Config))
    assert not SYNONYMS.keys() & {key.rpartition(".")[2] for key in all_keys(Config)} - {"name", "kind"}


def test_a_long_value_is_shortened() -> None:
    [line] = refused("tiny", "model.layers=" + "x" * 500)
    assert len(line) < 150


def message(override: str) -> str:
    try:
        load_config("tiny", [override])
    except ValueError as error:
        return str(error)
    return ""


@given(key=st.text(), value=st.text())
def test_no_override_causes_more_than_an_error_message(key: str, value: str) -> None:
    for override in (f"{key}={value}", f"model.{key}={value}", f"model.layers={value}", f"data.folder={value}"):
        assert "validation error" not in message(override)


def test_every_mistake_in_a_file_is_listed(file: Path) -> None:
    text = file.read_text().replace("layers = 2", 'layer = 2\nheds = "x"').replace("lr = 3e-3", 'lr = "big"')
    file.write_text(text + "\n[chekpoints]\nkeep = 1\n")
    missing, layer, heds, lr, chekpoints = refused(file)
    assert missing.startswith(f"{file}: model.layers ")
    assert missing.endswith(expected(all_keys(Config)["model.layers"]))
    assert layer.startswith(f"{file}: model.layer: ")
    assert keys_named(layer) == ["model.layers"]
    assert heds.startswith(f"{file}: model.heds: ")
    assert keys_named(heds) == ["model.heads"]
    assert lr.startswith(f'{file}: optimizer.lr = "big": ')
    assert chekpoints.startswith(f"{file}: chekpoints: ")
    assert keys_named(chekpoints) == ["checkpoints"]


def test_mistakes_of_the_file_and_of_the_command_line_are_listed_together(file: Path) -> None:
    file.write_text(file.read_text().replace("heads = 2", "heads = 0"))
    lines = refused(file, "model.layers=0", "sed=3")
    begins = ("--set sed=3: ", "--set model.layers = 0: ", f"{file}: model.heads = 0: ")
    assert [line.startswith(begin) for line, begin in zip(lines, begins, strict=True)] == [True] * 3


def test_an_override_corrects_a_file(file: Path) -> None:
    file.write_text(file.read_text().replace("layers = 2\n", ""))
    assert load_config(str(file), ["model.layers=2"]) == load_config("tiny")


def test_the_error_for_an_empty_file_names_every_required_section(file: Path) -> None:
    file.write_text("")
    needed = {
        "name": [],
        "[model]": ["layers", "heads", "width"],
        "[data]": ["folder"],
        "[optimizer]": ["lr"],
        "[training]": ["tokens", "batch_size"],
    }
    for line, (part, keys) in zip(refused(file), needed.items(), strict=True):
        assert line.startswith(f"{file}: ")
        assert {part, *keys} <= set(re.split("[ ,:]+", line))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a = 1\nmodel = [", "end of document"),
        ("a = 1\nb = = 2", "line 2, column 5"),
        ("a = 1\na = 2\n", "line 2, column 6"),
    ],
)
def test_a_file_that_is_not_toml_is_refused_with_the_position(file: Path, text: str, place: str) -> None:
    file.write_text(text)
    [line] = refused(file)
    assert line.startswith(f"{file}: ")
    assert "TOML" in line
    assert line.endswith(f"(at {place})")  # tomllib's wording


@pytest.mark.parametrize("overrides", [(), ("model.layers=2",)])
def test_a_value_where_a_section_should_be_is_refused(file: Path, overrides: tuple[str, ...]) -> None:
    text = file.read_text()
    start, end = text.index("[model]"), text.index("[data]")
    file.write_text("model = 3\n" + text[:start] + text[end:])
    [line] = refused(file, *overrides)
    assert line.startswith(f"{file}: model = 3: ")
    keys = {"architecture", "layers", "heads", "width", "context", "vocabulary_size", "tied", "bias"}
    assert {"[model]", *keys} <= set(re.split("[ ,]+", line))


def test_a_file_that_is_not_text_is_refused(file: Path) -> None:
    file.write_bytes(b"name = '\xff'")
    [line] = refused(file)
    assert line.startswith(f"{file}: ")
    assert re.search(r"\b8\b.*UTF-8", line)


@pytest.mark.parametrize("spec", ["nowhere.toml", "no/where", "no/where.toml"])
def test_a_missing_file_is_refused_with_the_presets(spec: str) -> None:
    [line] = refused(spec)
    assert line.startswith(f"{spec}: ")
    assert line.endswith(", ".join(PRESETS))


def test_a_file_where_a_folder_should_be_is_refused(file: Path) -> None:
    [line] = refused(file / "config.toml")
    assert line.startswith(f"{file}/config.toml: ")
    assert line.endswith(os.strerror(errno.ENOTDIR))


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    [line] = refused(tmp_path)
    assert line.startswith(str(tmp_path))
    assert "config.toml" in line
    assert keys_named(line) == []


@pytest.mark.parametrize(
    ("spec", "near"),
    [("gpt2-125", ["gpt2-125m"]), ("tinny", ["tiny"]), ("llama-1.3B", ["llama-1.3b"]), ("xyzzy", []), ("", [])],
)
def test_an_unknown_preset_is_refused_with_the_closest_one_and_all_others(spec: str, near: list[str]) -> None:
    [line] = refused(spec)
    assert line.startswith(repr(spec))
    assert [name for name in re.findall(r"[\w.-]*\w", line.removeprefix(repr(spec))) if name in PRESETS] == [
        *near,
        *PRESETS,
    ]


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["model.heads=3"], ["model.width = 64", "model.heads = 3"]),
        (["model.architecture=llama", "model.heads=64"], ["model.heads = 64", "64 / 64 = 1"]),
        (["model.architecture=llama", "model.bias=true"], ["model.bias = true", 'model.architecture = "llama"']),
        (
            ["data.tokenizer=gpt2", "model.vocabulary_size=4096"],
            ["model.vocabulary_size = 4096", '"auto"', "50257", 'data.tokenizer = "gpt2"'],
        ),
        (["data.tokenizer=bpe:4k"], ['data.tokenizer = "bpe:4k"', '"bpe:4096"']),
        (["training.micro_batch_size=5"], ["training.micro_batch_size = 5", "training.batch_size = 16"]),
        (["training.micro_batch_size=32"], ["training.micro_batch_size = 32", "training.batch_size = 16"]),
        (
            ["training.tokens=1023", "schedule.warmup=0"],
            ["training.tokens = 1023", "1024", "training.batch_size = 16", "model.context = 64"],
        ),
        (["schedule.warmup=300"], ["schedule.warmup = 300", " 300 ", "training.tokens = 307200"]),
        (["schedule.warmup=100%"], ['schedule.warmup = "100%"', " 300 ", "training.tokens = 307200"]),
        (
            ["schedule.kind=wsd", "schedule.warmup=100", "schedule.decay=201"],
            ["schedule.decay = 201", " 200 ", " 300"],
        ),
        (["checkpoints.milestones=301"], ["checkpoints.milestones = 301", " 300 "]),
        (["optimizer.couple=all"], ['optimizer.couple = "all"', '"output"', "model.tied = false"]),
        (["optimizer.embeddings=sgd"], ["optimizer.sgd_factor ", 'optimizer.embeddings = "sgd"', "300", "400"]),
        (
            ["optimizer.sgd_factor=300"],
            ["optimizer.sgd_factor = 300.0", 'optimizer.embeddings = "coupled"', 'optimizer.embeddings = "sgd"'],
        ),
        (
            ["optimizer.sgd_momentum=0.5"],
            ["optimizer.sgd_momentum = 0.5", 'optimizer.embeddings = "coupled"', 'optimizer.embeddings = "sgd"'],
        ),
        (
            ["optimizer.embeddings=adamw", "optimizer.scale_exponent=1"],
            ["optimizer.scale_exponent = 1.0", 'optimizer.embeddings = "adamw"', 'optimizer.embeddings = "coupled"'],
        ),
        (
            ["model.tied=false", "optimizer.embeddings=adamw", "optimizer.couple=all"],
            [
                'optimizer.couple = "all"',
                'optimizer.embeddings = "adamw"',
                'optimizer.embeddings = "coupled" or "sgd"',
                "optimizer.centre = true",
            ],
        ),
        (["schedule.decay=10%"], ['schedule.decay = "10%"', 'schedule.kind = "cosine"', 'schedule.kind = "wsd"']),
        (
            ["schedule.kind=constant", "schedule.final_fraction=0"],
            ["schedule.final_fraction = 0.0", 'schedule.kind = "constant"', 'schedule.kind = "cosine" or "wsd"'],
        ),
        (
            ["training.device=cpu", "training.cuda_graphs=true"],
            ["training.cuda_graphs = true", "false", '"auto"', 'training.device = "cpu"'],
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides: list[str], named: list[str]) -> None:
    [line] = refused("tiny", *overrides)
    assert line.startswith(f"preset tiny with --set: {named[0]}")
    assert [each for each in named if each not in line] == []


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.tied=false", "optimizer.couple=all"],
        ["model.tied=false", "optimizer.couple=all", "optimizer.embeddings=sgd", "optimizer.sgd_factor=300"],
        ["model.tied=false", "optimizer.couple=output", "optimizer.embeddings=adamw"],
        ["model.tied=false", "optimizer.couple=input", "optimizer.embeddings=adamw", "optimizer.centre=true"],
        ["optimizer.embeddings=sgd", "optimizer.sgd_factor=300", "optimizer.sgd_momentum=0.5"],
        ["optimizer.embeddings=coupled", "optimizer.scale_exponent=-2", "optimizer.centre=true"],
        ["schedule.kind=wsd", "schedule.warmup=100", "schedule.decay=200"],
        ["schedule.warmup=299"],
        ["checkpoints.milestones=300"],
        ["training.tokens=1024", "schedule.warmup=0"],
        ["data.tokenizer=my/tokenizer.json", "model.vocabulary_size=10"],
    ],
)
def test_compatible_settings_are_accepted(overrides: list[str]) -> None:
    load_config("tiny", overrides)


def test_all_contradictions_are_listed() -> None:
    lines = refused("tiny", "model.heads=3", "optimizer.couple=input", "training.micro_batch_size=3")
    keys = ["model.width", "optimizer.couple", "training.micro_batch_size"]
    assert [line.split(": ")[1].split(" = ")[0] for line in lines] == keys


def test_a_contradiction_in_a_file_names_the_file(file: Path) -> None:
    file.write_text(file.read_text().replace("heads = 2", "heads = 3"))
    [line] = refused(file)
    assert line.startswith(f"{file}: model.width = 64")
    assert "model.heads = 3" in line
