"""Show a notebook as a page: its text, its code, and its saved output and pictures."""

import base64
import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class NotebookPage:
    """The page as Markdown, and its pictures by file name."""

    markdown: str
    pictures: dict[str, bytes] = field(default_factory=dict)


def read_notebook(path: Path) -> NotebookPage:
    """Read a notebook file (nbformat 4)."""
    page = NotebookPage("")
    blocks = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        blocks.append(source if cell["cell_type"] == "markdown" else fenced("python", source))
        for output in cell.get("outputs", []):
            if output["output_type"] == "stream":
                blocks.append(fenced("text", "".join(output["text"])))
            elif "image/png" in output.get("data", {}):
                name = f"{path.stem}-{len(page.pictures) + 1}.png"
                page.pictures[name] = base64.b64decode("".join(output["data"]["image/png"]))
                blocks.append(f"![What the cell above draws](images/{name})")
    page.markdown = "\n\n".join(blocks) + "\n"
    return page


def fenced(language: str, text: str) -> str:
    """A block of code."""
    return f"```{language}\n{text.rstrip()}\n```"
