"""The page: its contents, that it loads and runs nothing, and how a real browser shows it.

Legend: V vocabulary rows, H hidden size.
"""

import re
import shutil
import struct
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from coupled_adam.cli import app
from coupled_adam.inspection.sampling import column_mean, draw_sample
from coupled_adam.metrics import METRICS

V, H = 3000, 12
ATTACK = "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\">{{ 7 * 7 }}"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of an untied model with hostile names and token counts."""
    folder = tmp_path_factory.mktemp("page")
    generator = np.random.default_rng(0)
    tables = {
        f"{ATTACK}.embed_tokens.weight": generator.standard_normal((V, H)) + 4.0,
        "lm_head.weight": generator.standard_normal((V, H)),
    }
    model = folder / "a&b<i>.safetensors"
    save_file({name: torch.from_numpy(table).float() for name, table in tables.items()}, model)
    np.save(folder / "unigram.npy", generator.integers(0, 1000, V))
    out = folder / "new" / "page.html"
    result = CliRunner().invoke(
        app, ["inspect", str(model), "--unigram", str(folder / "unigram.npy"), "--html", str(out)]
    )
    assert result.exit_code == 0, result.output
    assert [file.name for file in out.parent.iterdir()] == ["page.html"]
    return out


def test_the_page_shows_table_sentences_and_five_pictures_of_each_table(page: Path) -> None:
    html = page.read_text()
    assert html.count("<svg") == html.count("<figure id=") == 10
    for words in ("anisotropic", "centred", METRICS["mu_norm_ratio"].label_with_arrow, "3,000 x 12", "IsoScore"):
        assert words in html
    for title in ("Side view", "along the mean", "Cosine of", "Singular values", "Length and frequency"):
        assert html.count(title) >= 2
    assert html.count(">origin</text>") == 4


def test_nothing_on_the_page_is_loaded_or_run(page: Path) -> None:
    html = page.read_text()
    assert "<script" not in html
    assert "<img" not in html
    for address in re.findall(r'(?:href|src)="([^"]*)"', html):
        assert address.startswith(("#", "data:image/png;base64,"))
    assert "@import" not in html
    assert not re.findall(r"url\((?!#)", html)


def test_ids_on_the_page_are_unique_and_every_reference_has_its_target(page: Path) -> None:
    html = page.read_text()
    ids = Counter(re.findall(r'\bid="([^"]*)"', html))
    assert ids
    assert max(ids.values()) == 1
    references = set(re.findall(r'(?:url\(#|href="#)([^")]*)', html))
    assert references
    assert references <= set(ids)


def test_clouds_are_images_and_lines_use_the_colours_of_the_page(page: Path) -> None:
    html = page.read_text()
    assert html.count("data:image/png;base64,") == 6  # two views and the frequencies, of two tables
    assert "#010203" not in html
    assert "#040506" not in html
    assert "fill: currentColor" in html
    assert len(html) < 2_000_000


def test_the_sample_is_reproducible() -> None:
    E = np.random.default_rng(0).standard_normal((400, 64))  # no component stands out
    first = draw_sample(E)
    torch.rand(3)
    again = draw_sample(E)
    np.testing.assert_array_equal(again.places, first.places)
    np.testing.assert_array_equal(again.cosines, first.cosines)


def test_the_sample_lies_along_the_mean_and_the_principal_components() -> None:
    generator = np.random.default_rng(1)
    spread = np.array([0.1, 3.0, 0.5, 2.0, 0.2])
    E = generator.standard_normal((4000, 5)) * spread + [6.0, 0, 0, 0, 0]
    sample = draw_sample(E)
    mean = E.mean(0)
    np.testing.assert_allclose(column_mean(E).numpy(), mean, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(sample.places[:, 0], E @ (mean / np.linalg.norm(mean)), rtol=1e-4, atol=1e-4)
    # Orthogonal to the mean, the columns with the largest spread come first; their sign is arbitrary.
    assert abs(np.corrcoef(sample.places[:, 1], E[:, 1])[0, 1]) > 0.999
    assert abs(np.corrcoef(sample.places[:, 2], E[:, 3])[0, 1]) > 0.999
    unit = E / np.linalg.norm(E, axis=1, keepdims=True)
    exact = (np.linalg.norm(unit.sum(0)) ** 2 - len(E)) / (len(E) * (len(E) - 1))
    assert sample.cosines.mean() == pytest.approx(exact, abs=0.01)


@pytest.mark.parametrize(
    "E",
    [np.zeros((5, 3)), np.ones((1, 4)), np.ones((6, 1)), np.eye(2), np.vstack([np.zeros(3), np.ones((4, 3))])],
    ids=["zeros", "one row", "one column", "two rows", "a zero row"],
)
def test_degenerate_tables_have_a_page_too(tmp_path: Path, E: np.ndarray) -> None:
    np.save(tmp_path / "a.npy", E)
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "a.npy"), "--html", str(tmp_path / "a.html")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "a.html").read_text().count("<svg") == 4
    sample = draw_sample(E)
    assert np.isfinite(sample.places).all()
    assert np.isfinite(sample.cosines).all()


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [("float32", 2.0**66), ("float32", 2.0**-100), ("float64", 2.0**660), ("float64", 2.0**-660)],
    ids=str,
)
def test_extreme_tables_have_the_pictures_of_ordinary_ones(tmp_path: Path, dtype: str, scale: float) -> None:
    ordinary = (np.random.default_rng(2).standard_normal((300, 6)) + 1.0).astype(np.float32)
    E = ordinary.astype(dtype) * np.dtype(dtype).type(scale)
    expected, sample = draw_sample(ordinary), draw_sample(E)
    np.testing.assert_allclose(sample.places / scale, expected.places, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(sample.cosines, expected.cosines, atol=1e-5)
    assert expected.cosines.std() > 0.1
    np.save(tmp_path / "a.npy", E)
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "a.npy"), "--html", str(tmp_path / "a.html")])
    assert result.exit_code == 0, result.output


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")


def browse(page: Path, folder: Path, *arguments: str) -> str:
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS.split(), f"--user-data-dir={folder / 'profile'}", *arguments, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@needs_chromium
def test_a_browser_shows_the_hostile_names_as_text(page: Path, tmp_path: Path) -> None:
    dom = browse(page, tmp_path, "--dump-dom")
    assert "<title>Embeddings of a&amp;b&lt;i&gt;.safetensors</title>" in dom
    assert "&lt;script&gt;document.title='run'&lt;/script&gt;" in dom
    assert "{{ 7 * 7 }}" in dom
    assert dom.count("<svg") == 10
    assert dom.count("<tr>") > 15


@needs_chromium
def test_a_browser_draws_the_page_light_and_dark(page: Path, tmp_path: Path) -> None:
    """The corner of the screenshot has the background colour of the stylesheet."""
    for name, options, background in (
        ("light.png", (), (255, 255, 255)),
        ("dark.png", ("--blink-settings=preferredColorScheme=0",), (22, 24, 27)),
    ):
        out = tmp_path / name
        browse(page, tmp_path, f"--screenshot={out}", "--window-size=600,900", *options)
        assert png_size(out) == (600, 900)
        assert first_pixel(out) == background


def png_size(path: Path) -> tuple[int, int]:
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    return width, height


def first_pixel(path: Path) -> tuple[int, ...]:
    from matplotlib.image import imread

    return tuple(round(255 * float(channel)) for channel in imread(path)[0, 0, :3])
