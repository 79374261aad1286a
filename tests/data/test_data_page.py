"""docs/data.md: its commands print the output shown, its Python runs, and it lists all sources, suffixes and keys."""

import contextlib
import io
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coupled_adam.commands.data import app
from coupled_adam.data.corpus_tokenizer import BPE_CHARACTERS
from coupled_adam.data.manifest import Manifest
from coupled_adam.data.settings import SHARD_TOKENS, Settings
from coupled_adam.data.source_files import COMPRESSED, SMALL_BYTES
from coupled_adam.data.sources import KNOWN
from coupled_adam.data.text_files import KINDS

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


def run_commands(commands: str) -> str:
    """Run the lines of a `sh` block: `python -c "..."`, and `coupled-adam data ...` with a pipe into such a program."""
    printed = ""
    programs = re.findall(
        r'^(?:(coupled-adam [^\n|]*) \| )?python -c "(.*?)"$|^(coupled-adam [^\n|]*)$',
        commands,
        re.DOTALL | re.MULTILINE,
    )
    for piped, program, command in programs:
        output = ""
        if piped or command:
            arguments = shlex.split(piped or command)
            assert arguments[:2] == ["coupled-adam", "data"]
            result = CliRunner(env={"COLUMNS": "100"}).invoke(app, arguments[2:])
            assert result.exit_code == 0, result.output
            output = result.stdout
        if program:
            sys.stdin = io.StringIO(output)
            with contextlib.redirect_stdout(io.StringIO()) as caught:
                exec(program, {})
            sys.stdin = sys.__stdin__
            output = caught.getvalue()
        printed += output
    return printed


def test_the_examples_print_the_output_shown_and_the_python_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = 0
    for language, code, shown in re.findall(r"```(sh|python)\n(.*?)```(?:\n\n```text\n(.*?)```)?", PAGE, re.DOTALL):
        ran += 1
        if language == "python":
            with contextlib.redirect_stdout(io.StringIO()):
                exec(code, {})
            continue
        printed = run_commands(code)
        if shown:
            assert printed == shown
        else:
            assert json.loads(printed.splitlines()[-1])["tokens"] == 25657
    assert ran == 6
    assert (tmp_path / "val-unigram.npy").is_file()


def test_the_page_lists_every_source_suffix_number_and_key() -> None:
    for source in KNOWN.split(", "):
        assert f"| `{source}` |" in PAGE
    for suffix in (*KINDS, *COMPRESSED):
        assert f"`{suffix}`" in PAGE
    for key in Manifest.model_fields:
        assert f"`{key}`" in PAGE
    assert f" {BPE_CHARACTERS // 10**6}M characters" in PAGE
    assert f" {SHARD_TOKENS // 10**6}M tokens" in PAGE
    assert f" {SMALL_BYTES // 10**6} MB" in PAGE
    for option in Settings.__dataclass_fields__.keys() - {"source", "shard_tokens"}:
        assert f"--{option.replace('_', '-')}" in PAGE
