"""Every bad key, value and path of a config is one line that says what is wrong and what is expected."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coupled_adam.base.errors import UserError
from coupled_adam.config.builtin_files import PRESETS, preset_text
from coupled_adam.config.explanations import SYNONYMS
from coupled_adam.config.run_config import Config, load_config
from coupled_adam.config.schema import all_keys

EXPECTED_TOKENS = 'expected a number of tokens, such as 5000000, "5B" or "300k"'


def refused(spec: str | Path, *overrides: str) -> list[str]:
    """The lines of the message; a config that is taken fails the test."""
    with pytest.raises(ValueError) as error:  # noqa: PT011
        load_config(str(spec), overrides)
    assert type(error.value) is UserError
    return str(error.value).splitlines()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A config file that is right, to be changed."""
    path = tmp_path / "experiment.toml"
    path.write_text(preset_text("tiny"))
    return path


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.layers=two", '--set model.layers = "two": expected a whole number above 0'),
        ("model.layers=2.0", "--set model.layers = 2.0: expected a whole number above 0"),
        ("model.layers=true", "--set model.layers = true: expected a whole number above 0"),
        ("model.layers=0", "--set model.layers = 0: expected a whole number above 0"),
        ("model.layers=", '--set model.layers = "": expected a whole number above 0'),
        ("model.layers=[1, 2]", "--set model.layers = [1, 2]: expected a whole number above 0"),
        ("model.layers=none", '--set model.layers = "none": expected a whole number above 0'),
        ("model.layers=3\nseed = 2", '--set model.layers = "3\\nseed = 2": expected a whole number above 0'),
        ("model.tied=1", "--set model.tied = 1: expected true or false"),
        ("model.tied=True", '--set model.tied = "True": expected true or false'),
        ("model.architecture=gpt3", '--set model.architecture = "gpt3": expected "gpt2" or "llama"'),
        ("optimizer.lr=0", "--set optimizer.lr = 0: expected a number above 0"),
        ("optimizer.lr=nan", "--set optimizer.lr = nan: expected a number above 0"),
        ("optimizer.lr=inf", "--set optimizer.lr = inf: expected a number above 0"),
        ("optimizer.lr=1e999", "--set optimizer.lr = inf: expected a number above 0"),
        ("optimizer.lr=fast", '--set optimizer.lr = "fast": expected a number above 0'),
        ("optimizer.beta2=1", "--set optimizer.beta2 = 1: expected a number from 0 up to, but not, 1"),
        ("optimizer.weight_decay=-0.1", "--set optimizer.weight_decay = -0.1: expected 0 or a number above it"),
        ("schedule.final_fraction=1.5", "--set schedule.final_fraction = 1.5: expected a number from 0 to 1"),
        (
            "schedule.warmup=101%",
            '--set schedule.warmup = "101%": expected a number of steps, or a share of the run such as "1%"',
        ),
        (
            "schedule.warmup=-1",
            '--set schedule.warmup = -1: expected a number of steps, or a share of the run such as "1%"',
        ),
        (
            "schedule.warmup=0.5",
            '--set schedule.warmup = 0.5: expected a number of steps, or a share of the run such as "1%"',
        ),
        ("training.tokens=5Q", f'--set training.tokens = "5Q": {EXPECTED_TOKENS}'),
        ("training.tokens=0", f"--set training.tokens = 0: {EXPECTED_TOKENS}"),
        ("training.tokens=-5B", f'--set training.tokens = "-5B": {EXPECTED_TOKENS}'),
        ("training.tokens=1.5", f"--set training.tokens = 1.5: {EXPECTED_TOKENS}"),
        ("training.tokens=true", f"--set training.tokens = true: {EXPECTED_TOKENS}"),
        ("training.compile=maybe", '--set training.compile = "maybe": expected true, false or "auto"'),
        ("checkpoints.every=0", '--set checkpoints.every = 0: expected a whole number above 0 or "none"'),
        ("checkpoints.keep=0", "--set checkpoints.keep = 0: expected a whole number above 0"),
        ("checkpoints.milestones=-1", "--set checkpoints.milestones = -1: expected 0 or a whole number above it"),
        ("log.wandb=", '--set log.wandb = "": expected text or "none"'),
        ("seed=-1", "--set seed = -1: expected a whole number from 0 to 2^63 - 1"),
        (
            "seed=9223372036854775808",
            "--set seed = 9_223_372_036_854_775_808: expected a whole number from 0 to 2^63 - 1",
        ),
        (
            "name=a/b",
            '--set name = "a/b": expected letters, digits and . _ + - only, beginning with a letter or digit',
        ),
        ("data.folder=\udcff", '--set data.folder = "\\U0000dcff": expected text'),
    ],
)
def test_a_bad_value_is_one_line_with_key_value_and_what_is_expected(override: str, message: str) -> None:
    assert refused("tiny", override) == [message]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.layer=2", "unknown key; did you mean model.layers?"),
        ("modell.layers=2", "unknown key; did you mean model.layers?"),
        ("lr=3e-4", "unknown key; did you mean optimizer.lr?"),
        ("training.lr=3e-4", "unknown key; did you mean optimizer.lr?"),
        ("learning_rate=3e-4", "unknown key; did you mean optimizer.lr?"),
        ("optimizer.learning_rate=1", "unknown key; did you mean optimizer.lr?"),
        ("optimizer.weight_deacy=1", "unknown key; did you mean optimizer.weight_decay?"),
        ("batch=8", "unknown key; did you mean training.batch_size?"),
        ("training.steps=8", "unknown key; did you mean training.tokens?"),
        ("model.n_layer=8", "unknown key; did you mean model.layers?"),
        ("model.vocab-size=8", "unknown key; did you mean model.vocabulary_size?"),
        ("log.evry=8", "unknown key; did you mean log.every?"),
        ("checkpoints.evry=8", "unknown key; did you mean checkpoints.every?"),
        ("xyzzy=3e-4", "unknown key; expected one of: name, seed, [model], [data], [optimizer], [schedule], "
         "[training], [checkpoints], [log]"),
        ("optimizer.xyzzy=1", "unknown key; expected one of: embeddings, lr, couple, scale_exponent, row_exponent, "
         "column_exponent, mean_free, row_exponent_start, anneal, sgd_factor, "
         "sgd_momentum, centre, beta1, beta2, eps, weight_decay, max_grad_norm, z_loss"),
        ("tokenz=5B", "unknown key; did you mean training.tokens?"),
        ("optmizer=2", "unknown key; did you mean optimizer?"),
        ("model.layers.x=2", "unknown key; did you mean model.layers?"),
        ("seed.x=2", "unknown key; did you mean seed?"),
        ("model.xyzzy=2", "unknown key; expected one of: architecture, layers, heads, width, context, vocabulary_size, "
         "tied, bias, output_bias"),
        ("schedule=cosine", "schedule is a section; set one of its keys: schedule.kind, schedule.warmup, "
         "schedule.final_fraction, schedule.decay"),
        ("model.layers", "expected section.key=value, such as optimizer.lr=3e-4"),
        ("=3", "expected section.key=value, such as optimizer.lr=3e-4"),
        ("", "expected section.key=value, such as optimizer.lr=3e-4"),
    ],
)  # fmt: skip
def test_an_override_without_a_known_key_says_what_was_meant(override: str, message: str) -> None:
    assert refused("tiny", override) == [f"--set {override}: {message}"]


def test_every_synonym_leads_to_a_key_that_there_is() -> None:
    assert set(SYNONYMS.values()) <= set(all_keys(Config))
    assert not SYNONYMS.keys() & {key.rpartition(".")[2] for key in all_keys(Config)} - {"name", "kind"}


def test_a_long_value_is_cut() -> None:
    [line] = refused("tiny", "model.layers=" + "x" * 500)
    assert len(line) < 150


def message(override: str) -> str:
    try:
        load_config("tiny", [override])
    except ValueError as error:
        return str(error)
    return ""


@given(key=st.text(), value=st.text())
def test_no_override_whatever_it_is_shows_more_than_a_message(key: str, value: str) -> None:
    for override in (f"{key}={value}", f"model.{key}={value}", f"model.layers={value}", f"data.folder={value}"):
        assert "validation error" not in message(override)


def test_a_bad_file_is_blamed_for_each_of_its_mistakes(file: Path) -> None:
    text = file.read_text().replace("layers = 2", 'layer = 2\nheds = "x"').replace("lr = 3e-3", 'lr = "big"')
    file.write_text(text + "\n[chekpoints]\nkeep = 1\n")
    assert refused(file) == [
        f"{file}: model.layers is missing: expected a whole number above 0",
        f"{file}: model.layer: unknown key; did you mean model.layers?",
        f"{file}: model.heds: unknown key; did you mean model.heads?",
        f'{file}: optimizer.lr = "big": expected a number above 0',
        f"{file}: chekpoints: unknown key; did you mean checkpoints?",
    ]


def test_mistakes_of_the_file_and_of_the_command_line_are_listed_together(file: Path) -> None:
    file.write_text(file.read_text().replace("heads = 2", "heads = 0"))
    assert refused(file, "model.layers=0", "sed=3") == [
        "--set sed=3: unknown key; did you mean seed?",
        "--set model.layers = 0: expected a whole number above 0",
        f"{file}: model.heads = 0: expected a whole number above 0",
    ]


def test_an_override_mends_a_file(file: Path) -> None:
    file.write_text(file.read_text().replace("layers = 2\n", ""))
    assert load_config(str(file), ["model.layers=2"]) == load_config("tiny")


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (
            "",
            [
                "name is missing: expected letters, digits and . _ + - only, beginning with a letter or digit",
                "section [model] is missing: expected at least its keys layers, heads, width",
                "section [data] is missing: expected at least its keys folder",
                "section [optimizer] is missing: expected at least its keys lr",
                "section [training] is missing: expected at least its keys tokens, batch_size",
            ],
        ),
        ("a = 1\nmodel = [", ["not valid TOML: Invalid value (at end of document)"]),
        ("a = 1\nb = = 2", ["not valid TOML: Invalid value (at line 2, column 5)"]),
        ("a = 1\na = 2\n", ["not valid TOML: Cannot overwrite a value (at line 2, column 6)"]),
    ],
)
def test_a_file_that_is_no_config_is_refused(file: Path, text: str, lines: list[str]) -> None:
    file.write_text(text)
    assert refused(file) == [f"{file}: {line}" for line in lines]


@pytest.mark.parametrize("overrides", [(), ("model.layers=2",)])
def test_a_value_where_a_section_should_be_is_refused(file: Path, overrides: tuple[str, ...]) -> None:
    text = file.read_text()
    start, end = text.index("[model]"), text.index("[data]")
    file.write_text("model = 3\n" + text[:start] + text[end:])
    keys = "architecture, layers, heads, width, context, vocabulary_size, tied, bias, output_bias"
    assert refused(file, *overrides) == [f"{file}: model = 3: expected a section [model] with the keys {keys}"]


def test_a_file_that_is_not_text_is_refused(file: Path) -> None:
    file.write_bytes(b"name = '\xff'")
    assert refused(file) == [f"{file}: not a text file: byte 8 is not UTF-8"]


@pytest.mark.parametrize("spec", ["nowhere.toml", "no/where", "no/where.toml"])
def test_a_missing_file_is_refused_with_the_presets(spec: str) -> None:
    assert refused(spec) == [f"{spec}: no such file or run folder; presets are: {', '.join(PRESETS)}"]


def test_a_file_where_a_folder_should_be_is_refused(file: Path) -> None:
    assert refused(file / "config.toml") == [f"{file}/config.toml: cannot be read: Not a directory"]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    message = f"{tmp_path} is a folder without config.toml; expected a run folder, a TOML file or a preset"
    assert refused(tmp_path) == [message]


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        ("gpt2-125", "did you mean gpt2-125m? "),
        ("tinny", "did you mean tiny? "),
        ("llama-1.3B", "did you mean llama-1.3b? "),
        ("xyzzy", ""),
        ("", ""),
    ],
)
def test_an_unknown_preset_is_refused_with_the_near_one_and_all(spec: str, hint: str) -> None:
    assert refused(spec) == [f"{spec!r} is no preset and no file; {hint}presets are: {', '.join(PRESETS)}"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.heads=3"], "model.width = 64: expected a multiple of model.heads = 3"),
        (
            ["model.architecture=llama", "model.heads=64"],
            "model.heads = 64: rotary positions need heads of even width, 64 / 64 = 1 is odd",
        ),
        (
            ["model.architecture=llama", "model.bias=true"],
            'model.bias = true: expected false with model.architecture = "llama"',
        ),
        (
            ["data.tokenizer=gpt2", "model.vocabulary_size=4096"],
            'model.vocabulary_size = 4096: expected "auto" or at least 50257, the tokens of data.tokenizer = "gpt2"',
        ),
        (
            ["data.tokenizer=bpe:4k"],
            'data.tokenizer = "bpe:4k": expected a number of tokens after "bpe:", such as "bpe:4096"',
        ),
        (
            ["training.micro_batch_size=5"],
            "training.micro_batch_size = 5: expected a number that divides training.batch_size = 16",
        ),
        (
            ["training.micro_batch_size=32"],
            "training.micro_batch_size = 32: expected a number that divides training.batch_size = 16",
        ),
        (
            ["training.tokens=1023", "schedule.warmup=0"],
            "training.tokens = 1023: expected at least 1024, the tokens of one step (training.batch_size = 16 samples "
            "of model.context = 64)",
        ),
        (
            ["schedule.warmup=300"],
            "schedule.warmup = 300: expected fewer steps than the run's 300 (training.tokens = 307200)",
        ),
        (
            ["schedule.warmup=100%"],
            'schedule.warmup = "100%": expected fewer steps than the run\'s 300 (training.tokens = 307200)',
        ),
        (
            ["schedule.kind=wsd", "schedule.warmup=100", "schedule.decay=201"],
            "schedule.decay = 201: expected at most the 200 steps that the warm-up leaves of 300",
        ),
        (["checkpoints.milestones=301"], "checkpoints.milestones = 301: expected at most the run's 300 steps"),
        (
            ["optimizer.couple=all"],
            'optimizer.couple = "all": a tied model has one table, which counts as output; expected "output", or '
            "model.tied = false",
        ),
        (
            ["optimizer.embeddings=sgd"],
            'optimizer.sgd_factor is missing: optimizer.embeddings = "sgd" needs it; the paper finds 300 to 400',
        ),
        (
            ["optimizer.sgd_factor=300"],
            'optimizer.sgd_factor = 300.0 has no effect with optimizer.embeddings = "coupled"; leave it out, or set '
            'optimizer.embeddings = "sgd"',
        ),
        (
            ["optimizer.sgd_momentum=0.5"],
            'optimizer.sgd_momentum = 0.5 has no effect with optimizer.embeddings = "coupled"; leave it out, or set '
            'optimizer.embeddings = "sgd"',
        ),
        (
            ["optimizer.embeddings=adamw", "optimizer.scale_exponent=1"],
            'optimizer.scale_exponent = 1.0 has no effect with optimizer.embeddings = "adamw"; leave it out, or set '
            'optimizer.embeddings = "coupled"',
        ),
        (
            ["model.tied=false", "optimizer.embeddings=adamw", "optimizer.couple=all"],
            'optimizer.couple = "all" has no effect with optimizer.embeddings = "adamw"; leave it out, or set '
            'optimizer.embeddings = "coupled" or "sgd", or optimizer.centre = true',
        ),
        (
            ["schedule.decay=10%"],
            'schedule.decay = "10%" has no effect with schedule.kind = "cosine"; leave it out, or set schedule.kind = '
            '"wsd"',
        ),
        (
            ["schedule.kind=constant", "schedule.final_fraction=0"],
            'schedule.final_fraction = 0.0 has no effect with schedule.kind = "constant"; leave it out, or set '
            'schedule.kind = "cosine" or "wsd"',
        ),
        (
            ["training.device=cpu", "training.cuda_graphs=true"],
            'training.cuda_graphs = true: expected false or "auto" with training.device = "cpu"',
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides: list[str], message: str) -> None:
    assert refused("tiny", *overrides) == [f"preset tiny with --set: {message}"]


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
def test_settings_that_go_together_are_taken(overrides: list[str]) -> None:
    load_config("tiny", overrides)


def test_all_contradictions_are_listed() -> None:
    lines = refused("tiny", "model.heads=3", "optimizer.couple=input", "training.micro_batch_size=3")
    keys = ["model.width", "optimizer.couple", "training.micro_batch_size"]
    assert [line.split(": ")[1].split(" = ")[0] for line in lines] == keys


def test_a_contradiction_in_a_file_is_laid_on_the_file(file: Path) -> None:
    file.write_text(file.read_text().replace("heads = 2", "heads = 3"))
    assert refused(file) == [f"{file}: model.width = 64: expected a multiple of model.heads = 3"]
