"""Small corpora for the tests of data/: documents, a tokenizer, and folders written by hand."""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np

WORDS = ["apple", "river", "stone", "the", "of", "and", "walks", "über", "日本", "x = 1", "naïve", "  ", "🙂", "\t"]


def documents(count: int, seed: int = 0, longest: int = 60) -> list[str]:
    """Documents of words in several scripts, no two alike."""
    chosen = random.Random(seed)
    return [
        f"Document {number}.\n" + " ".join(chosen.choices(WORDS, k=chosen.randint(1, longest))) + "."
        for number in range(count)
    ]


def write_tokenizer(path: Path, size: int = 300) -> Path:
    """A byte-level BPE, trained with the `tokenizers` library only."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<pad>", "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents(50, seed=99), trainer)
    tokenizer.save(str(path))
    return path


def split_by_hash(text: str, val: float, test: float, seed: int = 0) -> str:
    """An independent implementation of the documented rule: 8 bytes of BLAKE2b, salted with the seed, as a fraction."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, salt=seed.to_bytes(16, "little")).digest()
    place = int.from_bytes(digest, "little") / 2**64
    return "test" if place < test else "val" if place < test + val else "train"


def expected_tokens(
    texts: list[str], tokenizer_json: Path, separator: int, val: float, test: float, seed: int = 0
) -> dict[str, list[int]]:
    """Tokens of each split, document by document, with the `tokenizers` library only."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    found: dict[str, list[int]] = {"train": [], "val": [], "test": []}
    for text in texts:
        found[split_by_hash(text, val, test, seed)] += [*tokenizer.encode(text).ids, separator]
    return found


def write_corpus(folder: Path, changes: dict[str, Any] | None = None) -> Path:
    """A folder as written by another program: two training shards and one validation shard; V = 100."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = {"train-00000.bin": range(60), "train-00001.bin": range(60, 100), "val-00000.bin": range(30)}
    for name, tokens in shards.items():
        np.array(tokens, "<u2").tofile(folder / name)
    entries = [
        {"file": name, "tokens": len(tokens), "sha256": hashlib.sha256((folder / name).read_bytes()).hexdigest()}
        for name, tokens in shards.items()
    ]
    manifest = {
        "vocabulary_size": 100,
        "dtype": "uint16",
        "splits": {
            "train": {"tokens": 100, "documents": 2, "shards": entries[:2]},
            "val": {"tokens": 30, "documents": 1, "shards": entries[2:]},
        },
    }
    (folder / "manifest.json").write_text(json.dumps(manifest | (changes or {})))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """The contents of a folder's files, by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
