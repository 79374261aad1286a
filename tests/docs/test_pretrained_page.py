"""docs/pretrained.md: the example runs as written, and switching freezes the mean where it is."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from page_examples import ROOT, read_examples, run_here

from coupled_adam.inspection.recentring.recentre_model import recentre

transformers = pytest.importorskip("transformers")

PAGE = ROOT / "docs" / "pretrained.md"
V, H = 101, 16


@pytest.fixture
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A reader's folder with a small untied Llama off the origin, as it is and recentred."""
    torch.manual_seed(0)
    sizes = {"hidden_size": H, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=V, **sizes))
    with torch.no_grad():
        model.lm_head.weight += 0.1 * torch.randn(H)
    model.save_pretrained(tmp_path / "models" / "mine")
    recentre(tmp_path / "models" / "mine", tmp_path / "models" / "mine-centred")
    monkeypatch.chdir(tmp_path)
    yield


@pytest.mark.usefixtures("_models")
def test_the_mean_stays_where_it_was_with_and_without_recentring() -> None:
    (example,) = read_examples(PAGE)
    ratios = run_here(example)["ratios"]
    before, after = ratios["models/mine"]
    assert before > 0.5
    # The mean has not moved at all; its part of a typical length falls as the embeddings grow.
    assert 0.7 * before < after < before
    assert max(ratios["models/mine-centred"]) < 1e-5
