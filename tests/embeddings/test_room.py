"""The package `embeddings` can be used alone: it needs only torch, numpy and the layers below it."""

import subprocess
import sys

BLOCKED = ["scipy", "tokenizers", "tiktoken", "gguf", "pooch", "requests", "transformers", "rich", "typer", "pydantic"]
SCRIPT = f"""
import sys
for name in {BLOCKED!r}:
    sys.modules[name] = None
import numpy as np
from coupled_adam.embeddings import measure
assert measure(np.ones((4, 2)) + np.eye(4, 2)).kappa > 0
others = {{name.split(".")[1] for name in sys.modules if name.startswith("coupled_adam.")}}
assert others <= {{"embeddings", "tokenizer", "byte_level_bpe", "base"}}, others
"""


def test_the_package_needs_only_torch_and_numpy() -> None:
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


LAZY = """
import pkgutil, sys
from importlib import import_module
from types import ModuleType
from coupled_adam import embeddings
from coupled_adam.embeddings import load_word_pairs, open_tokenizer, fetch_word_pairs
assert set(embeddings.__all__) <= set(dir(embeddings))
assert "torch" not in sys.modules
# A module that is imported first must not stand in the place of a public name.
for module in pkgutil.iter_modules(embeddings.__path__):
    import_module(f"{embeddings.__name__}.{module.name}")
for name in embeddings.__all__:
    assert not isinstance(getattr(embeddings, name), ModuleType), name
assert not hasattr(embeddings, "no_such_name")
"""


def test_public_names_are_listed_without_torch_and_imported_on_first_use() -> None:
    result = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
