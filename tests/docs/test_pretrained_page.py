"""docs/pretrained.md: the example runs as written, and after switching the mean no longer moves."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from page_examples import ROOT, read_examples, run_here

from coupled_adam.inspection.recentring.recentre_model import recentre

transformers = pytest.importorskip("transformers")

PAGE = ROOT / "docs" / "pretrained.md"
V, H = 101, 16


@pytest.fixture
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader's folder with a small untied Llama whose mean is off the origin, original and recentred."""
    torch.manual_seed(0)
    sizes = {"hidden_size": H, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=V, **sizes))
    with torch.no_grad():
        model.lm_head.weight += 0.1 * torch.randn(H)
    model.save_pretrained(tmp_path / "models" / "mine")
    recentre(tmp_path / "models" / "mine", tmp_path / "models" / "mine-centred")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_models")
def test_the_mean_stays_where_it_was_with_and_without_recentring() -> None:
    (example,) = read_examples(PAGE)
    ratios = run_here(example)["ratios"]
    before, after = ratios["models/mine"]
    assert before > 0.5
    # The mean has not moved; its share of a typical length falls as the embeddings grow.
    assert 0.7 * before < after < before
    assert max(ratios["models/mine-centred"]) < 1e-5


def test_the_table_is_the_output_of_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    finetune = importlib.import_module("finetune")
    content = json.loads((ROOT / "docs" / "results" / "finetune.json").read_text(encoding="utf-8"))
    before = finetune.Numbers(**content["before"]["as it is"])
    runs = [finetune.Finished(**run | {"numbers": finetune.Numbers(**run["numbers"])}) for run in content["runs"]]
    assert finetune.markdown(before, runs) in PAGE.read_text(encoding="utf-8")
