"""Open a folder of token shards, either with a manifest or as nanoGPT writes it (train.bin, val.bin, uint16).

Opening checks the size and the first tokens of each file; `verify` reads everything.

Legend: V vocabulary rows.
"""

import hashlib
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import file_hash
from coupled_adam.data.manifest import (
    MANIFEST_FILE,
    SPLITS,
    TOKENIZER_FILE,
    UNIGRAM_FILE,
    Manifest,
    Shard,
    Split,
    read_manifest,
)
from coupled_adam.data.tokens import Tokens

UNFINISHED = "unfinished"
"""Folder of an unfinished preparation; removed once the manifest is written."""
FIRST_TOKENS = 4096
SAMPLED_PLACES, SAMPLED_BYTES = 16, 4096
GPT2_VOCABULARY = 50257


@dataclass(frozen=True)
class Corpus:
    """The token shards of a folder, with their tokenizer and splits."""

    folder: Path
    manifest: Manifest
    notes: tuple[str, ...] = ()
    """Assumptions about the folder that the user should know."""

    @property
    def vocabulary_size(self) -> int:
        """V: tokens of the tokenizer, without padding."""
        return self.manifest.vocabulary_size

    @property
    def tokenizer(self) -> str | None:
        """A tiktoken name such as "gpt2", "tokenizer.json" for the file in the folder, or None if unknown."""
        return self.manifest.tokenizer

    def tokenizer_file(self) -> Path | None:
        """The tokenizer.json of this corpus; None for a tiktoken name, which has no such file."""
        return self.folder / TOKENIZER_FILE if self.tokenizer == TOKENIZER_FILE else None

    @property
    def tokenizer_spec(self) -> str | Path | None:
        """Argument for `open_tokenizer`: the file or a tiktoken name; None if the tokenizer is unknown."""
        return self.tokenizer_file() or self.tokenizer

    @property
    def fingerprint(self) -> str:
        """Twelve hex digits that change with the tokens.

        They come from the hashes in the manifest, or from samples of each shard if the manifest has no hashes.
        """
        shards = [shard for split in self.manifest.splits.values() for shard in split.shards]
        if all(shard.sha256 for shard in shards):
            return self.manifest.fingerprint
        seen = hashlib.sha256(self.manifest.fingerprint.encode())
        for shard in shards:
            seen.update(_sample(self.folder / shard.file))
        return seen.hexdigest()[:12]

    @property
    def splits(self) -> list[str]:
        """The splits that have tokens, of "train", "val" and "test"."""
        return [name for name, split in self.manifest.splits.items() if split.tokens]

    def tokens(self, split: str) -> Tokens:
        """The tokens of one split, memory-mapped."""
        if split not in self.splits:
            raise UserError(f"{self.folder}: no split {split!r}; it has {', '.join(self.splits)}")
        paths = [self.folder / shard.file for shard in self.manifest.splits[split].shards]
        return Tokens(paths, self.manifest.dtype, self.vocabulary_size, f"{self.folder}, split {split}")

    def unigram(self) -> npt.NDArray[np.int64]:
        """Count of each token in the training split, (V,), from unigram.npy or by counting if the file is missing."""
        from coupled_adam.embeddings.unigram import count_unigram, load_unigram

        if (self.folder / UNIGRAM_FILE).is_file():
            return load_unigram(self.folder / UNIGRAM_FILE, self.vocabulary_size)
        paths = [self.folder / shard.file for shard in self.manifest.splits["train"].shards]
        return count_unigram(paths, self.vocabulary_size, dtype=self.manifest.dtype)

    def verify(self) -> None:
        """Read every shard; check its hash, if the manifest has one, and that all tokens are in the vocabulary."""
        for split in self.splits:
            for shard in self.manifest.splits[split].shards:
                path = self.folder / shard.file
                if shard.sha256 is not None and file_hash(path) != shard.sha256:
                    raise UserError(
                        f"{path}: its sha256 differs from the manifest; it was changed or damaged. Copy it again, or "
                        "prepare the folder again with --overwrite"
                    )
            tokens = self.tokens(split)
            for start in range(0, len(tokens), 2**22):
                tokens.read(start, min(2**22, len(tokens) - start))


def is_corpus(path: Path) -> bool:
    """Whether a path is a folder with a manifest or a train.bin, which `open_corpus` can open."""
    return path.is_dir() and ((path / MANIFEST_FILE).is_file() or (path / "train.bin").is_file())


def open_corpus(folder: str | Path) -> Corpus:
    """Open a folder written by `prepare` or nanoGPT.

    Args:
        folder: contains manifest.json; or train.bin, val.bin and optionally test.bin, which are read as uint16 GPT-2
            tokens, with a warning.
    """
    corpus = open_known_corpus(folder)
    for note in corpus.notes:
        warnings.warn(note, stacklevel=2)
    return corpus


def open_known_corpus(folder: str | Path) -> Corpus:
    """Open a corpus without warnings; they are in the `notes` of the corpus instead."""
    corpus = open_without_shards(folder)
    _check_shards(corpus)
    return corpus


def open_without_shards(folder: str | Path) -> Corpus:
    """Open a corpus whose shards may be missing, for its tokenizer."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(
            f"corpus: {folder} is not a folder; create it with `coupled-adam data prepare SOURCE --out {folder}`"
        )
    notes: tuple[str, ...] = ()
    if (folder / MANIFEST_FILE).is_file():
        manifest = read_manifest(folder / MANIFEST_FILE)
    elif (folder / UNFINISHED).is_dir():
        raise UserError(
            f"corpus: {folder} is not finished; run the same `coupled-adam data prepare` command again to resume it"
        )
    else:
        manifest = _manifest_of_plain_folder(folder)
        notes = (
            f"{folder} has no {MANIFEST_FILE}; reading its files as uint16 tokens of GPT-2 ({GPT2_VOCABULARY} tokens)",
        )
    if manifest.tokenizer == TOKENIZER_FILE and not (folder / TOKENIZER_FILE).is_file():
        raise UserError(
            f"{folder}: {TOKENIZER_FILE} is missing; copy it again, or prepare the folder again with --overwrite"
        )
    return Corpus(folder, manifest, notes)


def _sample(path: Path) -> bytes:
    """Bytes from evenly spaced positions in a file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        parts = []
        for place in range(SAMPLED_PLACES):
            file.seek(max(size - SAMPLED_BYTES, 0) * place // (SAMPLED_PLACES - 1))
            parts.append(file.read(SAMPLED_BYTES))
    return b"".join(parts)


def _manifest_of_plain_folder(folder: Path) -> Manifest:
    files = {name: folder / f"{name}.bin" for name in SPLITS if (folder / f"{name}.bin").is_file()}
    if "train" not in files:
        raise UserError(
            f"corpus: {folder} has neither {MANIFEST_FILE} nor train.bin; create it with "
            f"`coupled-adam data prepare SOURCE --out {folder}`"
        )
    sizes = {name: path.stat().st_size for name, path in files.items()}
    for name, size in sizes.items():
        if size % 2 or size == 0:
            raise UserError(
                f"{files[name]}: has {size} bytes, expected uint16 tokens, two bytes each; write a {MANIFEST_FILE} "
                "with its dtype, or copy the file again"
            )
    return Manifest.model_validate(
        {
            "tokenizer": "gpt2",
            "vocabulary_size": GPT2_VOCABULARY,
            "dtype": "uint16",
            "separator": GPT2_VOCABULARY - 1,
            "splits": {
                name: Split(tokens=size // 2, shards=[Shard(file=f"{name}.bin", tokens=size // 2)])
                for name, size in sizes.items()
            },
        }
    )


def _check_shards(corpus: Corpus) -> None:
    """Check names and sizes of the shards and their first tokens, without reading whole shards."""
    itemsize = np.dtype(corpus.manifest.dtype).itemsize
    for name, split in corpus.manifest.splits.items():
        if split.tokens != sum(shard.tokens for shard in split.shards):
            raise UserError(
                f"{corpus.folder / MANIFEST_FILE}: the shards of {name} do not add up to its {split.tokens} tokens; "
                "correct the numbers, or prepare the folder again with --overwrite"
            )
        for shard in split.shards:
            path = corpus.folder / shard.file
            if not path.is_file():
                raise UserError(
                    f"{path}: this shard is missing; copy it again, or prepare the folder again with --overwrite"
                )
            size = path.stat().st_size
            if size != shard.tokens * itemsize:
                raise UserError(
                    f"{path}: has {size} bytes, expected {shard.tokens * itemsize} for {shard.tokens} tokens of "
                    f"{corpus.manifest.dtype}; it is truncated or has another dtype. Copy it again, or prepare the "
                    "folder again with --overwrite"
                )
            tokens = Tokens([path], corpus.manifest.dtype, corpus.vocabulary_size, str(path))
            tokens.read(0, min(FIRST_TOKENS, len(tokens)))
