"""Scripts of docs/results that draw pictures, and the texts and marks of an SVG file."""

import importlib.util
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import numpy as np

DOCS = Path(__file__).parents[2] / "docs"
IMAGES = DOCS / "images"
SVG = "{http://www.w3.org/2000/svg}"


def load_script(path: Path) -> ModuleType:
    """Import a script that is not part of the package."""
    spec = importlib.util.spec_from_file_location(f"results_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def texts_of(svg: str) -> list[str]:
    return ["".join(text.itertext()) for text in ET.fromstring(svg).iter(f"{SVG}text")]


def marks_of(svg: str) -> np.ndarray:
    """The places of ticks and points."""
    return np.array([(float(use.get("x", 0)), float(use.get("y", 0))) for use in ET.fromstring(svg).iter(f"{SVG}use")])


def assert_same_picture(name: str, drawn: str) -> None:
    """Equal texts, and marks at equal places: another release of matplotlib may move them by a point."""
    committed = (IMAGES / name).read_text()
    assert texts_of(committed) == texts_of(drawn), name
    np.testing.assert_allclose(marks_of(committed), marks_of(drawn), atol=2, err_msg=name)
