"""Pages: one HTML file each that loads nothing, for a desk, a phone or paper, light or dark.

A page is a template that extends `page.html.jinja`, which brings `page.css` and forbids whatever is not in the file;
`page_parts.html.jinja` has what several pages show. Everything that comes from files is text: templates escape it. Only
what is marked `unescaped` goes in as it is: figures, and what our own code has made.
"""

from pathlib import Path

from coupled_adam.base.extras import require

PACKAGES = ("matplotlib", "jinja2")


def require_page_packages(purpose: str) -> None:
    """Refuse now, and not after the measuring, when what pages are made with is missing.

    Args:
        purpose: such as "for theory.html".
    """
    for package in PACKAGES:
        require(package, "study", purpose)


def render_template(template: Path, **values: object) -> str:
    """The HTML text of a page.

    Args:
        template: its file; others beside it and those of this folder can be extended, included and imported.
        values: what it shows, by name; a name that it uses and that is not given is an error.
    """
    jinja2 = require("jinja2", "study", "to write pages")
    markupsafe = require("markupsafe", "study", "to write pages")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["unescaped"] = markupsafe.Markup
    return str(environment.get_template(template.name).render(**values))
