"""Our own model with the weights of a run."""

from pathlib import Path

import pytest
import torch
from export_models import logits_of, some_tokens, trained_model, write_corpus, write_run

from coupled_adam.evaluation.weights import load_run


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus").folder


@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_the_model_of_a_run_has_the_saved_weights(architecture: str, tied: str, tmp_path: Path, corpus: Path) -> None:
    settings = [f"model.architecture={architecture}", f"model.tied={tied}"]
    saved = write_run(tmp_path / "run", corpus, overrides=settings)
    loaded, config, found = load_run(tmp_path / "run")
    assert torch.equal(logits_of(loaded, some_tokens(saved.config)), logits_of(saved, some_tokens(saved.config)))
    assert loaded.config == saved.config == config.to_model_config()
    assert [name for name, _ in loaded.named_parameters()] == [name for name, _ in saved.named_parameters()]
    assert not loaded.training
    assert config.name == "small"
    assert found is not None
    assert found.folder == corpus


def test_a_loaded_model_can_be_trained_further(tmp_path: Path, corpus: Path) -> None:
    write_run(tmp_path / "run", corpus)
    model, _, _ = load_run(tmp_path / "run")
    tokens = some_tokens(model.config)
    model(tokens, tokens).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_newest_checkpoint_is_used_unless_a_step_is_given(tmp_path: Path, corpus: Path) -> None:
    write_run(tmp_path / "run", corpus, steps=[5, 20, 10])
    for step, seed in ((None, 20), (5, 5), (10, 10)):
        model, _, _ = load_run(tmp_path / "run", step)
        assert torch.equal(model.wte.weight, trained_model(model.config, seed).wte.weight)
    with pytest.raises(ValueError, match=rf"^{tmp_path / 'run'}: .*\b7\b.*\b5, 10, 20$"):
        load_run(tmp_path / "run", 7)


def test_damaged_checkpoints_are_skipped_with_a_warning(tmp_path: Path, corpus: Path) -> None:
    write_run(tmp_path / "run", corpus, steps=[5, 20])
    newest = tmp_path / "run" / "checkpoints" / "step-000000020"
    largest = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="step-000000020"):
        model, _, _ = load_run(tmp_path / "run")
    assert torch.equal(model.wte.weight, trained_model(model.config, 5).wte.weight)
    with pytest.raises(ValueError, match=rf"step-000000020 .*{largest.name}"):
        load_run(tmp_path / "run", 20)


def test_the_callers_random_state_is_unchanged(tmp_path: Path, corpus: Path) -> None:
    write_run(tmp_path / "run", corpus)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    load_run(tmp_path / "run")
    assert torch.equal(torch.rand(4), expected)


def test_missing_corpus_is_none_and_a_relative_one_is_found(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "run", Path("corpus"))
    monkeypatch.chdir(tmp_path)
    assert load_run(Path("run"))[2] is not None
    corpus.rename(tmp_path / "elsewhere")
    assert load_run(Path("run"))[2] is None


def test_corpus_that_has_changed_since_is_refused(tmp_path: Path, corpus: Path) -> None:
    write_run(tmp_path / "run", corpus)
    corpus.rename(tmp_path / "old")
    write_corpus(corpus, separator=1)
    with pytest.raises(ValueError, match=f"^{corpus} "):
        load_run(tmp_path / "run")


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(ValueError, match=rf"^{tmp_path / 'nothing'}: .*config\.toml.*`coupled-adam train`"):
        load_run(tmp_path / "nothing")
    write_run(tmp_path / "run", corpus, steps=[1])
    for inside in ("checkpoints", "checkpoints/step-000000001"):
        with pytest.raises(ValueError, match=rf"^{tmp_path / 'run' / inside}: .* {tmp_path}/run$"):
            load_run(tmp_path / "run" / inside)
    write_run(tmp_path / "study" / "runs" / "cell" / "seed-1", corpus, steps=[1])
    with pytest.raises(ValueError, match=rf"^{tmp_path}/study: .* {tmp_path}/study/runs/cell/seed-1$"):
        load_run(tmp_path / "study")
    (tmp_path / "run" / "checkpoints" / "step-000000001").rename(tmp_path / "gone")
    with pytest.raises(ValueError, match=f"^{tmp_path}/run: .*`coupled-adam train`"):
        load_run(tmp_path / "run")
    with pytest.raises(ValueError, match=rf"^{tmp_path}/run: .*\b1\b.*\bnone$"):
        load_run(tmp_path / "run", 1)
