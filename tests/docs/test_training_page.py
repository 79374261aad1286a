"""docs/training.md and its two references: the python runs, the commands exist, the tables have every key and file."""

import re
import shlex
from pathlib import Path

import pytest
from page_examples import ROOT, Example, read_examples, run_here
from typer.main import get_command

from coupled_adam.cli import app
from coupled_adam.config.run_config import Config, load_config
from coupled_adam.config.schema import all_keys
from coupled_adam.embeddings import EmbeddingMetrics
from coupled_adam.training.logbook import read_metrics

PAGE = ROOT / "docs" / "training.md"
PAGES = [PAGE, PAGE.with_name("training-optimizers.md"), PAGE.with_name("training-files.md")]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
COMMANDS = [
    words
    for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    for words in (shlex.split(line, comments=True) for line in block.splitlines())
    if words[:2] != ["pip", "install"]
]


@pytest.mark.parametrize("example", read_examples(PAGE), ids=str)
def test_example_of_the_training_page_runs_and_writes_the_keys_of_its_table(
    example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    folder = run_here(example)["outcome"].folder
    rows = read_metrics(folder / "metrics.jsonl")
    assert {row["kind"] for row in rows} == {"train", "val", "embeddings"}
    for row in rows:
        for key in row.keys() - {"kind", "step"}:
            is_measure = key in EmbeddingMetrics.__dataclass_fields__
            assert f"`{key}`" in TEXT or (row["kind"] == "embeddings" and is_measure), key
    for name in (path.name for path in folder.rglob("*")):
        assert re.sub(r"\d{9}", "000000300", name) in TEXT, name


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_on_the_training_page_uses_existing_commands_options_presets_and_keys(command: list[str]) -> None:
    words = command[command.index("coupled_adam" if "torchrun" in command else "coupled-adam") + 1 :]
    if ">" in words:
        words = words[: words.index(">")]
    group = get_command(app)
    found = group.get_command(None, words[0])  # type: ignore[attr-defined, arg-type]
    assert found is not None, f"no command {words[0]}"
    if words[0] == "data":
        found = found.get_command(None, words[1])
        assert found is not None, f"no command data {words[1]}"
    options = {name for parameter in found.params for name in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= options
    if words[0] == "train" and not words[1].startswith("--") and not Path(words[1]).suffix and "/" not in words[1]:
        load_config(words[1], [words[i + 1] for i, word in enumerate(words) if word == "--set"])


def test_every_dotted_key_on_the_training_page_is_in_the_config() -> None:
    keys = set(all_keys(Config))
    sections = {key.partition(".")[0] for key in keys if "." in key}
    named = set(re.findall(rf"(?<![\w.])((?:{'|'.join(sections)})(?:\.[a-z_0-9]+)+)", TEXT)) - {
        "data.md",
        "training.md",
    }
    assert len(named) > 20
    assert named <= keys | {key.rpartition(".")[0] for key in keys}


def test_the_how_to_on_training_and_its_references_lead_to_each_other() -> None:
    how_to, *references = (page.read_text(encoding="utf-8") for page in PAGES)
    assert all(f"]({page.name})" in how_to for page in PAGES[1:])
    assert all("](training.md" in reference for reference in references)
