"""The family of second moments in the config of a run: exponents, mean-free updates and annealing."""

import tomllib

import pytest

from coupled_adam.base.errors import UserError
from coupled_adam.config.optimizer_names import member_name, short_member_name
from coupled_adam.config.run_config import Config, load_config
from coupled_adam.config.toml_writing import to_toml


def config(*changes: str) -> Config:
    return load_config("tiny", [f"optimizer.{change}" for change in changes])


def mistakes(*changes: str) -> list[str]:
    with pytest.raises(UserError) as error:
        config(*changes)
    return str(error.value).splitlines()


def test_defaults_are_coupled_adam_without_a_schedule() -> None:
    optimizer = config().optimizer
    assert (optimizer.row_exponent, optimizer.column_exponent, optimizer.mean_free) == (0.0, 1.0, False)
    assert config().row_exponent(0) is None


def test_row_exponent_alone_is_constant_and_needs_no_schedule() -> None:
    constant = config("row_exponent=0.25", "mean_free=true")
    assert constant.optimizer.row_exponent == 0.25
    assert [constant.row_exponent(step) for step in (0, 7, 10**6)] == [None, None, None]
    assert constant.anneal_steps == 0


@pytest.mark.parametrize(("start", "end"), [(1.0, 0.25), (0.0, 0.5), (0.5, 0.0)])
def test_annealing_is_linear_and_ends_exactly_at_row_exponent(start: float, end: float) -> None:
    annealed = config(f"row_exponent={end}", f"row_exponent_start={start}", "anneal=8")
    expected = [start * (1 - step / 8) + end * step / 8 for step in range(9)] + [end, end]
    assert [annealed.row_exponent(step) for step in range(11)] == pytest.approx(expected, abs=1e-15)
    assert (annealed.row_exponent(0), annealed.row_exponent(8), annealed.row_exponent(10**6)) == (start, end, end)


def test_anneal_as_a_share_of_the_run_is_rounded_up() -> None:
    annealed = config("row_exponent=0.25", "row_exponent_start=1.0", 'anneal="10%"')
    assert annealed.anneal_steps == -(-annealed.total_steps // 10)


@pytest.mark.parametrize("key", ["row_exponent", "column_exponent", "row_exponent_start"])
@pytest.mark.parametrize("value", ["-0.1", "1.5", "nan", "true"])
def test_exponents_outside_0_to_1_are_refused(key: str, value: str) -> None:
    [line] = [line for line in mistakes(f"{key}={value}", "anneal=5") if f"optimizer.{key}" in line][:1]
    assert "from 0 to 1" in line


@pytest.mark.parametrize("embeddings", ["adamw", "sgd"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("row_exponent", "0.25"),
        ("column_exponent", "0.0"),
        ("mean_free", "true"),
        ("row_exponent_start", "0.5"),
        ("anneal", "5"),
    ],
)
def test_keys_of_the_family_are_refused_if_they_have_no_effect(embeddings: str, key: str, value: str) -> None:
    lines = mistakes(f"embeddings={embeddings}", "sgd_factor=300.0", f"{key}={value}")
    assert any(f"optimizer.{key} = {value} has no effect" in line for line in lines)


def test_start_without_anneal_and_anneal_without_start_are_refused() -> None:
    [line] = mistakes("row_exponent=0.25", "row_exponent_start=1.0")
    assert "optimizer.anneal is missing" in line
    [line] = mistakes("row_exponent=0.25", "anneal=5")
    assert "optimizer.row_exponent_start is missing" in line


def test_annealing_from_a_value_to_itself_is_refused() -> None:
    [line] = mistakes("row_exponent=0.25", "row_exponent_start=0.25", "anneal=5")
    assert "optimizer.row_exponent_start = 0.25" in line


@pytest.mark.parametrize("anneal", ["0", "301", '"0%"'])
def test_annealing_longer_than_the_run_or_without_a_step_is_refused(anneal: str) -> None:
    [line] = mistakes("row_exponent=0.25", "row_exponent_start=1.0", f"anneal={anneal}")
    assert f"optimizer.anneal = {anneal}" in line


@pytest.mark.parametrize("member", ["mean_free=true", "row_exponent=0.25", "column_exponent=0.5"])
def test_centring_is_refused_for_members_of_the_family_that_have_mean_free(member: str) -> None:
    [line] = mistakes(member, "centre=true")
    assert "optimizer.centre = true" in line
    assert "optimizer.mean_free = true" in line


def test_centring_is_accepted_with_adamw_and_coupled_adam() -> None:
    assert config("centre=true").optimizer.centre
    assert config("embeddings=adamw", "centre=true").optimizer.centre


def test_the_config_file_of_a_run_gives_the_same_config() -> None:
    annealed = config("row_exponent=0.25", "row_exponent_start=1.0", 'anneal="10%"', "mean_free=true")
    written = tomllib.loads(to_toml(annealed))
    assert written["optimizer"]["anneal"] == "10%"
    assert Config.model_validate(written) == annealed
    assert tomllib.loads(to_toml(config()))["optimizer"]["row_exponent_start"] == "none"


@pytest.mark.parametrize(
    ("settings", "name", "short"),
    [
        ({}, "Coupled Adam", "coupled"),
        ({"scale_exponent": 2.0}, "Coupled Adam (n = 2)", "coupled n=2"),
        ({"mean_free": True}, "Coupled Adam (mean-free)", "coupled mean-free"),
        ({"row_exponent": 0.25}, "partially coupled (y = 0.25)", "partial y=0.25"),
        ({"row_exponent": 1.0}, "factored", "factored"),
        ({"row_exponent": 1.0, "column_exponent": 0.0}, "one number per row", "per-row"),
        ({"column_exponent": 0.0}, "one number per table", "per-table"),
        (
            {"row_exponent": 0.5, "column_exponent": 0.75},
            "partially coupled (x = 0.75, y = 0.5)",
            "partial x=0.75 y=0.5",
        ),
        (
            {"row_exponent_start": 1.0, "row_exponent": 0.0, "mean_free": True},
            "partially coupled (y = 1 to 0, mean-free)",
            "partial y=1-0 mean-free",
        ),
    ],
)
def test_every_member_has_a_long_and_a_short_name(settings: dict[str, float], name: str, short: str) -> None:
    assert (member_name(settings), short_member_name(settings)) == (name, short)
