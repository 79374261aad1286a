"""Run examples of the page and their checks, each in its own process, forked after the imports.

It is started once for all `process` examples, and by torchrun once per rank for all `torchrun` examples. FOLDER has a
folder for each example, which gets a file `outcome.rank<r>`: "ok", or the output and the traceback.

Usage: python run_example.py FOLDER CHECKS PAGE::TITLE ...
"""

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401  the first DTensor asks for it; better here once than in every fork
from page_examples import USING_PAGE, Example, imported_modules, read_examples, run_here

SECONDS_PER_EXAMPLE = 60


def run_forked(example: Example, folder: Path, checks: dict[str, Any]) -> None:
    os.chdir(folder)
    sys.path.insert(0, str(folder))  # the folder with tiny.py; python has put the folder of this file there
    rank = os.environ.get("RANK", "0")
    with open(f"printed.rank{rank}", "w") as printed:
        os.dup2(printed.fileno(), sys.stdout.fileno())
        os.dup2(printed.fileno(), sys.stderr.fileno())
    faulthandler.dump_traceback_later(SECONDS_PER_EXAMPLE - 5, file=sys.__stderr__)  # where it hangs, if it does
    outcome = "ok"
    try:
        names = run_here(example)  # a local name: destroying a process group can wait for ranks that have ended
        checks[example.title](names)
    except BaseException:
        sys.stdout.flush()
        outcome = Path(printed.name).read_text()[-6000:] + traceback.format_exc()
    Path(f"outcome.rank{rank}").write_text(outcome)
    os._exit(0)  # a failed rank must not wait for the others, as the destructors of its process groups would


def meet_at_another_port() -> None:
    """Use a new store: torchrun's remembers the addresses of the previous example."""
    if "MASTER_PORT" in os.environ:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        # Below the range of ephemeral ports.
        port = int(os.environ["MASTER_PORT"])
        os.environ["MASTER_PORT"] = str(port + 1 if port < 32768 else 10_000 + port % 20_000)


def _report_hang(folder: Path) -> None:
    """Write what a killed example has printed, with the stacks of its threads, as its outcome."""
    rank = os.environ.get("RANK", "0")
    printed = (folder / f"printed.rank{rank}").read_text()
    (folder / f"outcome.rank{rank}").write_text(f"killed after {SECONDS_PER_EXAMPLE} seconds\n{printed[-6000:]}")


def main() -> None:
    folder, chosen = Path(sys.argv[1]), sys.argv[3:]
    checks = importlib.import_module(sys.argv[2]).CHECKS
    pages = dict.fromkeys(Path(name.partition("::")[0]) for name in chosen)
    of_pages = [example for page in pages for example in read_examples(page)]
    examples = [example for example in of_pages if f"{example.page}::{example.title}" in chosen and not example.file]
    files = {Path(example.file).stem for example in of_pages + read_examples(USING_PAGE) if example.file}
    for module in sorted(set().union(*map(imported_modules, examples)) - files):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    for example in examples:
        meet_at_another_port()
        arguments = (example, folder / example.folder, checks)
        child = multiprocessing.get_context("fork").Process(target=run_forked, args=arguments)
        child.start()
        child.join(SECONDS_PER_EXAMPLE)
        if child.is_alive():
            child.kill()
            _report_hang(folder / example.folder)


if __name__ == "__main__":
    main()
