"""Read word-similarity benchmarks: pairs of words, each with a mean human score.

The file name determines the benchmark, and the content the format: the original files may have headers, more columns,
commas or blanks; the plain form is word1<TAB>word2<TAB>score.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import read_text
from coupled_adam.base.text import counted

SIMLEX = "SimLex-999"
MEN = "MEN"
WORDSIM = "WordSim-353"
WORDSIM_SIMILARITY = "WordSim-353 similarity"
WORDSIM_RELATEDNESS = "WordSim-353 relatedness"
RW = "RW"

# File names in lower case, without punctuation, suffix and a leading "en"; of several files the first name here wins.
FILE_NAMES: dict[str, tuple[str, ...]] = {
    SIMLEX: ("simlex999", "simlex"),
    MEN: ("mendatasetnaturalformfull", "mendatasetlemmaformfull", "mentr3k", "men3000", "men3k", "men", "brunimen"),
    WORDSIM: ("combined", "wordsim353", "wordsim353all", "ws353all", "ws353", "wordsim"),
    WORDSIM_SIMILARITY: (
        "wordsimsimilaritygoldstandard",
        "wordsim353similarity",
        "wordsim353sim",
        "ws353similarity",
        "ws353sim",
    ),
    WORDSIM_RELATEDNESS: (
        "wordsimrelatednessgoldstandard",
        "wordsim353relatedness",
        "wordsim353rel",
        "ws353relatedness",
        "ws353rel",
    ),
    RW: ("rw", "rwstanford", "rareword", "rarewords", "stanfordrw", "luongrare"),
}
ENDINGS = {"", ".txt", ".tsv", ".csv", ".tab"}
# Names of the score column in headers; without a header it is the third column.
SCORE_COLUMNS = ("simlex999", "human (mean)")
SEPARATORS = {"\t": "tabs", ",": "commas", None: "blanks"}


@dataclass(frozen=True)
class WordPairs:
    """One benchmark."""

    name: str
    pairs: tuple[tuple[str, str], ...]
    scores: tuple[float, ...]
    """Mean human score of each pair, on the benchmark's own scale."""

    def __len__(self) -> int:
        return len(self.pairs)


def load_word_pairs(folder: str | Path) -> dict[str, WordPairs]:
    """Read every benchmark in a folder and its subfolders; other files are ignored.

    Args:
        folder: with files as published by their authors, or in the form word1<TAB>word2<TAB>score.

    Returns:
        The benchmarks by name: SimLex-999, MEN, WordSim-353, WordSim-353 similarity,
        WordSim-353 relatedness, RW.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"word pairs: {folder} is not a folder; pass the folder with the benchmark files")
    files: dict[str, list[tuple[int, Path]]] = {name: [] for name in FILE_NAMES}
    for path in sorted(folder.rglob("*")):
        for name, known in FILE_NAMES.items():
            if path.suffix.lower() in ENDINGS and plain_name(path) in known and path.is_file():
                files[name].append((known.index(plain_name(path)), path))
    found = {name: read_word_pairs(name, min(paths)[1]) for name, paths in files.items() if paths}
    if not found:
        raise UserError(
            f"word pairs: no benchmark found in {folder}; expected files such as SimLex-999.txt, "
            "MEN_dataset_natural_form_full, combined.csv, wordsim_similarity_goldstandard.txt, rw.txt"
        )
    return found


def plain_name(path: Path) -> str:
    """File name without suffix, case, punctuation and a leading "en".

    Example:
        >>> plain_name(Path("EN-RW-STANFORD.txt"))
        'rwstanford'
    """
    stem = path.name[: -len(path.suffix)] if path.suffix else path.name
    return re.sub(r"[^a-z0-9]", "", re.sub(r"^en[-_]", "", stem.lower()))


def read_word_pairs(name: str, path: Path) -> WordPairs:
    """Read one benchmark file."""
    try:
        lines = read_text(path).splitlines()
    except ValueError as error:
        raise UserError(f"{error}; download it again") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    if not numbered:
        raise UserError(f"{path}: has no word pairs; download it again")
    separator = next(sep for sep in SEPARATORS if sep is None or sep in numbered[0][1])
    header = [cell.strip().lower() for cell in numbered[0][1].split(separator)]
    score_column = next((header.index(title) for title in SCORE_COLUMNS if title in header), 2)
    if is_header(header, score_column):
        del numbered[0]
    pairs, scores = [], []
    for number, line in numbered:
        cells = [cell.strip() for cell in line.split(separator)]
        pairs.append(words_of(name, cells, path, number))
        scores.append(score_of(cells, score_column, separator, path, number))
    if not pairs:
        raise UserError(f"{path}: has a header but no word pairs; download it again")
    return WordPairs(name, tuple(pairs), tuple(scores))


def is_header(cells: list[str], score_column: int) -> bool:
    """Whether a first line is a header: its score column has a name instead of a number."""
    return (
        score_column < len(cells)
        and any(c.isalpha() for c in cells[score_column])
        and not is_score(cells[score_column])
    )


def is_score(cell: str) -> bool:
    try:
        return math.isfinite(float(cell))
    except ValueError:
        return False


def words_of(name: str, cells: list[str], path: Path, number: int) -> tuple[str, str]:
    if len(cells) < 2 or not cells[0] or not cells[1]:
        raise UserError(f"{path}, line {number}: expected word1, word2, score; got {cells}")
    if name == MEN and all(re.fullmatch(r".+-[jnv]", word) for word in cells[:2]):
        return cells[0][:-2], cells[1][:-2]  # the lemma form of MEN marks the part of speech: sun-n
    return cells[0], cells[1]


def score_of(cells: list[str], column: int, separator: str | None, path: Path, number: int) -> float:
    if column >= len(cells) or not is_score(cells[column]):
        got = repr(cells[column]) if column < len(cells) else f"only {counted(len(cells), 'column')}"
        raise UserError(
            f"{path}, line {number}: expected a score in column {column + 1} (separated by {SEPARATORS[separator]}), "
            f"got {got}"
        )
    return float(cells[column])
