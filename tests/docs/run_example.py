"""Run one example of the page and its check, in this process: what `process` and `torchrun` examples are started with.

Usage: python run_example.py TITLE
"""

import sys
from pathlib import Path

from page_checks import CHECKS
from page_examples import USING_PAGE, read_examples, run_here


def main() -> None:
    sys.path.insert(0, str(Path.cwd()))  # where tiny.py is; python has put the folder of this file there
    (example,) = [example for example in read_examples(USING_PAGE) if example.title == sys.argv[1]]
    CHECKS[example.title](run_here(example))


if __name__ == "__main__":
    main()
