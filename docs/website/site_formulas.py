"""Formulas as MathML: written into the page when the site is built, drawn by the browser without script or font."""

import html
import re

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

# What pymdownx.arithmatex makes of $...$ and $$...$$; in a table of contents only the inner part is left of it.
FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?P<kind>[(\[])(?P<tex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)
FORMULA_OF_CONTENTS = re.compile(r"\\(?P<kind>\()(?P<tex>.*?)\\\)")
# The converter leaves what it does not know as it is: a command or a column mark that is read as an identifier.
NOT_UNDERSTOOD = re.compile(r"<m(?:[ion]|text)>[^<]*(?:&amp;|\\)[^<]*</m(?:[ion]|text)>")


def with_formulas(text: str, page: str, pattern: re.Pattern[str] = FORMULA) -> str:
    """The HTML of a page, or of a line of its contents, with all formulas as MathML."""

    def drawn(formula: re.Match[str]) -> str:
        tex = html.unescape(formula["tex"]).strip()
        known = re.sub(r"\\(begin|end)\{aligned\}", r"\\\1{align*}", tex)
        known = re.sub(r"(?<=\\text\{)[^}]*", lambda words: words.group().replace(r"\_", "_"), known)
        mathml = convert(known, display="block" if formula["kind"] == "[" else "inline")
        if unknown := NOT_UNDERSTOOD.search(mathml):
            raise PluginError(f"{page}: {unknown.group()} in the formula {tex!r} cannot be drawn; write it another way")
        return str(mathml)

    return pattern.sub(drawn, text)
