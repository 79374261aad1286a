"""Pages: values are escaped, nothing is loaded from elsewhere, and a missing value is an error."""

import subprocess
import sys
from pathlib import Path

import jinja2
import pytest

from coupled_adam.base.errors import MissingPackageError
from coupled_adam.base.page import render_template, require_page_packages

ATTACK = "<script>alert(1)</script> & {{ 7 * 7 }}"


def template(folder: Path, body: str) -> Path:
    path = folder / "own.html.jinja"
    path.write_text('{% extends "page.html.jinja" %}{% block title %}T{% endblock %}{% block body %}' + body)
    path.write_text(path.read_text() + "{% endblock %}")
    return path


def test_values_are_escaped_unless_they_are_markup(tmp_path: Path) -> None:
    html = render_template(template(tmp_path, "{{ name }}|{{ svg | unescaped }}"), name=ATTACK, svg="<svg/>")
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; {{ 7 * 7 }}|<svg/>" in html
    assert html.startswith("<!DOCTYPE html>")


def test_every_page_has_the_stylesheet_and_forbids_external_content(tmp_path: Path) -> None:
    html = render_template(template(tmp_path, ""))
    assert "--line:" in html
    assert "default-src 'none'" in html
    assert "http" not in html.replace("http-equiv", "")


def test_a_missing_value_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(jinja2.UndefinedError, match="missing"):
        render_template(template(tmp_path, "{{ missing }}"))


def test_a_missing_package_is_refused_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingPackageError, match=r"^jinja2 .* for x\b.*\[study\]"):
        require_page_packages("for x")


def test_base_loads_only_the_standard_library() -> None:
    code = (
        "import sys, pkgutil, importlib, coupled_adam.base as base\n"
        "for module in pkgutil.iter_modules(base.__path__, 'coupled_adam.base.'):\n"
        "    importlib.import_module(module.name)\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "ours = {name for name in sys.modules if name.startswith('coupled_adam.')}\n"
        "print(*sorted(loaded & {'torch', 'numpy', 'matplotlib', 'jinja2', 'rich', 'typer'}))\n"
        "print(*sorted(name for name in ours if not name.startswith('coupled_adam.base')))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
