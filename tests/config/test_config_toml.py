"""A config written as TOML is read back unchanged."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coupled_adam import __version__
from coupled_adam.config.builtin_files import PRESETS
from coupled_adam.config.run_config import (
    MATTERS_FOR_RESUME,
    Config,
    differences,
    load_config,
    require_resumable,
    to_toml,
)
from coupled_adam.config.schema import all_keys
from coupled_adam.config.toml_writing import toml_value

counts = st.integers(1, 10**12)
texts = st.text(min_size=1).filter(lambda text: text != "none")
rates = st.floats(0, 1, exclude_max=True)
positive = st.floats(0, exclude_min=True, allow_infinity=False)
percents = st.builds("{}%".format, st.floats(0, 30).map(lambda share: f"{share:.3f}"))


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Any valid config."""

    def some(**strategies: st.SearchStrategy[Any]) -> dict[str, Any]:
        """Values for some of these keys; the others keep their default."""
        return draw(st.fixed_dictionaries({}, optional=strategies))

    batch, context, steps = draw(st.integers(1, 512)), draw(st.integers(1, 4096)), draw(st.integers(10, 10**7))
    heads, tied = draw(st.integers(1, 64)), draw(st.booleans())
    llama = draw(st.booleans())
    width = heads * draw(st.integers(1, 64)) * 2
    model = some(vocabulary_size=st.integers(50257, 10**6)) | {"layers": draw(counts), "heads": heads, "width": width}
    model |= {"context": context, "tied": tied, "architecture": "llama" if llama else "gpt2"}
    model |= {} if llama else some(bias=st.booleans())
    kinds: list[dict[str, Any]] = [
        {"embeddings": "adamw"},
        {"embeddings": "coupled", **some(scale_exponent=st.floats(allow_nan=False, allow_infinity=False))},
        {"embeddings": "sgd", "sgd_factor": draw(positive), **some(sgd_momentum=rates)},
    ]
    optimizer = draw(st.sampled_from(kinds)) | some(beta1=rates, eps=positive, z_loss=positive, centre=st.booleans())
    has_choice = not tied and (optimizer["embeddings"] != "adamw" or optimizer.get("centre", False))
    optimizer |= some(couple=st.sampled_from(["output", "input", "all"])) if has_choice else {}
    return Config.model_validate(
        {
            "name": draw(st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._+-]{0,20}\Z")),
            "model": model,
            "data": {"folder": draw(texts)}
            | some(source=texts | st.none(), order=st.sampled_from(["random", "epochs"])),
            "optimizer": optimizer | {"lr": draw(positive)},
            "schedule": some(warmup=st.integers(0, 9) | percents, kind=st.sampled_from(["cosine", "wsd"])),
            "training": {"tokens": steps * batch * context, "batch_size": batch}
            | some(compile=st.booleans() | st.just("auto"), micro_batch_size=st.sampled_from([1, batch, None])),
            "checkpoints": some(every=counts | st.none(), minutes=positive | st.none(), milestones=st.integers(0, 10)),
            "log": some(wandb=texts | st.none(), tensorboard=st.booleans(), every=counts, val_every=counts | st.none()),
        }
        | some(seed=st.integers(0, 2**63 - 1))
    )


def test_a_busy_machine_does_not_fail_property_tests() -> None:
    assert settings.default is not None
    assert settings.default.deadline is None


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(configs())
def test_a_config_is_read_back_unchanged(config: Config) -> None:
    text = to_toml(config)
    assert Config.model_validate(tomllib.loads(text)) == config
    # The model accepts whatever the config accepts.
    assert config.to_model_config().width == config.model.width


@pytest.mark.parametrize(
    "text", ["C:\\data\\new", 'a "b"', "a\tb\nc\r\x00\x7f\x85", "\u2028\u202e\ufeff", "日本 😀", "'", "# no"]
)
def test_awkward_text_is_read_back_unchanged(text: str) -> None:
    assert tomllib.loads(f"key = {toml_value(text)}") == {"key": text}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_read_back_unchanged(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(to_toml(load_config(name)))
    assert load_config(str(tmp_path)) == load_config(name)


def test_the_written_file_explains_every_key_and_names_the_version() -> None:
    lines = to_toml(load_config("tiny")).splitlines()
    assert lines[0] == f"# Written by coupled-adam {__version__}."
    for key, field in all_keys(Config).items():
        name = key.rpartition(".")[2]
        places = [number for number, line in enumerate(lines) if line.startswith(f"{name} = ")]
        first_words = " ".join((field.description or "").split()[:3])
        comments = []
        for place in places:
            start = place
            while lines[start - 1].startswith("# "):
                start -= 1
            comments.append(lines[start])
        assert any(comment.startswith(f"# {first_words}") for comment in comments), key
    assert max(map(len, lines)) <= 120


@settings(max_examples=30)
@given(configs(), configs())
def test_two_configs_are_equal_or_differ_in_keys(a: Config, b: Config) -> None:
    assert (differences(a, b) == []) == (a == b)
    free = {"model.vocabulary_size"} if b.model.vocabulary_size == "auto" else set()  # the run keeps its own
    matters = [key for key in differences(a, b) if key in MATTERS_FOR_RESUME - free]
    try:
        require_resumable(a, b)
        listed = []
    except ValueError as error:
        listed = [line.partition(" = ")[0] for line in str(error).splitlines()[1:]]
    assert listed == matters
