"""The room can be lifted out: it imports with torch and numpy only, and nothing of the rest of the package."""

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
assert others == {{"embeddings"}}, others
"""


def test_the_room_needs_torch_and_numpy_only() -> None:
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
