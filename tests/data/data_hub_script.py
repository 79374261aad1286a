"""Prepare datasets of a hub in a separate process, because the libraries read the hub's address at import.

    python data_hub_script.py TOKENIZER OUT

Prints one JSON object per step (its name and its error), and waits for an input line before the next step.
"""

import json
import sys
from pathlib import Path

from coupled_adam.data import blocks
from coupled_adam.data.hub_datasets import HubDataset
from coupled_adam.data.prepare import Progress, prepare

OPTIONS = {"val": 0.1, "test": 0.1, "shard_tokens": 3000, "processes": 1}


class Stopped(Exception):
    pass


def step(name: str, source: str, tokenizer: str, folder: str | None = None, **options: object) -> None:
    calls: list[Progress] = []

    def on_progress(progress: Progress) -> None:
        calls.append(progress)
        if progress.tokens > stop_at:
            raise Stopped

    stop_at = float(str(options.pop("stop_at", "inf")))
    error = ""
    try:
        prepare(source, tokenizer, OUT / (folder or name), **{**OPTIONS, **options}, on_progress=on_progress)
    except (Stopped, ValueError, OSError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    done = [progress.done for progress in calls if progress.done is not None]
    first = calls[0].tokens if calls else 0
    print(json.dumps({"name": name, "error": error, "first_tokens": first, "done": done}), flush=True)
    sys.stdin.readline()  # so that the test knows which files the hub sent for this step


def step_of_another_version() -> None:
    """Resume from a position whose state this version of `datasets` cannot know, and from a later one."""
    first = HubDataset("openwebtext", "text", None)
    pieces = first.pieces({"documents": 120, "datasets": "0.0", "state": {"of": "another version"}})
    texts = [next(pieces).content for _ in range(3)]
    second = HubDataset("openwebtext", "text", first.found())
    texts += [piece.content for piece in second.pieces(json.loads(json.dumps(first.position())))]
    print(json.dumps({"name": "another version", "texts": texts}), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    blocks.BLOCK_LENGTH = 3000
    TOKENIZER, OUT = sys.argv[1], Path(sys.argv[2])
    step("stopped", "openwebtext", TOKENIZER, "openwebtext", stop_at=9000, save_every=0.0)
    step("openwebtext", "openwebtext", TOKENIZER)
    step("again", "hf:Skylion007/openwebtext:default:train:text", TOKENIZER)
    step("slimpajama", "slimpajama", "bpe:300")
    step("script", "hf:org/script", TOKENIZER)
    step("column", "hf:Skylion007/openwebtext:::body", TOKENIZER)
    step("split", "hf:Skylion007/openwebtext::holdout", TOKENIZER)
    step("config", "hf:Skylion007/openwebtext:french", TOKENIZER)
    step_of_another_version()
    step("unknown", "hf:org/unknown", TOKENIZER)
