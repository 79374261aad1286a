"""Refusals of a run, which change nothing: folders, configs and rows."""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import small_config, train, write_corpus

from coupled_adam.base.errors import UserError, as_user_error
from coupled_adam.config.run_config import to_toml
from coupled_adam.training.checkpoint.checkpoint_folder import CHECKED_FILE


def contents_of(run: Path) -> dict[Path, bytes]:
    """All files of a run except the times at which its checkpoints were checked."""
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != CHECKED_FILE}


@pytest.mark.parametrize("refused", ["data", "wordsim", "tensorboard", "wandb"])
def test_a_refused_resume_does_not_change_the_run(
    refused: str, whole_run: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(whole_run, tmp_path / "run")
    before = contents_of(tmp_path / "run")
    others = write_corpus(tmp_path / "others", seed=9, train_tokens=3000)
    for package in ("tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)
    config, message = {
        "data": (small_config(others), r"step-\d+ .*\bdata\.folder\b"),
        "wordsim": (small_config(corpus, log={"wordsim": str(tmp_path)}), r"^log\.wordsim\b"),
        "tensorboard": (small_config(corpus, log={"tensorboard": True}), r"^tensorboard .*\[track\]"),
        "wandb": (small_config(corpus, log={"wandb": "project"}), r"^wandb .*\[track\]"),
    }[refused]
    with pytest.raises((ValueError, ImportError), match=message):
        train(config, tmp_path / "run", resume=True)
    assert contents_of(tmp_path / "run") == before


@pytest.mark.parametrize(
    "changes",
    [
        {"log": {"wordsim": "nowhere"}},
        {"log": {"wandb": "project"}},
        {"model": {"context": 4096}, "training": {"tokens": 10 * 8 * 4096}},
    ],
    ids=["wordsim", "wandb", "context"],
)
def test_a_start_that_is_refused_late_leaves_no_files(
    changes: dict[str, Any], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises((ValueError, ImportError)):
        train(small_config(corpus, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_leftovers_of_a_failed_tracker_are_ignored_and_other_rows_are_refused(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "wandb_id").write_text("0123abcd")
    (tmp_path / "metrics.jsonl").write_text('{"of": "another program"}\n')
    with pytest.raises(ValueError, match=rf"^{tmp_path} .*config\.toml.*--out"):
        train(small_config(corpus), tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    outcome, _ = train(small_config(corpus), tmp_path)
    assert outcome.is_finished


def test_a_refused_start_leaves_no_files(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    for out, named in ((tmp_path / "mine", rf"{tmp_path}/mine .*--out"), (tmp_path / "new", r"training\.cuda_graphs")):
        with pytest.raises(ValueError, match=f"^{named}"):
            train(small_config(corpus, training={"device": "auto", "cuda_graphs": True}), out)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    assert not (tmp_path / "new").exists()


def test_a_folder_with_a_run_is_refused_without_resume(whole_run: Path, corpus: Path) -> None:
    with pytest.raises(ValueError, match=f"^{whole_run} .*--resume.*--out"):
        train(small_config(corpus), whole_run)


def test_a_folder_with_a_run_of_other_settings_is_refused_with_their_names(whole_run: Path, corpus: Path) -> None:
    before = contents_of(whole_run)
    one = small_config(corpus, optimizer={"row_exponent": 0.5})
    with pytest.raises(ValueError, match=r"other settings \(optimizer\.row_exponent\); choose another .*--out$"):
        train(one, whole_run)
    many = small_config(corpus, optimizer={"row_exponent": 0.5, "lr": 0.1, "beta1": 0.5, "beta2": 0.5, "eps": 1e-3})
    with pytest.raises(ValueError, match=r"other settings \((optimizer\.\w+, ){3}optimizer\.\w+ and 1 more\)"):
        train(many, whole_run)
    with pytest.raises(ValueError, match=r"already holds a run; continue it with --resume"):
        train(small_config(corpus, training={"threads": 1}), whole_run)  # does not change what is trained
    assert contents_of(whole_run) == before


def test_a_folder_with_something_else_is_refused(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=rf"^{tmp_path} .*config\.toml.*--out"):
        train(small_config(corpus), tmp_path)


def test_a_run_is_resumed_with_its_own_settings_only(whole_run: Path, corpus: Path) -> None:
    with pytest.raises(ValueError, match=r"optimizer\.lr"):
        train(small_config(corpus, optimizer={"lr": 0.5}), whole_run, resume=True)


def test_two_processes_cannot_train_in_one_folder(corpus: Path, tmp_path: Path) -> None:
    from coupled_adam.training.run_folder import RunFolder

    with (
        RunFolder(tmp_path / "run").locked(),
        pytest.raises(ValueError, match=rf"^{tmp_path / 'run'} .*\bprocess {os.getpid()}\b"),
    ):
        train(small_config(corpus), tmp_path / "run")


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json", "checkpoints", "lock"])
def test_an_obstacle_to_a_file_is_named_with_the_remedy(corpus: Path, tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(to_toml(small_config(corpus)))
    if name == "checkpoints":
        (run / name).write_text("mine")
    else:
        (run / name).mkdir()
        (run / name / "mine").touch()
    with pytest.raises((UserError, OSError), match=rf"{run / name}\b") as caught:
        train(small_config(corpus), run, resume=True)
    assert as_user_error(caught.value) is not None
    assert (run / name).exists()


@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"seconds": "abc"}', '{"seconds": null}', "[]", '{"seconds": NaN}']
)
def test_a_run_with_a_damaged_run_json_can_be_resumed(
    whole_run: Path, corpus: Path, tmp_path: Path, content: str
) -> None:
    run = shutil.copytree(whole_run, tmp_path / "run")
    shutil.rmtree(max((run / "checkpoints").iterdir()))
    (run / "run.json").write_text(content)
    outcome, _ = train(small_config(corpus), run, resume=True)
    assert outcome.is_finished


def test_a_checkpoint_after_the_last_step_is_not_resumed_from(whole_run: Path, corpus: Path, tmp_path: Path) -> None:
    run = shutil.copytree(whole_run, tmp_path / "run")
    last = max((run / "checkpoints").iterdir())
    later = last.rename(last.with_name("step-000000999"))
    state = json.loads((later / "state.json").read_text()) | {"step": 999}
    del state["sha256"]
    checksum = hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
    (later / "state.json").write_text(json.dumps(state | {"sha256": checksum}))
    outcome, shown = train(small_config(corpus), run, resume=True)
    assert outcome.is_finished
    assert outcome.step == int(last.name.removeprefix("step-"))
    assert "step-000000999" in shown


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"model\.vocabulary_size .*\b32\b.*{corpus}.*\b61\b.*\"auto\""):
        train(small_config(corpus, model={"vocabulary_size": 32}), tmp_path / "run")
    assert not (tmp_path / "run" / "config.toml").exists()
