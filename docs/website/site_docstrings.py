"""Convert docstrings for the API pages: Sphinx roles and formulas, as in torch and optax, become Markdown."""

import re
import textwrap
from typing import Any

import griffe

MATH_BLOCK = re.compile(r"^(?P<indent> *)\.\. math::\n(?P<tex>(?:(?:(?P=indent) +\S.*)?\n)+)", re.MULTILINE)
MATH = re.compile(r":math:`([^`]+)`")
EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)  # griffe knows the plural only
ROLE = re.compile(r":(?:func|class|meth|attr|mod):`([^`]+)`")


class SphinxRoles(griffe.Extension):
    """Rewrite every docstring before it is parsed."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(docstring: str) -> str:
    """Put the formulas of a docstring between dollars, and turn its references into links to the API pages."""
    docstring = MATH_BLOCK.sub(
        lambda block: textwrap.indent(f"$$\n{textwrap.dedent(block['tex']).strip()}\n$$\n\n", block["indent"]),
        docstring + "\n",
    )
    docstring = EXAMPLE.sub("Examples:", docstring)
    docstring = MATH.sub(r"$\1$", docstring)
    return ROLE.sub(lambda role: link(role[1]), docstring).rstrip()


def link(name: str) -> str:
    """Link a public name; show other names as code."""
    return f"[`{name}`][{name}]" if name.startswith("coupled_adam.") else f"`{name}`"
