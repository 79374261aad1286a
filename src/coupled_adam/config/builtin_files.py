"""The files that come with the package: presets, which are configs of runs, and studies, each in the folder beside this
file that is called after them."""

from dataclasses import dataclass
from importlib.resources import files

# From small to large, the order in which they are listed.
PRESETS = ("tiny", "single-gpu", "gpt2-125m", "gpt2-355m", "gpt2-760m", "llama-1.3b", "llama-2.6b")
STUDIES = (
    "demo",
    "single-gpu",
    "untied-heads",
    "centring",
    "partially-coupled",
    "few-steps",
    "unigram-bias",
    "rivals",
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
    """A kind of config file: what messages call it, which come with the package, and its name in a folder."""

    noun: str
    nouns: str
    names: tuple[str, ...]
    folder: str
    """What messages call a folder that has such a file."""
    file_name: str

    def text(self, name: str) -> str:
        """The TOML file of that name in the package, comments included."""
        return (files("coupled_adam.config") / self.nouns / f"{name}.toml").read_text(encoding="utf-8")


CONFIG_FILE = "config.toml"
"""The config in the folder of a run."""
STUDY_FILE = "study.toml"
"""The study in the folder of a study."""
RUN = FileKind("preset", "presets", PRESETS, "run folder", CONFIG_FILE)
STUDY = FileKind("study", "studies", STUDIES, "study folder", STUDY_FILE)


def preset_text(name: str) -> str:
    """The TOML file of a preset, comments included: a good start for a file of one's own.

    Example:
        >>> preset_text("tiny").splitlines()[0]
        '# A model for trying things out: seconds on a laptop, no download.'
    """
    return RUN.text(name)


def study_text(name: str) -> str:
    """The TOML file of a study that comes with the package: a good start for a file of one's own.

    Example:
        >>> study_text("demo").splitlines()[0]
        'name = "demo"'
    """
    return STUDY.text(name)
