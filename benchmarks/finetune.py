"""Fine-tune a model pretrained with AdamW: with AdamW and with Coupled Adam, with and without recentring first.

    python benchmarks/finetune.py                    preset `tiny`, 2M tokens; then 200 steps per setting
    python benchmarks/finetune.py --lrs 1e-3 --seeds 1 --steps 100
    python benchmarks/finetune.py --json OUT.json

The first text is the documentation of Python, torch and numpy from the installed packages. The second text is the
source code of Python's standard library. `coupled-adam train` trains the model on the first text with AdamW. A plain
loop then trains it on the second text: warm-up over a tenth of the steps, cosine decay to a tenth of the learning rate,
gradients clipped to 1. "kept" starts from AdamW's state at the end of pretraining, "fresh" from an empty optimizer
state. Losses are measured on held-out documents of both texts. Runs that differ only in the optimizer use the same
batches.

Legend: V vocabulary rows, H hidden size.
"""

import argparse
import json
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from coupled_adam.config.run_config import load_config
from coupled_adam.config.schedule import learning_rate
from coupled_adam.data.batches import Batches
from coupled_adam.data.corpus import Corpus
from coupled_adam.data.prepare import prepare
from coupled_adam.data.python_docs import SKIPPED_FOLDERS
from coupled_adam.embeddings import measure
from coupled_adam.evaluation.held_out_loss import loss_over
from coupled_adam.evaluation.weights import find_checkpoint, load_run
from coupled_adam.inspection.recentring.recentre_model import recentre
from coupled_adam.models.language_model import LanguageModel
from coupled_adam.optimizer import CoupledAdamW, param_groups
from coupled_adam.training.checkpoint.save_and_load import load
from coupled_adam.training.checkpoint.training_state import make_optimizer_state, training_tensors
from coupled_adam.training.run import run_training
from step import commit, hardware

State = dict[str, Any]
PARTIAL = {"row_exponent": 0.25, "mean_free": True}
WEIGHT_DECAY = 0.1


@dataclass(frozen=True)
class Method:
    """A way to fine-tune."""

    name: str
    recentred: bool
    coupled: dict[str, Any] | None
    """Options of CoupledAdamW; None means torch.optim.AdamW."""


METHODS = [
    Method("AdamW", False, None),
    Method("Coupled Adam", False, {}),
    Method("partially coupled", False, PARTIAL),
    Method("recentred, AdamW", True, None),
    Method("recentred, Coupled Adam", True, {}),
    Method("recentred, partially coupled", True, PARTIAL),
]


@dataclass(frozen=True)
class Numbers:
    """Measurements of a model."""

    loss: float
    """Loss on held-out documents of the second text, in nats."""
    old_loss: float
    """Loss on held-out documents of the first text."""
    mean_ratio: float
    iso: float
    """ISO over both signs of every eigenvector: the mean of a centred table is too short to choose a sign."""


@dataclass(frozen=True)
class Finished:
    """One fine-tuning run."""

    method: str
    state: str
    lr: float
    seed: int
    numbers: Numbers


@dataclass(frozen=True)
class Texts:
    """Both corpora, with the same tokenizer."""

    first: Corpus
    second: Corpus


def source_code(path: Path) -> None:
    """Write Python's standard library without its tests as JSON lines, one document per file."""
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(file for file in library.rglob("*.py") if not SKIPPED_FOLDERS & set(file.relative_to(library).parts))
    with path.open("w", encoding="utf-8") as lines:
        for file in files:
            lines.write(json.dumps({"text": file.read_text(encoding="utf-8", errors="replace")}) + "\n")


def pretrain(folder: Path, tokens: str) -> Path:
    """Run `coupled-adam train` with AdamW on the first text."""
    data = folder / "docs"
    overrides = ["optimizer.embeddings=adamw", f"training.tokens={tokens}", f"data.folder={data}"]
    run = folder / "pretrained"
    if not run.exists():
        run_training(load_config("tiny", overrides), run, console=Console(stderr=True))
    return run


def load_start(run: Path) -> tuple[LanguageModel, State]:
    """Load the model of a run and the state of its AdamW, in the groups of CoupledAdamW."""
    model, _, _ = load_run(run)
    adamw = torch.optim.AdamW(param_groups(model, WEIGHT_DECAY, couple="none"))
    make_optimizer_state([adamw])
    load(find_checkpoint(run, None, on_skip=print), training_tensors(model, [adamw]))
    return model, adamw.state_dict()


def build_optimizer(model: nn.Module, method: Method, state: State | None) -> torch.optim.Optimizer:
    """Build the optimizer of a method, fresh or with AdamW's state."""
    optimizer: torch.optim.Optimizer
    if method.coupled is None:
        optimizer = torch.optim.AdamW(param_groups(model, WEIGHT_DECAY, couple="none"))
    else:
        optimizer = CoupledAdamW(model, weight_decay=WEIGHT_DECAY, **method.coupled)
    if state is not None:
        optimizer.load_state_dict(state)
    return optimizer


def fine_tune(model: LanguageModel, optimizer: torch.optim.Optimizer, batches: Batches, lr: float, steps: int) -> None:
    """Train in a plain loop."""
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step + 1, lr=lr, total_steps=steps, warmup_steps=steps // 10)
        tokens = batches.samples(step, 0, batches.batch_size)
        optimizer.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def measured(model: LanguageModel, texts: Texts) -> Numbers:
    table = model.get_parameter(model.output_table_name).detach()  # (V, H)
    embeddings = measure(table)
    assert embeddings.mu_norm_ratio is not None
    loss, old_loss = (loss_over(model, corpus.tokens("val")).loss for corpus in (texts.second, texts.first))
    return Numbers(loss, old_loss, embeddings.mu_norm_ratio, embeddings.iso_both_signs)


def fine_tunings(runs: dict[bool, Path], texts: Texts, options: argparse.Namespace) -> Iterator[Finished]:
    """Run every method with both states, every learning rate and every seed."""
    for method in METHODS:
        for state_name in ("kept", "fresh"):
            for lr in options.lrs:
                for seed in range(options.seeds):
                    model, state = load_start(runs[method.recentred])
                    optimizer = build_optimizer(model, method, state if state_name == "kept" else None)
                    batches = Batches(texts.second.tokens("train"), model.config.context, 16, seed)
                    fine_tune(model, optimizer, batches, lr, options.steps)
                    yield Finished(method.name, state_name, lr, seed, measured(model, texts))


def cell(values: list[float], decimals: int) -> str:
    """Format mean and standard deviation over the seeds."""
    mean = f"{statistics.mean(values):.{decimals}f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.{decimals}f}"


def markdown(before: Numbers, finished: list[Finished]) -> str:
    """Format the results as a Markdown table, one row per setting."""
    lines = [
        "| method | AdamW's state | learning rate | loss, new text | loss, old text | mean ratio | ISO, both signs |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
        f"| before | | | {before.loss:.3f} | {before.old_loss:.3f} | {before.mean_ratio:.3f} | {before.iso:.3f} |",
    ]
    settings: dict[tuple[str, str, float], list[Numbers]] = {}
    for run in finished:
        settings.setdefault((run.method, run.state, run.lr), []).append(run.numbers)
    for (method, state, lr), numbers in settings.items():
        cells = [cell([getattr(found, key) for found in numbers], 3) for key in asdict(before)]
        lines.append(f"| {method} | {state} | {lr:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="2M", help="tokens of pretraining")
    parser.add_argument("--steps", type=int, default=200, help="steps of each fine-tuning run, 16 x 64 tokens each")
    parser.add_argument("--lrs", nargs="+", type=float, default=[3e-4, 1e-3, 3e-3])
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds, which set the order of the batches")
    parser.add_argument("--folder", type=Path, help="keep the pretrained model here, and reuse it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all runs to this file")
    options = parser.parse_args()

    started = time.monotonic()
    with nullcontext(options.folder) if options.folder else tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = pretrain(folder, options.tokens)
        _, _, first = load_run(run)
        assert first is not None
        code = folder / "code.jsonl"
        if not code.exists():
            source_code(code)
        second = prepare(
            f"text:{code}",
            str(folder / "docs" / "tokenizer.json"),
            folder / "code",
            val=0.05,
            test=0.0,
            max_tokens=1_000_000,
        )
        texts = Texts(first, second)
        if not (folder / "recentred").exists():
            recentre(run, folder / "recentred")
        runs = {False: run, True: folder / "recentred"}
        before = {key: measured(load_start(path)[0], texts) for key, path in runs.items()}
        finished = []
        for done in fine_tunings(runs, texts, options):
            finished.append(done)
            Console(stderr=True).print(f"{done}", highlight=False)
    print(f"{hardware('cpu')}, torch {torch.__version__}, {date.today()}, commit {commit()}")
    seconds = time.monotonic() - started
    print(f"{options.tokens} tokens, then {options.steps} steps; seeds: {options.seeds}; {seconds:.0f} s")
    centred = before[True]
    print(f"recentred, before: loss {centred.loss:.3f} and {centred.old_loss:.3f}, ", end="")
    print(f"mean ratio {centred.mean_ratio:.3f}, ISO, both signs {centred.iso:.3f}\n")
    print(markdown(before[False], finished))
    if options.json:
        content = {"before": {"as it is": asdict(before[False]), "recentred": asdict(before[True])}}
        options.json.write_text(json.dumps(content | {"runs": [asdict(run) for run in finished]}, indent=1))


if __name__ == "__main__":
    main()
