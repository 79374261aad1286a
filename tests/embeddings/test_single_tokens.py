"""The token of a word, for tokenizers that represent words differently."""

import os
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from measure_reference import data_path, needs_test_data

from coupled_adam.base.errors import UserError
from coupled_adam.tokenizer import open_tokenizer

tokenizers = pytest.importorskip("tokenizers")
TEXT = ["the house and the river and the house", "the old house by the river", "river houses the river house"] * 5


def byte_level() -> Any:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXT, tokenizers.trainers.BpeTrainer(initial_alphabet=alphabet, vocab_size=300))
    return tokenizer


def sentence_piece() -> Any:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=60, special_tokens=["<unk>"])
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def word_piece() -> Any:
    vocabulary = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "the": 3, "house": 4, "river": 5, "##s": 6}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    tokenizer.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    return tokenizer


@pytest.mark.parametrize(
    ("build", "written"),
    [(byte_level, "Ġ{}"), (sentence_piece, "▁{}"), (word_piece, "{}")],
    ids=["byte-level", "sentencepiece", "wordpiece"],
)
@pytest.mark.parametrize("as_folder", [False, True])
def test_a_word_is_looked_up_as_it_appears_in_text(build: Any, written: str, as_folder: bool, tmp_path: Path) -> None:
    original = build()
    original.save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(tmp_path if as_folder else str(tmp_path / "tokenizer.json"))
    for word in ("house", "river"):
        expected = original.get_vocab()[written.format(word)]
        assert tokenizer.token_id(word) == expected
    assert tokenizer.token_id("zyzzyva") is None
    assert tokenizer.token_id("house river") is None
    assert tokenizer.size == original.get_vocab_size()


def test_an_unknown_word_is_not_the_unknown_token(tmp_path: Path) -> None:
    word_piece().save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(tmp_path)
    assert tokenizer.encode("the zyzzyva") == [3, 0]
    assert tokenizer.token_id("zyzzyva") is None
    assert tokenizer.token_id("houses") is None
    assert tokenizer.token_id("House") == 4  # this tokenizer knows no capitals


def test_encoding_adds_and_removes_nothing(tmp_path: Path) -> None:
    word_piece().save(str(tmp_path / "tokenizer.json"))
    assert open_tokenizer(tmp_path).encode("the house the rivers") == [3, 4, 3, 5, 6]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["a", "Ġhouse", "house", "ĠcafÃ©", "Ġhouse", "▁x"], {"house": 1, "café": 3, "a": None, "x": None}),
        (["<s>", "▁house", "house", "▁café", "Ġ"], None),
        (["▁", "▁house", "house", "▁café"], {"house": 1, "café": 3, "x": None}),
    ],
)
def test_tokens_are_read_from_a_gguf_file(
    tokens: list[str], expected: dict[str, int | None] | None, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "model.gguf", tokens)
    tokenizer = open_tokenizer(tmp_path / "model.gguf")
    for word, token in (expected or {"house": 1, "café": 3}).items():
        assert tokenizer.token_id(word) == token
    assert tokenizer.size == len(tokens)
    with pytest.raises(UserError, match=r"model\.gguf\b.*tokenizer\.json"):
        tokenizer.encode("the house")


def write_gguf(path: Path, tokens: list[str] | None) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(path), "llama")
    if tokens is not None:
        writer.add_token_list(tokens)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_files_without_words_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "no_tokens.gguf", None)
    with pytest.raises(UserError, match=r"no_tokens\.gguf\b.*tokenizer\.json"):
        open_tokenizer(tmp_path / "no_tokens.gguf")
    write_gguf(tmp_path / "letters.gguf", ["a", "b"])
    with pytest.raises(UserError, match=r"letters\.gguf\b.*'Ġ'.*'▁'.*tokenizer\.json"):
        open_tokenizer(tmp_path / "letters.gguf")
    write_gguf(tmp_path / "whole.gguf", ["a", "▁b"] * 50)
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "whole.gguf").read_bytes()[:100])
    with pytest.raises(UserError, match=r"cut\.gguf: .*GGUF"):
        open_tokenizer(tmp_path / "cut.gguf")


@pytest.mark.parametrize(
    "value", [struct.pack("<IIQ", 9, 8, 2**60), struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000]
)
def test_a_gguf_vocabulary_that_is_endless_or_nested_is_refused_at_once(tmp_path: Path, value: bytes) -> None:
    pytest.importorskip("gguf")
    key = b"tokenizer.ggml.tokens"
    field = struct.pack("<Q", len(key)) + key + value
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + field + bytes(100))
    with pytest.raises(UserError, match=r"a\.gguf: .*GGUF"):
        open_tokenizer(tmp_path / "a.gguf")


@pytest.mark.parametrize("value", [struct.pack("<II", 4, 7), struct.pack("<IIQI", 9, 4, 1, 7)])
def test_a_gguf_vocabulary_of_numbers_is_refused(tmp_path: Path, value: bytes) -> None:
    pytest.importorskip("gguf")
    key = b"tokenizer.ggml.tokens"
    field = struct.pack("<Q", len(key)) + key + value
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + field + bytes(100))
    with pytest.raises(UserError, match=r"a\.gguf\b.*tokenizer\.json"):
        open_tokenizer(tmp_path / "a.gguf")


def test_files_that_are_not_tokenizers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "some.json").write_text('{"a": 1}')
    with pytest.raises(UserError, match=r"/some\.json\b.*tokenizer\.json.*GGUF"):
        open_tokenizer(tmp_path / "some.json")
    with pytest.raises(UserError, match=rf"{tmp_path}\b(?!/).*tokenizer\.json.*save_pretrained"):
        open_tokenizer(tmp_path)
    pytest.importorskip("tiktoken")
    with pytest.raises(UserError, match=r"'gpt-nothing'.*tiktoken.*\bgpt2\b.*tokenizer\.json"):
        open_tokenizer("gpt-nothing")


def test_tiktoken_without_a_network_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    import requests

    def unreachable(*_: object, **__: object) -> None:
        raise requests.exceptions.ConnectionError("no network")

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(requests, "get", unreachable)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    with pytest.raises(ConnectionError, match=r"'gpt2'.*TIKTOKEN_CACHE_DIR.*tokenizer\.json"):
        open_tokenizer("gpt2")


@pytest.mark.parametrize(
    ("module", "extra", "spec"),
    [("tokenizers", "study", "t.json"), ("gguf", "gguf", "t.gguf"), ("tiktoken", "study", "gpt2")],
)
def test_a_missing_package_is_named_with_its_extra(
    module: str, extra: str, spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    word_piece().save(str(tmp_path / "t.json"))
    (tmp_path / "t.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"^{module} .*pip install .*\[{extra}\]'"):
        open_tokenizer(spec if spec == "gpt2" else tmp_path / spec)


@needs_test_data
def test_gpt2_is_the_same_from_its_file_and_from_tiktoken(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tiktoken")
    monkeypatch.setitem(os.environ, "TIKTOKEN_CACHE_DIR", str(data_path("gpt2-bpe", "tiktoken_cache")))
    by_name, by_file = open_tokenizer("gpt2"), open_tokenizer(data_path("gpt2-bpe", "tokenizer.json"))
    assert by_name.size == by_file.size == 50257
    for word, token in {"house": 2156, "Jerusalem": 10843, "squishing": None, "the": 262}.items():
        assert by_name.token_id(word) == by_file.token_id(word) == token
    text = "Hello world.\n\nIt's 1999.<|endoftext|>Next"
    assert by_name.encode(text) == by_file.encode(text)
    assert 50256 in by_name.encode(text)
