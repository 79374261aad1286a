"""Token counts of a text: read from unigram.npy, or counted from token shards or text.

Legend: V vocabulary rows.
"""

import lzma
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import read_json, require_regular_file
from coupled_adam.embeddings.embedding_matrix import Array
from coupled_adam.tokenizer import SingleTokens

Counts = npt.NDArray[np.int64]

TOKEN_TYPES = {"uint16", "uint32", "int32", "int64"}
TOKENS_AT_ONCE = 2**22
CHARACTERS_AT_ONCE = 2**20


def check_counts(counts: Array | Tensor, vocabulary_size: int, name: str = "unigram") -> Counts:
    """Validate counts and return them as int64, (V,)."""
    counts = counts.cpu().numpy() if isinstance(counts, Tensor) else np.asarray(counts)
    if not np.issubdtype(counts.dtype, np.integer):
        raise UserError(f"{name} has dtype {counts.dtype}, expected whole numbers: how often each token occurs")
    if counts.shape != (vocabulary_size,):
        raise UserError(
            f"{name} has shape {counts.shape}, expected ({vocabulary_size},): one count per row of the table. "
            "Count with the same tokenizer; padding rows have count 0"
        )
    if counts.min() < 0:
        raise UserError(f"{name}: token {int(counts.argmin())} has the count {counts.min()}; counts cannot be negative")
    if not counts.any():
        raise UserError(f"{name}: all counts are zero; count a text that contains some of the tokens")
    return counts.astype(np.int64)


def smoothed_log_probabilities(counts: Counts, rows: int) -> npt.NDArray[np.float64]:
    """Log-probability of each row with add-one smoothing, (rows,).

    Args:
        counts: token counts, at most `rows` of them.
        rows: of the table; rows without a count are padding and treated as tokens that do not occur.

    Example:
        >>> np.exp(smoothed_log_probabilities(np.array([5, 0, 1]), rows=4)).round(2).tolist()
        [0.6, 0.1, 0.2, 0.1]
    """
    if len(counts) > rows:
        raise UserError(f"unigram has {len(counts)} counts, expected at most {rows}, the rows of the table")
    smoothed: npt.NDArray[np.float64] = np.ones(rows)
    smoothed[: len(counts)] += counts
    return np.asarray(np.log(smoothed) - np.log(smoothed.sum()))


def load_unigram(path: str | Path, vocabulary_size: int) -> Counts:
    """Read unigram.npy, (V,) integers.

    A shorter file is for a table with padding at its end: the padding rows get count 0, with a warning.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"unigram: {path}: no such file; pass a .npy file with one count per row of the table")
    require_regular_file(path)
    try:
        with np.errstate(over="raise"):  # the product of sizes may overflow
            counts: Array = np.lib.format.open_memmap(
                path, mode="r"
            )  # raises if the file is shorter than its header says
    except Exception as error:  # numpy raises many kinds of errors on damaged files
        reason = f"{type(error).__name__}: {error}".replace("\n", " ")
        raise UserError(
            f"unigram: {path} cannot be read as .npy ({reason}); save the counts with numpy.save"
        ) from error
    if counts.ndim == 1 and 0 < len(counts) < vocabulary_size:
        padding = vocabulary_size - len(counts)
        warnings.warn(
            f"{path} has {len(counts)} counts, but the table has {vocabulary_size} rows: "
            f"treating the last {padding} as padding",
            stacklevel=2,
        )
        counts = np.pad(counts, (0, padding))
    return check_counts(counts, vocabulary_size, str(path))


def count_unigram(
    paths: str | Path | Sequence[str | Path], vocabulary_size: int, *, dtype: str | None = None
) -> Counts:
    """Count the tokens of shards.

    Args:
        paths: .bin files (headerless, little-endian), .u16.xz files, or folders of such files.
        vocabulary_size: V, the number of rows of the table.
        dtype: of the .bin files; None to read it from manifest.json in the same folder, or use uint16 with a warning.
    """
    counts = no_counts(vocabulary_size)
    if dtype is not None:
        check_token_type(dtype, "count_unigram")
    for path in shard_files([paths] if isinstance(paths, (str, Path)) else paths):
        for tokens in read_tokens(path, dtype):
            add_counts(counts, tokens, path)
    return check_counts(counts, vocabulary_size, "the token shards")


def count_unigram_text(path: str | Path, tokenizer: SingleTokens, vocabulary_size: int) -> Counts:
    """Count the tokens of a UTF-8 text, plain or .xz. It is split at line ends about every million characters."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"text: {path} is not a file; pass a UTF-8 text, plain or .xz")
    open_text = lzma.open if path.suffix == ".xz" else open
    counts = no_counts(vocabulary_size)
    try:
        with open_text(path, "rt", encoding="utf-8") as file:
            while lines := file.readlines(CHARACTERS_AT_ONCE):
                add_counts(counts, np.array(tokenizer.encode("".join(lines)), np.int64), path)
    except (UnicodeDecodeError, lzma.LZMAError, EOFError) as error:
        raise UserError(f"text: {path} cannot be read as UTF-8 text ({error})") from error
    return check_counts(counts, vocabulary_size, str(path))


def shard_files(paths: Iterable[str | Path]) -> list[Path]:
    """Expand `paths` to files, replacing folders by their shards."""
    files: list[Path] = []
    for path in map(Path, paths):
        inside = sorted([*path.glob("*.bin"), *path.glob("*.u16.xz")]) if path.is_dir() else [path]
        if not inside or not all(file.is_file() for file in inside):
            raise UserError(f"token shards: {path} is neither a file nor a folder with .bin or .u16.xz files")
        files += inside
    if not files:
        raise UserError("token shards: no files; pass at least one")
    return files


def read_tokens(path: Path, dtype: str | None) -> Iterator[Array]:
    """Read the tokens of one shard, a few million at a time."""
    is_compressed = path.name.endswith(".u16.xz")
    kind = np.dtype("uint16" if is_compressed else dtype or shard_dtype(path)).newbyteorder("<")
    try:
        with lzma.open(path) if is_compressed else path.open("rb") as file:
            while data := file.read(TOKENS_AT_ONCE * kind.itemsize):
                if len(data) % kind.itemsize:
                    raise UserError(
                        f"{path}: its length is not a multiple of {kind.itemsize} bytes ({kind.name} tokens)"
                    )
                yield np.frombuffer(data, kind)
    except (lzma.LZMAError, EOFError) as error:
        raise UserError(f"{path}: damaged .xz file ({error}); copy it again") from error


def shard_dtype(path: Path) -> str:
    """Data type of a .bin file, from manifest.json in the same folder."""
    manifest = path.parent / "manifest.json"
    if not manifest.is_file():
        warnings.warn(f"{path}: no manifest.json in its folder; reading the tokens as uint16", stacklevel=2)
        return "uint16"
    try:
        dtype = read_json(manifest)["dtype"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{manifest}: expected JSON with a 'dtype' ({type(error).__name__}: {error})") from error
    check_token_type(dtype, str(manifest))
    return str(dtype)


def check_token_type(dtype: object, source: str) -> None:
    """Raise if the data type of tokens in `source` is not supported."""
    if str(dtype) not in TOKEN_TYPES:
        raise UserError(f"{source}: dtype {dtype!r} is unknown; expected one of {', '.join(sorted(TOKEN_TYPES))}")


def no_counts(vocabulary_size: int) -> Counts:
    """Zeros, (V,)."""
    if vocabulary_size < 1:
        raise UserError(f"Invalid vocabulary_size value: {vocabulary_size}. Use the number of rows of the table")
    return np.zeros(vocabulary_size, np.int64)


def add_counts(counts: Counts, tokens: Array, path: Path) -> None:
    """Add the tokens to their counts, in place."""
    if tokens.size == 0:
        return
    for token in (tokens.min(), tokens.max()):
        if not 0 <= token < len(counts):
            raise UserError(
                f"{path}: has the token {token}, but the vocabulary has {len(counts)} rows; "
                "pass the shards of this tokenizer, or the right dtype"
            )
    counts += np.bincount(tokens, minlength=len(counts))
