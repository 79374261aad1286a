"""All property tests share one profile of hypothesis. A second one would apply to all tests of the same process."""

from pathlib import Path

from hypothesis import settings

TESTS = Path(__file__).parents[1]


def test_only_the_shared_profile_is_loaded() -> None:
    others = [path for path in TESTS.rglob("*.py") if path != Path(__file__)]
    found = [path for path in others if "load_profile(" in path.read_text(encoding="utf-8")]
    assert found == [TESTS / "conftest.py"]


def test_the_shared_profile_has_a_hundred_examples_and_no_deadline() -> None:
    profile = settings.get_profile("coupled-adam")
    assert profile.max_examples >= 100
    assert profile.deadline is None
