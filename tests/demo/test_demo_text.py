"""The demo's text: what is collected, in which order, and how its tokens are numbered."""

import random
from pathlib import Path

import pytest

from coupled_adam.demo import text


def test_docstrings_are_collected_in_order_of_paths_whatever_the_order_on_disk(tmp_path: Path) -> None:
    names = [f"m{number}" for number in range(8)]
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        for name in random.Random(seed).sample(names, len(names)):
            (folder / f"{name}.py").write_text(f'"""module {name}"""\n')
        assert text.docstring_documents(folder) == [f"module {name}" for name in names]


def test_a_document_has_all_docstrings_of_a_file_in_its_order(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        '"""module"""\n'
        'x = "no docstring"\n'
        "class A:\n"
        '    """class"""\n'
        "    def f(self):\n"
        '        """method"""\n'
        "try:\n"
        "    import b\n"
        "except ImportError:\n"
        "    async def g():\n"
        '        """in a handler"""\n'
        "def h(): pass\n"
    )
    assert text.docstring_documents(tmp_path) == ["module\n\nclass\n\nmethod\n\nin a handler"]


@pytest.mark.parametrize("folder", ["test", "tests", "idle_test", "site-packages", "dist-packages"])
def test_tests_and_installed_packages_are_skipped(tmp_path: Path, folder: str) -> None:
    (tmp_path / "kept.py").write_text('"""kept"""')
    (tmp_path / "package" / folder / "deep").mkdir(parents=True)
    (tmp_path / "package" / folder / "deep" / "skipped.py").write_text('"""skipped"""')
    assert text.docstring_documents(tmp_path) == ["kept"]


@pytest.mark.filterwarnings("error")
def test_files_that_do_not_parse_are_skipped_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("print 'Python 2'")
    (tmp_path / "b.py").write_bytes(b'"""zero \x00 byte"""')
    (tmp_path / "c.py").write_text('"""old escape \\d"""')
    (tmp_path / "d.py").write_text("x = 1")
    (tmp_path / "e.py").symlink_to(tmp_path / "missing.py")
    assert text.docstring_documents(tmp_path) == ["old escape \\d"]


def test_vocabulary_is_the_most_frequent_tokens_and_ties_go_by_the_alphabet() -> None:
    corpus = text.build_corpus(["b a c c c d"], vocabulary_size=4)
    assert corpus.vocabulary == [text.UNKNOWN, "c", "\n", "a"]
    assert corpus.train.tolist() == [0, 3, 1, 1, 1, 0, 2]


def test_one_document_in_twenty_is_held_out_and_gives_no_tokens_to_the_vocabulary() -> None:
    # Each document is one token of its own, as long as its place.
    documents = ["a" * length for length in range(1, 41)]
    corpus = text.build_corpus(documents, vocabulary_size=100)
    held_out = {"a" * 11, "a" * 31}
    assert set(corpus.vocabulary) == {text.UNKNOWN, "\n", *documents} - held_out
    newline = corpus.vocabulary.index("\n")
    assert corpus.validation.tolist() == [0, newline, 0, newline]
    assert len(corpus.train) == 2 * 38


def test_a_python_without_sources_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(text, "topic_documents", list)
    with pytest.raises(ValueError, match="has 0 documented source files") as raised:
        text.standard_library_corpus(4096)
    assert str(tmp_path) in str(raised.value)
