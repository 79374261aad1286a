"""The presets: configs that come with the package, in the folder presets/ beside this file."""

from importlib.resources import files

# From small to large, the order in which they are listed.
PRESETS = ("tiny", "single-gpu", "gpt2-125m", "gpt2-355m", "gpt2-760m", "llama-1.3b", "llama-2.6b")


def preset_text(name: str) -> str:
    """The TOML file of a preset, comments included: a good start for a file of one's own.

    Example:
        >>> preset_text("tiny").splitlines()[0]
        '# A model for trying things out: seconds on a laptop, no download.'
    """
    return (files("coupled_adam.config") / "presets" / f"{name}.toml").read_text(encoding="utf-8")
