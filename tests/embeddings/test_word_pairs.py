"""Benchmark files in their original and in the plain format, and malformed ones."""

from pathlib import Path

import pytest
from measure_reference import data_path, needs_test_data

from coupled_adam.base.errors import UserError
from coupled_adam.embeddings import WordPairs, load_word_pairs

SIMLEX_ORIGINAL = (
    "word1\tword2\tPOS\tSimLex999\tconc(w1)\tconc(w2)\tconcQ\tAssoc(USF)\tSimAssoc333\tSD(SimLex)\n"
    "old\tnew\tA\t1.58\t2.72\t2.81\t2\t7.25\t1\t0.41\n"
    "smart\tintelligent\tA\t9.2\t1.75\t2.46\t1\t7.11\t1\t0.67\n"
)
RW_ORIGINAL = "squishing\tsquirt\t5.88\t7\t8\t5\t6\t7\t6\t4\t5\t7\t3\nundated\tundatable\t5.83" + 10 * "\t6" + "\n"
PLAIN = "sun\tsunlight\t50.0\nriver\twater\t49.0\n"
SUN = (("sun", "sunlight"), ("river", "water"))


@pytest.mark.parametrize(
    ("file", "text", "name", "pairs", "scores"),
    [
        ("SimLex-999.txt", SIMLEX_ORIGINAL, "SimLex-999", (("old", "new"), ("smart", "intelligent")), (1.58, 9.2)),
        ("MEN_dataset_natural_form_full", "sun sunlight 50.000000\nriver water 49.0\n", "MEN", SUN, (50.0, 49.0)),
        ("MEN_dataset_lemma_form_full", "sun-n sunlight-n 50.000000\nriver-n water-n 49\n", "MEN", SUN, (50.0, 49.0)),
        (
            "combined.csv",
            "Word 1,Word 2,Human (mean)\nsun,sunlight,6.77\nriver,water,10\n",
            "WordSim-353",
            SUN,
            (6.77, 10),
        ),
        (
            "combined.tab",
            "Word 1\tWord 2\tHuman (mean)\nsun\tsunlight\t6.77\nriver\twater\t10.00\n",
            "WordSim-353",
            SUN,
            (6.77, 10),
        ),
        ("wordsim_similarity_goldstandard.txt", PLAIN, "WordSim-353 similarity", SUN, (50, 49)),
        ("wordsim_relatedness_goldstandard.txt", PLAIN, "WordSim-353 relatedness", SUN, (50, 49)),
        ("rw.txt", RW_ORIGINAL, "RW", (("squishing", "squirt"), ("undated", "undatable")), (5.88, 5.83)),
        ("simlex999.txt", "# Word 1\tWord 2\tHuman (mean)\n" + PLAIN, "SimLex-999", SUN, (50, 49)),
        ("EN-SIMLEX-999.TXT", PLAIN, "SimLex-999", SUN, (50, 49)),
        ("EN-MEN-TR-3k.txt", PLAIN, "MEN", SUN, (50, 49)),
        ("WS-353-ALL.tsv", PLAIN.replace("\n", "\r\n"), "WordSim-353", SUN, (50, 49)),
        ("ws353_sim.tsv", "\ufeff\n" + PLAIN.rstrip(), "WordSim-353 similarity", SUN, (50, 49)),
        ("WS-353-REL.tsv", "first\tsecond\tscore\n" + PLAIN, "WordSim-353 relatedness", SUN, (50, 49)),
        ("RW-STANFORD.tsv", PLAIN, "RW", SUN, (50, 49)),
        ("MEN.csv", PLAIN.replace("\t", ", "), "MEN", SUN, (50, 49)),
    ],
)
def test_each_benchmark_is_read_in_each_of_its_formats(
    tmp_path: Path, file: str, text: str, name: str, pairs: tuple[tuple[str, str], ...], scores: tuple[float, ...]
) -> None:
    (tmp_path / file).write_text(text, encoding="utf-8", newline="")
    assert load_word_pairs(tmp_path) == {name: WordPairs(name, pairs, scores)}


def test_unpacked_archives_are_found_and_other_files_ignored(tmp_path: Path) -> None:
    files = {
        "SimLex-999/SimLex-999.txt": SIMLEX_ORIGINAL,
        "SimLex-999/README.txt": "not word pairs",
        "MEN/MEN_dataset_natural_form_full": "stairs staircase 49.0\n",
        "MEN/MEN_dataset_lemma_form_full": "stair-n staircase-n 49.0\n",
        "MEN/MEN_dataset_lemma_form.dev": "broken",
        "wordsim353_sim_rel/wordsim353_agreed.txt": "i\ttiger\tcat\t7.35\n",
        "RG-65.tsv": "broken",
        "rw.zip": "broken",
        "nothing.txt": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "rw").mkdir()
    found = load_word_pairs(str(tmp_path))
    assert set(found) == {"SimLex-999", "MEN"}
    assert found["MEN"].pairs == (("stairs", "staircase"),)


def test_only_the_lemma_form_of_men_loses_its_marks(tmp_path: Path) -> None:
    (tmp_path / "rw.txt").write_text("x-n\ty-v\t1\n")
    (tmp_path / "men.txt").write_text("t-v\tscreen\t1\n")
    found = load_word_pairs(tmp_path)
    assert (found["RW"].pairs, found["MEN"].pairs) == ((("x-n", "y-v"),), (("t-v", "screen"),))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", ": (?!.*header)"),
        ("# only a comment\n", ": (?!.*header)"),
        ("word1\tword2\tscore\n", ": .*header"),
        ("a\tb\t1\n\nc\td\n", r", line 3: .*column 3\b.*\btabs\b.*\b2 columns"),
        ("a\tb\t1\nc\td\thigh\n", r", line 2: .*column 3\b.*'high'"),
        ("a\tb\t1\nc\td\tnan\n", r", line 2: .*column 3\b.*'nan'"),
        ("a\tb\t1\nc\td\t\n", r", line 2: .*column 3\b.*''"),
        ("a\tb\t1\n\td\t3\n", ", line 2: .*word1, word2, score"),
        ("a b c 1\n", ": .*header"),
        ("just one word per line\nword\n", ", line 2: .*word1, word2, score"),
        (SIMLEX_ORIGINAL + "c\td\tA\n", r", line 4: .*column 4\b.*\b3 columns"),
    ],
)
def test_malformed_files_are_named_with_their_line(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "men.tsv").write_text(text)
    with pytest.raises(UserError, match=f"/men.tsv{named}"):
        load_word_pairs(tmp_path)


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "rw.txt").write_bytes(b"\xff\xfe\x00a")
    with pytest.raises(UserError, match=r"/rw.txt: .*UTF-8"):
        load_word_pairs(tmp_path)


def test_folders_without_benchmarks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"{tmp_path}.*SimLex-999\.txt"):
        load_word_pairs(tmp_path)
    with pytest.raises(UserError, match=rf"{tmp_path}/missing\b"):
        load_word_pairs(tmp_path / "missing")


@needs_test_data
def test_the_published_benchmarks_have_their_published_sizes() -> None:
    found = load_word_pairs(data_path("wordsim"))
    sizes = {name: len(benchmark) for name, benchmark in found.items()}
    assert sizes == {
        "SimLex-999": 999,
        "MEN": 3000,
        "WordSim-353": 353,
        "WordSim-353 similarity": 203,
        "WordSim-353 relatedness": 252,
        "RW": 2034,
    }
    assert all(0 <= score <= (50 if name == "MEN" else 10) for name, b in found.items() for score in b.scores)
