"""Built-in presets (run configs) and studies, stored in the folders `presets` and `studies`."""

from dataclasses import dataclass
from importlib.resources import files

# From small to large; lists show them in this order.
PRESETS = ("tiny", "single-gpu", "gpt2-125m", "gpt2-355m", "gpt2-760m", "llama-1.3b", "llama-2.6b")
STUDIES = (
    "demo",
    "single-gpu",
    "untied-heads",
    "centring",
    "partially-coupled",
    "single-gpu-beta2",
    "few-steps",
    "unigram-bias",
    "rivals",
    "table-beta2",
    "table-beta2-30m",
    "table-beta2-batch",
    "table-momentum-length",
    "input-momentum",
    "two-tables",
    "learning-rates",
    "muon",
    "single-gpu-scaled",
    "single-gpu-125m",
    "paper-small-scale",
    "paper-scaled",
    "paper-sgd",
    "paper-large-scale",
)


@dataclass(frozen=True)
class FileKind:
    """A kind of config file: its name in messages, its built-in files, and its file name in a folder."""

    noun: str
    nouns: str
    names: tuple[str, ...]
    folder: str
    """Name in messages of a folder that contains such a file."""
    file_name: str

    def text(self, name: str) -> str:
        """Text of a built-in TOML file, including comments."""
        return (files("coupled_adam.config") / self.nouns / f"{name}.toml").read_text(encoding="utf-8")


CONFIG_FILE = "config.toml"
"""File name of the config in a run folder."""
STUDY_FILE = "study.toml"
"""File name of the study in a study folder."""
RUN = FileKind("preset", "presets", PRESETS, "run folder", CONFIG_FILE)
STUDY = FileKind("study", "studies", STUDIES, "study folder", STUDY_FILE)


def preset_text(name: str) -> str:
    """Text of a preset's TOML file, including comments; copy it as a starting point.

    Example:
        >>> preset_text("tiny").splitlines()[0]
        '# A tiny model for a first try: seconds on a laptop, no download.'
    """
    return RUN.text(name)


def study_text(name: str) -> str:
    """Text of a built-in study's TOML file; copy it as a starting point.

    Example:
        >>> study_text("demo").splitlines()[0]
        'name = "demo"'
    """
    return STUDY.text(name)
