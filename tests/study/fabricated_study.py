"""A made-up study folder, as written by `study run`: results, curves and embeddings with known numbers."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coupled_adam.config.builtin_files import study_text
from coupled_adam.study.results import Result, to_json

STANDARD = {"embeddings": "adamw", "scale_exponent": 0.0, "sgd_factor": None, "lr": 3e-3, "tied": True}
COUPLED = {**STANDARD, "embeddings": "coupled"}
OPTIMIZERS = {"standard": STANDARD, "coupled": COUPLED}
PAGE_PARTS = (
    "verdict",
    "key-numbers",
    "figure-embedding_cloud",
    "main-table",
    "curves",
    "table-main",
    "table-primary",
    "table-comparisons",
    "table-runs",
    "repeat",
)
"""The ids of what the page of the demo has."""


def scaled(n: float) -> dict[str, Any]:
    """Settings of Scaled Coupled Adam."""
    return {**COUPLED, "scale_exponent": float(n)}


def sgd(f: float) -> dict[str, Any]:
    """Settings of SGD for the embeddings."""
    return {**STANDARD, "embeddings": "sgd", "sgd_factor": float(f)}


def fabricate(
    folder: Path,
    *,
    name: str = "demo",
    optimizers: Mapping[str, Mapping[str, Any]] = OPTIMIZERS,
    sizes: Sequence[tuple[str, int, int]] = (("0.4M", 368_000, 307_200),),
    seeds: Sequence[int] = (1, 2, 3),
    gain: float = 0.1,
    noise: float = 0.004,
    metrics: Sequence[str] = ("loss", "val_loss", "train_loss", "iso", "mu_norm", "mu_norm_ratio", "rho_log", "kappa"),
    with_runs: bool = True,
    untied: bool = False,
) -> Path:
    """Write a study.

    Args:
        folder: of the study; made.
        name: of the study.
        optimizers: settings by name.
        sizes: (model, parameters, tokens).
        seeds: of every cell.
        gain: how much lower the loss of every optimizer except the standard one is.
        noise: standard deviation of the loss over seeds.
        metrics: which to fill in.
        with_runs: whether to write run folders.
        untied: whether the input table has its own numbers.
    """
    generator = np.random.default_rng(0)
    folder.mkdir(parents=True)
    rows = []
    for model, parameters, tokens in sizes:
        for optimizer, settings in optimizers.items():
            centred = settings["embeddings"] != "adamw"
            for seed in seeds:
                loss = (
                    6.4 - gain * centred + 0.01 * abs(settings["scale_exponent"]) + noise * generator.standard_normal()
                )
                values = {
                    "loss": loss,
                    "val_loss": loss + 0.02,
                    "train_loss": loss - 0.1,
                    "arc_easy": 0.40 + 0.01 * centred + 0.001 * seed,
                    "race": 0.25 + 0.001 * seed,
                    "acc": 0.34 + 0.01 * centred + 0.001 * generator.standard_normal(),
                    "iso": (0.97 if centred else 0.6) + 0.01 * generator.standard_normal(),
                    "mu_norm": (0.01 if centred else 0.5) + 0.001 * abs(generator.standard_normal()),
                    "mu_norm_ratio": (0.02 if centred else 0.85) + 0.002 * generator.standard_normal(),
                    "rho_log": (70.0 if centred else -81.0) + generator.standard_normal(),
                    "kappa": (9.0 if centred else 3.0) + 0.1 * generator.standard_normal(),
                }
                chosen = {metric: float(values[metric]) for metric in metrics}
                if untied:
                    chosen |= {
                        f"input_{metric}": chosen[metric] for metric in ("iso", "mu_norm_ratio") if metric in chosen
                    }
                cell = f"{model}-{tokens}-{optimizer}".replace(" ", "_").replace("/", "_")
                result = Result(
                    study=name,
                    cell=cell,
                    seed=seed,
                    optimizer=optimizer,
                    settings=dict(settings),
                    model=model,
                    parameters=parameters,
                    tokens=tokens,
                    metrics=chosen,
                    seconds=14.0 + seed,
                    tokens_per_second=25_000.0,
                    energy_joules=None,
                    config_hash=f"c0ffee{len(rows):04d}",
                    package="0.1.0",
                    commit="abc1234",
                    torch="2.13.0",
                    device="cpu",
                    run=f"runs/{cell}/seed-{seed}",
                    folder=folder,
                )
                rows.append(result)
                if with_runs:
                    write_run(result, centred, untied, generator)
    (folder / "results.jsonl").write_text("".join(to_json(row) + "\n" for row in rows))
    return folder


def write_run(result: Result, centred: bool, untied: bool, generator: np.random.Generator) -> None:
    """metrics.jsonl and embeddings.npz of one run."""
    run = result.run_folder
    run.mkdir(parents=True)
    ratio = 0.02 if centred else 0.85
    prefixes = ("", "input_") if untied else ("",)
    lines = []
    for step in range(10, 301, 10):
        done = step / 300
        loss = 8.3 - (8.3 - (result.metrics.get("loss") or 6.4)) * done**0.5
        lines.append({"kind": "train", "step": step, "loss": loss + 0.01 * generator.standard_normal(), "lr": 3e-3})
        if step % 50 == 0:
            measured = {f"{prefix}mu_norm_ratio": ratio * done**0.3 for prefix in prefixes}
            measured |= {f"{prefix}iso": 1 - (0.03 if centred else 0.4) * done for prefix in prefixes}
            lines.append({"kind": "embeddings", "step": step, **measured})
            lines.append({"kind": "val", "step": step, "loss": loss + 0.02})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "config.toml").write_text("name = 'x'\n")
    count = 300
    shift = 0.5 if not centred else 0.012
    spread = np.array([0.1, 0.25, 0.2])
    frequency = generator.uniform(-6, -1.5, 400)
    arrays = {
        "singular_values": np.sort(generator.uniform(1, 3, 64))[::-1]
        * np.where(np.arange(64) == 0, 8 if shift > 0.1 else 1, 1),
        "log10_frequency": frequency,
        "norm": 0.6 + (0.05 if centred else -0.06) * frequency + 0.03 * generator.standard_normal(400),
        "token_count": np.array(307_200),
        "cloud_initial": 0.02 * generator.standard_normal((count, 3)),
        "cloud_final": spread * generator.standard_normal((count, 3)) + [shift, 0, 0],
        "mean_final": np.array([shift, 0, 0]),
        "mean_initial": np.zeros(3),
    }
    if untied:
        arrays |= {f"input_{key}": value for key, value in arrays.items() if key != "token_count"}
    np.savez(run / "embeddings.npz", **{key: np.asarray(value, np.float32) for key, value in arrays.items()})


def fabricated_demo(folder: Path, **settings: object) -> Path:
    """The demo study with made-up numbers, using the names of its plan."""
    fabricate(folder, sizes=(("tiny", 364_864, 307_200),), **settings)  # type: ignore[arg-type]
    text = (folder / "results.jsonl").read_text().replace("tiny-307200-", "tiny-307.2k-")
    (folder / "results.jsonl").write_text(text)
    for run in (folder / "runs").glob("tiny-307200-*"):
        run.rename(run.with_name(run.name.replace("307200", "307.2k")))
    (folder / "study.toml").write_text(study_text("demo"))
    return folder
