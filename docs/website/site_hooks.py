"""Hooks of mkdocs: pages from outside docs/, formulas without a script, and a check of every link."""

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from site_formulas import FORMULA_OF_CONTENTS, with_formulas
from site_links import dead_links
from site_notebooks import read_notebook

# Files of the repository that are pages of the site.
PAGES_OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
    "notebooks/coupled_adam_in_five_minutes.ipynb": "five-minutes.md",
}
LINK = re.compile(r"\]\((?P<target>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages from elsewhere in the repository, and other files that pages link to."""
    for source, page in PAGES_OUTSIDE.items():
        path = root(config) / source
        if path.suffix != ".ipynb":
            files.append(File.generated(config, page, abs_src_path=str(path)))
            continue
        notebook = read_notebook(path)
        files.append(File.generated(config, page, content=notebook.markdown))
        for name, picture in notebook.pictures.items():
            files.append(File.generated(config, f"images/{name}", content=picture))
    for file in files.documentation_pages():
        for link in LINK.finditer(file.content_string):
            source = repository_path(file.src_uri, link["target"], config)
            known = files.get_file_from_path(site_path(source))
            if known is None and not source.startswith("..") and (root(config) / source).is_file():
                files.append(File.generated(config, site_path(source), abs_src_path=str(root(config) / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links of the site."""

    def lead_on(link: re.Match[str]) -> str:
        found = site_path(repository_path(page.file.src_uri, link["target"], config))
        if files.get_file_from_path(found) is None:
            return link.group()  # mkdocs reports it
        return f"]({posixpath.relpath(found, posixpath.dirname(page.file.src_uri) or '.')}{link['anchor'] or ''})"

    return outside_of_code(markdown, lambda text: deeper_lists(LINK.sub(lead_on, text)))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace formulas by MathML, which browsers draw without a script."""
    headings = list(page.toc)
    while headings:
        heading = headings.pop()
        heading.title = with_formulas(heading.title, page.file.src_uri, FORMULA_OF_CONTENTS)
        headings += heading.children
    return with_formulas(html, page.file.src_uri)


def on_post_build(config: MkDocsConfig) -> None:
    """Fail the build if a link is dead, or if a page loads something from a network."""
    found = dead_links(Path(config.site_dir))
    if found:
        raise PluginError("dead links or foreign resources in the site:\n  " + "\n  ".join(found))


def root(config: MkDocsConfig) -> Path:
    """Return the root of the repository."""
    return Path(config.config_file_path).parent


def repository_path(page: str, target: str, config: MkDocsConfig) -> str:
    """Return the file of the repository that a page of the site links to."""
    source = next((source for source, known in PAGES_OUTSIDE.items() if known == page), f"docs/{page}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    # A site cannot show a folder: link to its README or its results.
    names = [name for name in ("README.md", "results.jsonl") if (root(config) / path / name).is_file()]
    return posixpath.join(path, *names[:1])


def site_path(source: str) -> str:
    """Return the path of a repository file in the site."""
    inside = source.removeprefix("docs/") if source.startswith("docs/") else f"repository/{source}"
    return PAGES_OUTSIDE.get(source, inside)


def outside_of_code(markdown: str, change: Callable[[str], str]) -> str:
    """Apply `change` to a page, except for its fenced code."""
    pieces, end = [], 0
    for code in FENCED.finditer(markdown):
        pieces += [change(markdown[end : code.start()]), code.group()]
        end = code.end()
    return "".join([*pieces, change(markdown[end:])])


def deeper_lists(text: str) -> str:
    """Indent the lines of a list item by four spaces: two are enough for GitHub, but not for Python-Markdown."""
    return re.sub(r"^ {2,3}(?=\S)", "    ", text, flags=re.MULTILINE)
