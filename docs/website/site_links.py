"""Check the built site: every link and resource is a file of the site, and every anchor is on its page."""

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Attributes that make a browser load something when it opens the page; `a href` does not.
RESOURCES = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("link", "href")}


class Links(HTMLParser):
    """Ids and links of one page; `resources` are links that a browser loads without a click."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.resources: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is None:
                continue
            if name == "id" or (tag == "a" and name == "name"):
                self.ids.add(value)
            elif (tag, name) in RESOURCES:
                self.resources.add(value)
            elif name in ("href", "src"):
                self.links.add(value)


def dead_links(site: Path) -> list[str]:
    """List dead links, and resources that would be loaded from a network, one line each."""
    pages = {path.resolve(): read_links(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        found += [f"{name}: loads {url}" for url in sorted(page.resources) if urlsplit(url).scheme not in ("", "data")]
        for url in sorted(page.links | page.resources):
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                found.append(f"{name}: no file for {url}")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids | {"__top"}:
                found.append(f"{name}: no heading for {url}")
    return found


def read_links(path: Path) -> Links:
    """Read the links of one page."""
    links = Links()
    links.feed(path.read_text(encoding="utf-8"))
    return links
