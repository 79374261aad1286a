"""`coupled-adam inspect` as a user runs it.

Legend: V vocabulary rows, H hidden size.
"""

import json
import math
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from click.testing import Result
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from coupled_adam.base.errors import MissingPackageError, UserConnectionError
from coupled_adam.cli import app
from coupled_adam.embeddings import download, load_word_pairs, measure
from coupled_adam.inspection.model_inspection import FEW_PAIRS, UNDEFINED
from coupled_adam.inspection.plain_sentence import sentence
from coupled_adam.tables_file import write_tables

COMMAND = Path(sys.executable).with_name("coupled-adam")
V, H = 60, 6
FIELDS = (
    "name role shape iso iso_both_signs mu_norm mean_norm mu_norm_ratio kappa rho rho_log r_cos r_cos_5 spearman "
    "word_similarity iso_score mean_cosine zero_rows unseen_rows"
)

# Wide enough that no cell wraps.
runner = CliRunner(env={"COLUMNS": "250", "TERMINAL_WIDTH": "250"})


def run(*arguments: object) -> Result:
    return runner.invoke(app, ["inspect", *map(str, arguments)])


def rows(shift: float, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((V, H)) + shift).astype(np.float32)


def ratio(E: np.ndarray) -> float:
    return float(np.linalg.norm(E.mean(0)) / np.linalg.norm(E, axis=1).mean())


@pytest.fixture
def untied(tmp_path: Path) -> Path:
    """A model with an anisotropic input table and a centred output table."""
    centred = rows(0.0, seed=1)
    tables = {"model.embed_tokens.weight": rows(3.0), "lm_head.weight": centred - centred.mean(0)}
    save_file({name: torch.from_numpy(table) for name, table in tables.items()}, tmp_path / "untied.safetensors")
    return tmp_path / "untied.safetensors"


def test_two_models_are_shown_side_by_side(untied: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "lonely.npy", rows(0.6))
    result = run(untied, tmp_path / "lonely.npy")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    header = "\n".join(lines[:4])
    for words in ("untied.safetensors", "lonely.npy", "input: model.embed_tokens.weight", "output: lm_head.weight"):
        assert words in header
    (ratios,) = (line for line in lines if "mean-embedding ratio ↓" in line)
    shown = [float(cell) for cell in ratios.split("│")[2:-1]]
    assert shown == pytest.approx([ratio(rows(3.0)), 0.0, ratio(rows(0.6))], rel=1e-3, abs=1e-6)
    assert "tied: lonely" in header


def test_there_is_one_sentence_for_each_table(untied: Path) -> None:
    first, second = run(untied).stdout.splitlines()[-2:]
    percent = 100 * ratio(rows(3.0))
    assert re.search(rf"^untied\.safetensors, input .*model\.embed_tokens\.weight: .*\b{percent:.0f}%", first), first
    assert re.search(r"^untied\.safetensors, output .*lm_head\.weight: .*\b0%", second), second


def test_the_sentence_describes_shift_and_spread() -> None:
    """The only test that checks the wording."""
    E = np.random.default_rng(0).standard_normal((2000, H))
    long = E * [8, 1, 1, 1, 1, 1]
    for table, words in (
        (E + 5.0, "strongly anisotropic"),
        (E + 0.7, "anisotropic"),
        (E + 0.3, "somewhat off-centre"),
        (E, "centred at the origin"),
        (long - long.mean(0), "centred at the origin, but far longer in some directions than in others"),
    ):
        carries = f"the mean embedding carries {100 * ratio(table):.0f}% of a typical embedding's length"
        assert sentence(measure(table)) == f"{carries}: {words}"
    assert sentence(measure(0 * E)) == "every embedding is zero: nothing has been learned here"


def test_a_table_of_zeros_has_its_own_sentence(tmp_path: Path) -> None:
    np.save(tmp_path / "zeros.npy", np.zeros((V, H)))
    result = run(tmp_path / "zeros.npy")
    assert result.exit_code == 0, result.output
    (last,) = (line for line in result.stdout.splitlines() if line.startswith("zeros.npy, "))
    assert "zero" in last
    assert "%" not in last
    assert f"¹ {UNDEFINED}" in result.stdout
    assert json.loads(run(tmp_path / "zeros.npy", "--json").stdout)["models"][0]["tables"][0]["zero_rows"] == V


def test_missing_measures_are_dashes_with_a_note_on_how_to_get_them(untied: Path) -> None:
    lines = run(untied).stdout.splitlines()
    for label, mark in (("rho, log p (%)", "¹"), ("rho, p (%)", "¹"), ("r_cos (%)", "²"), ("Spearman (%)", "²")):
        (line,) = (line for line in lines if f"│ {label}" in line)
        assert line.count(f"—{mark}") == 2
    notes = {line[0]: line for line in lines if line.startswith(("¹", "²", "³"))}
    assert notes.keys() == {"¹", "²"}
    assert notes["¹"].endswith(" --unigram FILE")
    assert notes["²"].endswith(" --wordsim DIR")


def test_json_from_the_real_command_is_one_object_and_the_bar_is_on_the_terminal(untied: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "short.npy", np.arange(1, V))
    np.save(tmp_path / "lonely.npy", rows(0.6))
    arguments = [untied, tmp_path / "lonely.npy", "--unigram", tmp_path / "short.npy", "--json"]
    terminal, errors = pty.openpty()
    done = subprocess.run(
        [COMMAND, "inspect", *arguments, "--html", tmp_path / "page.html"],
        env={**os.environ, "TERM": "xterm", "COLUMNS": "250"},
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        check=True,
    )
    on_terminal = os.read(terminal, 2**16).decode()
    assert done.stdout.count("\n") == 1
    answer = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert list(answer) == ["models"]
    first, second = answer["models"]
    assert (first["path"], first["tied"]) == (str(untied), False)
    assert (second["path"], second["tied"]) == (str(tmp_path / "lonely.npy"), True)
    tables = [*first["tables"], *second["tables"]]
    assert [table["role"] for table in tables] == ["input", "output", "tied"]
    assert [table["name"] for table in tables] == ["model.embed_tokens.weight", "lm_head.weight", "lonely"]
    for table in tables:
        assert list(table) == FIELDS.split()
        assert table["shape"] == [V, H]
        assert table["r_cos"] is None
        assert table["unseen_rows"] == 1
        assert math.isfinite(table["rho_log"])
    assert "measuring" in on_terminal
    assert re.search(rf"Note: {tmp_path / 'short.npy'} .*\b{V - 1}\b.*\b{V}\b.*\b1\b", on_terminal), on_terminal
    assert f"Page: {tmp_path / 'page.html'}" in on_terminal


def test_token_counts_give_the_frequency_correlations(untied: Path, tmp_path: Path) -> None:
    counts = np.random.default_rng(3).integers(1, 50, V)
    np.save(tmp_path / "unigram.npy", counts)
    np.repeat(np.arange(V), counts).astype("<u2").tofile(tmp_path / "tokens.bin")
    norms = np.linalg.norm(rows(3.0).astype(np.float64), axis=1)
    expected = 100 * np.corrcoef(norms, counts)[0, 1]
    (tmp_path / "corpus").mkdir()  # a prepared folder also has validation text, which is not counted
    np.save(tmp_path / "corpus" / "unigram.npy", counts)
    np.zeros(500, dtype="<u2").tofile(tmp_path / "corpus" / "val-00000.bin")
    for file in ("unigram.npy", "tokens.bin", "corpus"):
        answer = json.loads(run(untied, "--unigram", tmp_path / file, "--json").stdout)
        assert answer["models"][0]["tables"][0]["rho"] == pytest.approx(expected, rel=1e-6)


def word_files(tmp_path: Path) -> tuple[list[str], Path]:
    """Twelve words, and a folder with one benchmark whose scores are the cosines of `rows(0.6)`."""
    words = ["cat", "dog", "tree", "leaf", "sea", "ship", "king", "queen", "bread", "wine", "sun", "moon"]
    E = rows(0.6).astype(np.float64)
    unit = E / np.linalg.norm(E, axis=1, keepdims=True)
    pairs = [(i, i + 1) for i in range(len(words) - 1)]
    (tmp_path / "words").mkdir()
    lines = [f"{words[i]}\t{words[j]}\t{unit[i + 1] @ unit[j + 1]}" for i, j in pairs]
    (tmp_path / "words" / "SimLex999.tsv").write_text("\n".join([*lines, "cat\tunknown\t1"]))
    return words, tmp_path / "words"


def save_tokenizer(words: list[str], path: Path) -> None:
    vocabulary = {"the": 0} | {word: 1 + number for number, word in enumerate(words)} | {"[UNK]": 20}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))


def test_word_pairs_use_the_tokenizer_next_to_the_model_or_the_given_one(tmp_path: Path) -> None:
    words, folder = word_files(tmp_path)
    (tmp_path / "model").mkdir()
    save_file({"wte.weight": torch.from_numpy(rows(0.6))}, tmp_path / "model" / "model.safetensors")
    without = run(tmp_path / "model", "--wordsim", folder).stdout
    assert re.search("^¹ .* --unigram FILE$", without, re.MULTILINE), without
    assert re.search("^² .* --tokenizer SPEC$", without, re.MULTILINE), without

    save_tokenizer(words, tmp_path / "elsewhere.json")
    save_tokenizer(words, tmp_path / "model" / "tokenizer.json")
    given = run(
        tmp_path / "model" / "model.safetensors", "--wordsim", folder, "--tokenizer", tmp_path / "elsewhere.json"
    )
    beside = run(tmp_path / "model", "--wordsim", folder)
    for result in (given, beside):
        (line,) = (line for line in result.stdout.splitlines() if "SimLex-999" in line)
        assert "100 (11/12)" in line
        assert f"² {FEW_PAIRS}" in result.stdout


def test_a_run_provides_its_token_counts_and_tokenizer(tmp_path: Path) -> None:
    words, folder = word_files(tmp_path)
    checkpoint, corpus = tmp_path / "run" / "checkpoints" / "step-5", tmp_path / "corpus"
    checkpoint.mkdir(parents=True)
    corpus.mkdir()
    table = {"wte.weight": torch.from_numpy(rows(0.6))}
    write_tables(checkpoint / "tables.safetensors", table, input="wte.weight", output="wte.weight", vocabulary_size=V)
    (tmp_path / "run" / "config.toml").write_text(f"[data]\nfolder = '{corpus}'\n")
    np.save(corpus / "unigram.npy", np.arange(1, V + 1))
    save_tokenizer(words, corpus / "tokenizer.json")
    result = run(tmp_path / "run", "--wordsim", folder)
    assert "100 (11/12)" in result.stdout
    assert "--unigram" not in result.stdout


def test_word_pairs_can_be_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, folder = word_files(tmp_path)
    np.save(tmp_path / "a.npy", rows(0.6))
    save_tokenizer(words, tmp_path / "words.json")
    arguments = (tmp_path / "a.npy", "--tokenizer", tmp_path / "words.json", "--wordsim", "download")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(download, "fetch_word_pairs", lambda _: load_word_pairs(folder))
    assert "100 (11/12)" in run(*arguments).stdout
    for error in (UserConnectionError("Go online"), MissingPackageError("pooch is needed")):
        monkeypatch.setattr(download, "fetch_word_pairs", Mock(side_effect=error))
        assert str(error) in refused(*arguments)
    folder.rename(tmp_path / "download")  # a folder of that name has priority
    assert "100 (11/12)" in run(*arguments).stdout


def test_one_tensor_can_be_chosen(untied: Path) -> None:
    answer = json.loads(run(untied, "--tensor", "lm_head", "--json").stdout)
    (table,) = answer["models"][0]["tables"]
    assert (table["name"], table["role"]) == ("lm_head.weight", "output")


@pytest.mark.parametrize("name", ["a\x1b[2J.weight", "a [red]b[/red]", "[/nothing]"])
def test_names_from_a_file_cannot_control_the_terminal(tmp_path: Path, name: str) -> None:
    save_file({name: torch.from_numpy(rows(0.1))}, tmp_path / "a.safetensors")
    result = run(tmp_path / "a.safetensors")
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    assert name.replace("\x1b", "\\x1b") in result.stdout
    refused = run(tmp_path / "a.safetensors", "--tensor", "zzz")
    assert "\x1b" not in refused.output


def refused(*arguments: object) -> str:
    """Return the message, after checking everything that must be true of a refusal."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.stderr


def test_bad_input_is_refused_with_one_line_that_names_it(untied: Path, tmp_path: Path) -> None:
    bad = rows(0.0)
    bad[7, 2] = np.nan
    np.save(tmp_path / "nan.npy", bad)
    np.save(tmp_path / "cube.npy", np.ones((2, 3, 4)))
    np.save(tmp_path / "long.npy", np.ones(V + 1, np.int64))
    np.save(tmp_path / "floats.npy", np.ones(V))
    (tmp_path / "cut.safetensors").write_bytes(untied.read_bytes()[:-9])
    save_file({"wte.weight": torch.ones(V, H, dtype=torch.int8)}, tmp_path / "int8.safetensors")
    torch.save({"wte.weight": torch.ones(V, H), "when": np.datetime64("now")}, tmp_path / "pickle.pt")
    (tmp_path / "empty").mkdir()

    for arguments, named in (
        ((tmp_path / "missing.npy",), rf"{tmp_path}/missing\.npy: "),
        ((tmp_path / "nan.npy",), rf"{tmp_path}/nan\.npy: tensor 'nan': .*\brow 7\b.*\bnan\b.*\bcolumn 2\b"),
        ((tmp_path / "cube.npy",), rf"{tmp_path}/cube\.npy: .*\bcube \(2, 3, 4\)$"),
        ((tmp_path / "cut.safetensors",), rf"{tmp_path}/cut\.safetensors: .*safetensors .*\("),
        ((tmp_path / "int8.safetensors",), rf"{tmp_path}/int8\.safetensors: tensor 'wte\.weight' .*\bI8\b.*GGUF"),
        ((tmp_path / "pickle.pt",), rf"{tmp_path}/pickle\.pt: .*pickle.*\("),
        ((tmp_path / "empty",), rf"{tmp_path}/empty: .*tables\.safetensors"),
        ((untied, "--tensor", "lm_haed.weight"), rf"{untied}: .*'lm_haed\.weight'.*: lm_head\.weight\b"),
        ((untied, "--unigram", tmp_path / "long.npy"), rf"{tmp_path}/long\.npy .*\(61,\).*\(60,\)"),
        ((untied, "--unigram", tmp_path / "floats.npy"), rf"{tmp_path}/floats\.npy .*\bfloat64\b"),
        ((untied, "--unigram", tmp_path / "gone.npy"), rf"{tmp_path}/gone\.npy\b"),
        ((untied, "--wordsim", tmp_path / "gone"), rf"{tmp_path}/gone\b"),
        ((untied, "--device", "tpu9"), "device 'tpu9'"),
        ((untied, "--device", "meta"), "device 'meta'"),
        ((untied, "--html", tmp_path / "empty"), rf"'{tmp_path}/empty' \("),
    ):
        said = refused(*arguments)
        assert re.search(f"^Error: .*{named}", said.rstrip()), said


def test_a_tokenizer_that_cannot_be_opened_is_refused(untied: Path, tmp_path: Path) -> None:
    _, folder = word_files(tmp_path)
    assert "'no-such'" in refused(untied, "--wordsim", folder, "--tokenizer", "no-such")


def test_a_page_without_its_packages_is_refused_before_measuring(
    untied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "coupled_adam.inspection.inspection_page", raising=False)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    said = refused(untied, "--html", tmp_path / "a")
    assert re.search(r"^Error: jinja2 .*--html.*: pip install .*\[study\]", said), said


def test_help_lists_the_accepted_input() -> None:
    shown = run("--help").output
    options = ("--tensor", "--unigram", "--wordsim", "--tokenizer", "--json", "--html", "--device")
    for words in ("PATH", ".gguf", "mean-embedding ratio", *options):
        assert words in shown
