"""Folders: Hugging Face models in one file or in shards, our runs and checkpoints, and models on a small hub.

Legend: V vocabulary rows, H hidden size.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import huggingface_hub
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from coupled_adam.base.errors import UserError
from coupled_adam.inspection import folders
from coupled_adam.inspection.model_tables import read_model
from coupled_adam.tables_file import write_tables

V, H = 120, 16


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=V, n_embd=H, n_layer=1, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=0)
    )


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=V, hidden_size=H, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    )


def assert_tables_of(model: PreTrainedModel, path: Path) -> None:
    """transformers knows the tables of its models."""
    found = {table.role: torch.as_tensor(table.matrix) for table in read_model(str(path)).tables}
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    expected = {"tied": embedding} if embedding is head else {"input": embedding, "output": head}
    assert found.keys() == expected.keys()
    for role, weight in expected.items():
        assert torch.equal(found[role], weight.detach())


def test_a_tied_model_in_one_file(tmp_path: Path) -> None:
    model = gpt2()
    model.save_pretrained(tmp_path)
    assert_tables_of(model, tmp_path)


def test_an_untied_model_in_shards_of_which_only_two_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama()
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(shards) >= 4
    opened = []
    original = folders.open_file
    monkeypatch.setattr(folders, "open_file", lambda path: opened.append(path.name) or original(path))
    assert_tables_of(model, tmp_path)
    with_tables = {name for name in shards if holds_a_table(tmp_path / name)}
    assert set(opened) == with_tables
    assert len(with_tables) == 2


def holds_a_table(path: Path) -> bool:
    with safe_open(path, "pt") as file:
        return bool({"model.embed_tokens.weight", "lm_head.weight"} & set(file.keys()))


def test_pickled_weights_in_shards(tmp_path: Path) -> None:
    model = llama()
    model.config.save_pretrained(tmp_path)
    state = model.state_dict()
    torch.save({"lm_head.weight": state.pop("lm_head.weight")}, tmp_path / "pytorch_model-2.bin")
    torch.save(state, tmp_path / "pytorch_model-1.bin")
    weight_map = dict.fromkeys(state, "pytorch_model-1.bin") | {"lm_head.weight": "pytorch_model-2.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_tables_of(model, tmp_path)


def test_pickled_weights_in_one_file_share_the_tied_table(tmp_path: Path) -> None:
    model = gpt2()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert "lm_head.weight" in model.state_dict()
    assert_tables_of(model, tmp_path)


def test_an_untied_config_without_a_head_has_an_input_table(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    model = read_model(str(tmp_path))
    assert (model.tied, model.tables[0].role) == (False, "input")
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"tie_word_embeddings": False}}))
    assert not read_model(str(tmp_path)).tied


def test_the_tokenizer_of_a_folder_is_its_tokenizer_json(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path)
    assert read_model(str(tmp_path)).tokenizer is None
    (tmp_path / "tokenizer.json").write_text("{}")
    found = read_model(str(tmp_path)).tokenizer
    assert found is not None
    assert found() == str(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "JSON"),
        ("[]", "JSON.* list$"),
        ("{}", "weight_map"),
        ('{"weight_map": {"wte.weight": "gone.safetensors"}}', r"'gone\.safetensors'"),
        ('{"weight_map": {"wte.weight": "../model.safetensors"}}', r"'\.\./model\.safetensors'"),
        ('{"weight_map": {"wte.weight": 3}}', "'3'"),
        ('{"weight_map": {"wte.weight": "there.safetensors"}}', r"'wte\.weight' .*'there\.safetensors'"),
    ],
)
def test_a_broken_index_is_refused(tmp_path: Path, index: str, message: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(index)
    gpt2().save_pretrained(tmp_path)  # outside the folder
    shutil.copy(tmp_path / "model.safetensors", folder / "there.safetensors")
    with pytest.raises(UserError, match=rf"^{folder}/model\.safetensors\.index\.json: .*{message}"):
        read_model(str(folder))


def test_a_broken_config_is_refused(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{'single': quotes}")
    with pytest.raises(ValueError, match=rf"^{tmp_path}/config\.json: .*JSON"):
        read_model(str(tmp_path))


def test_the_only_model_file_of_a_folder_is_used_and_several_are_listed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^{tmp_path}: .*tables\.safetensors"):
        read_model(str(tmp_path))
    torch.save(torch.ones(V, H), tmp_path / "a.pt")
    assert read_model(str(tmp_path)).tables[0].matrix.shape == (V, H)
    torch.save(torch.ones(V, H), tmp_path / "b.pt")
    with pytest.raises(ValueError, match=rf"^{tmp_path}: .*: a\.pt, b\.pt$"):
        read_model(str(tmp_path))


def test_padding_rows_of_our_tables_are_cut_off(tmp_path: Path) -> None:
    padded = {"wte.weight": torch.randn(V + 8, H), "lm_head.weight": torch.randn(V + 8, H)}
    write_tables(
        tmp_path / "tables.safetensors", padded, input="wte.weight", output="lm_head.weight", vocabulary_size=V
    )
    model = read_model(str(tmp_path))
    assert [(table.name, table.role) for table in model.tables] == [
        ("wte.weight", "input"),
        ("lm_head.weight", "output"),
    ]
    for table in model.tables:
        assert torch.equal(torch.as_tensor(table.matrix), padded[table.name][:V])


def test_our_tied_table_has_any_name_and_type(tmp_path: Path) -> None:
    name = "odd name"
    table = torch.randn(H, V).T.bfloat16()  # not contiguous
    write_tables(tmp_path / "tables.safetensors", {name: table}, input=name, output=name, vocabulary_size=V)
    model = read_model(str(tmp_path / "tables.safetensors"))
    assert (model.tied, model.tables[0].role) == (True, "tied")
    assert torch.equal(torch.as_tensor(model.tables[0].matrix), table)
    with safe_open(tmp_path / "tables.safetensors", "pt") as file:
        assert file.metadata() == {"input": name, "output": name, "tied": "true", "vocabulary_size": str(V)}


def test_a_run_shows_its_newest_checkpoint_that_has_tables(tmp_path: Path) -> None:
    for step in (5, 40, 100):
        folder = tmp_path / "checkpoints" / f"step-{step}"
        folder.mkdir(parents=True)
        if step != 100:  # killed before writing it
            table = {"wte.weight": torch.full((V, H), float(step))}
            write_tables(
                folder / "tables.safetensors", table, input="wte.weight", output="wte.weight", vocabulary_size=V
            )
    (tmp_path / "checkpoints" / "step-latest").mkdir()
    assert float(read_model(str(tmp_path)).tables[0].matrix[0, 0]) == 40.0


@pytest.mark.parametrize(
    ("tables", "names", "size", "message"),
    [
        ({"a": torch.ones(4, 2)}, ("a", "b"), 4, r"\['a'\]: .*'a' .*'b'"),
        ({"a": torch.ones(4, 2)}, ("a", "a"), 5, r"'a' .*\(4, 2\), .*vocabulary_size = 5\b"),
        ({"a": torch.ones(4, 2)}, ("a", "a"), 0, r"vocabulary_size = 0\b"),
        ({"a": torch.ones(4)}, ("a", "a"), 4, r"'a' .*\(4,\).*\(V, H\)"),
    ],
)
def test_tables_with_wrong_shapes_are_not_written(
    tmp_path: Path, tables: dict[str, torch.Tensor], names: tuple[str, str], size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write_tables(tmp_path / "a", tables, input=names[0], output=names[1], vocabulary_size=size)
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_the_old_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tables.safetensors"
    write = partial(write_tables, path, input="a", output="a", vocabulary_size=4)
    write({"a": torch.ones(4, 2)})

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write({"a": torch.zeros(4, 2)})
    assert [file.name for file in tmp_path.iterdir()] == ["tables.safetensors"]
    assert float(read_model(str(path)).tables[0].matrix[0, 0]) == 1.0


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"vocabulary_size": "many"}, "vocabulary_size .*'many'"),
        ({"vocabulary_size": "0"}, "vocabulary_size .*'0'"),
        ({"tied": "false"}, "tied .*'false'.*'a'.*'a'"),
        ({"input": "b", "output": "b"}, "'b'.* a$"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path: Path, header: dict[str, str], message: str) -> None:
    good = {"input": "a", "output": "a", "tied": "true", "vocabulary_size": "4"}
    save_file({"a": torch.ones(4, 2)}, tmp_path / "tables.safetensors", metadata=good | header)
    with pytest.raises(UserError, match=rf"^{tmp_path}/tables\.safetensors: .*{message}"):
        read_model(str(tmp_path))


class Hub(SimpleHTTPRequestHandler):
    """Serves /org/name/resolve/main/<file> from a folder, and records downloads."""

    downloaded: list[str]

    def do_HEAD(self) -> None:
        self.answer(with_content=False)

    def do_GET(self) -> None:
        self.answer(with_content=True)

    def answer(self, with_content: bool) -> None:
        repository, _, name = self.path.split("?")[0].partition("/resolve/main/")
        file = Path(self.directory) / name
        known = repository in ("/org/name", "/gpt2")
        if not (known and file.is_file()):
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound" if known else "RepoNotFound")
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = file.read_bytes()
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_content:
            self.downloaded.append(name)
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """A hub with the model org/name; its address, and the files that were downloaded from it."""
    llama().save_pretrained(tmp_path / "served", max_shard_size="10KB")
    handler = type("ThisHub", (Hub,), {"downloaded": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(tmp_path / "served")))
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", handler.downloaded
    server.shutdown()


def send_to(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def online(hub: tuple[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point huggingface_hub to the small hub, with an empty cache."""
    send_to(hub[0], monkeypatch)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("online")
def test_only_the_shards_with_tables_are_downloaded_from_the_hub(
    tmp_path: Path, hub: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, downloaded = hub
    tables = read_model("org/name").tables
    assert [table.role for table in tables] == ["input", "output"]
    shards = {name for name in downloaded if name.endswith(".safetensors")}
    assert shards == {path.name for path in (tmp_path / "served").glob("*.safetensors") if holds_a_table(path)}
    assert set(downloaded) - shards == {"model.safetensors.index.json", "config.json"}

    # Downloaded files are read again without a network.
    downloaded.clear()
    send_to("http://127.0.0.1:9", monkeypatch)
    again = read_model("org/name").tables
    assert torch.equal(torch.as_tensor(again[1].matrix), torch.as_tensor(tables[1].matrix))
    assert downloaded == []


@pytest.mark.usefixtures("online")
def test_a_hub_model_may_have_no_organisation(
    tmp_path: Path, hub: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tables = read_model("gpt2").tables
    assert [table.role for table in tables] == ["input", "output"]
    send_to("http://127.0.0.1:9", monkeypatch)  # from the cache
    assert [table.name for table in read_model("gpt2").tables] == [table.name for table in tables]
    with pytest.raises(UserError, match=r"^bert-base-uncased: .*downloaded.*Hugging Face"):
        read_model("bert-base-uncased")


@pytest.mark.usefixtures("online")
def test_a_folder_has_priority_over_a_hub_model_of_the_same_name(
    tmp_path: Path, hub: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tmp_path / "served", tmp_path / "gpt2")
    read_model("gpt2")
    assert hub[1] == []


@pytest.mark.usefixtures("online")
def test_without_usual_names_only_the_chosen_shard_is_downloaded_from_the_hub(
    tmp_path: Path, hub: tuple[str, list[str]]
) -> None:
    index = tmp_path / "served" / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    chosen = "model.layers.1.mlp.up_proj.weight"
    rest = {name: file for name, file in weight_map.items() if ".layers." in name}
    index.write_text(json.dumps({"weight_map": rest}))
    with pytest.raises(ValueError, match=r"^org/name: .*--tensor: model\.layers\.0\..*\b\d+ more$"):
        read_model("org/name")
    assert not [name for name in hub[1] if name.endswith(".safetensors")]
    assert read_model("org/name", chosen).tables[0].role == "input"
    assert [name for name in hub[1] if name.endswith(".safetensors")] == [weight_map[chosen]]


@pytest.mark.usefixtures("online")
def test_the_tokenizer_of_a_hub_model_is_downloaded_on_request(tmp_path: Path, hub: tuple[str, list[str]]) -> None:
    model = read_model("org/name")
    assert model.tokenizer is not None
    with pytest.raises(ValueError, match=r"^org/name: .*tokenizer\.json.*--tokenizer"):
        model.tokenizer()
    (tmp_path / "served" / "tokenizer.json").write_text("{}")
    assert Path(model.tokenizer()).read_text() == "{}"


@pytest.mark.usefixtures("online")
def test_a_model_that_the_hub_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^org/unknown: .*Hugging Face.*\("):
        read_model("org/unknown")
    for file in (tmp_path / "served").iterdir():
        file.unlink()
    with pytest.raises(ValueError, match=r"^org/name: .*model\.safetensors .*pytorch_model"):
        read_model("org/name")


def test_an_unreachable_hub_is_reported_at_once_in_one_line(tmp_path: Path) -> None:
    """In a separate process, because huggingface_hub writes its retries to stderr."""
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [Path(sys.executable).with_name("coupled-adam"), "inspect", "org/name"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert re.search(r"^Error: org/name: .*downloaded.*Hugging Face", done.stderr), done.stderr
    assert "model.safetensors" not in done.stderr  # a file that nobody named
    assert done.stderr.count("\n") == 1
