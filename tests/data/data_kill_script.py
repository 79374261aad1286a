"""Prepare a corpus in child processes that are killed at random moments, until one finishes.

    python data_kill_script.py SOURCE TOKENIZER FOLDER KILLS

Every fifth child uses two processes. Prints the number of killed children and of full shards in the journal, and checks
that full shards are never rewritten. A first child, in the folder `undisturbed` beside FOLDER, is not killed: its time
sets the pace of the kills, so that a fast machine does not finish early. (The unused imports happen once here instead
of in every child.)
"""

import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import tokenizers  # noqa: F401
import torch  # noqa: F401

import coupled_adam.embeddings  # noqa: F401
from coupled_adam.data import blocks
from coupled_adam.data.prepare import prepare
from coupled_adam.data.shards import read_journal


def run_child(source: str, tokenizer: str, folder: Path, processes: int) -> int:
    child = os.fork()
    if child == 0:
        try:
            prepare(
                source, tokenizer, folder, shard_tokens=3000, processes=processes, save_every=0.0, val=0.1, test=0.1
            )
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return child


def main(source: str, tokenizer: str, folder: Path, kills: int) -> None:
    chosen = random.Random(0)
    began = time.monotonic()
    _, status = os.waitpid(run_child(source, tokenizer, folder.with_name("undisturbed"), processes=1), 0)
    assert os.waitstatus_to_exitcode(status) == 0
    longest_wait = (time.monotonic() - began) / kills
    full_shards: dict[str, tuple[int, int]] = {}
    killed = 0
    while True:
        child = run_child(source, tokenizer, folder, processes=2 if killed % 5 == 4 else 1)
        if killed < kills:
            # Most children live long enough to write to the journal; some are killed before.
            journal = folder / "unfinished" / "journal.json"
            before = journal.stat().st_mtime_ns if journal.exists() else 0
            deadline = time.monotonic() + (5 if chosen.random() < 0.8 else 0)
            while time.monotonic() < deadline:
                with suppress(FileNotFoundError):
                    if journal.stat().st_mtime_ns != before:
                        break
                time.sleep(0.001)
            time.sleep(chosen.random() * longest_wait)
            os.kill(child, signal.SIGKILL)  # not waited for yet, so the id still belongs to this child, dead or alive
        _, status = os.waitpid(child, 0)
        for name, identity in full_shards.items():
            now = (folder / name).stat()
            assert (now.st_ino, now.st_mtime_ns) == identity, f"{name} was written again"
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        killed += 1
        journal = read_journal(folder)
        for split in journal.splits.values() if journal else []:
            for shard in split.shards:
                now = (folder / shard.file).stat()
                full_shards[shard.file] = (now.st_ino, now.st_mtime_ns)
    print(killed, len(full_shards))


if __name__ == "__main__":
    blocks.BLOCK_LENGTH = 2000  # many small blocks give many moments for a kill
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
