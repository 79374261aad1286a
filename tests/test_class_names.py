"""A class name has one meaning: no two public classes of the package share a name."""

import ast
from collections import defaultdict
from pathlib import Path

import coupled_adam

PACKAGE = Path(coupled_adam.__file__).parent
# Commands share names with the code they call.
COMMANDS = PACKAGE / "commands"


def public_classes() -> dict[str, list[str]]:
    """The modules that define each top-level class, by class name."""
    found = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        if COMMANDS not in path.parents:
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(path.relative_to(PACKAGE).as_posix())
    return found


def test_no_public_class_name_occurs_twice() -> None:
    classes = public_classes()
    assert len(classes) > 100
    assert {name: places for name, places in classes.items() if len(places) > 1} == {}
