"""From a study to its runs: one `Cell` for each model, data size, optimizer and seed, with its whole training config.

All configs are built before anything starts, by the same code as those of `coupled-adam train`, so that a mistake
anywhere in the grid is found at once.
"""

import fnmatch
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coupled_adam.base.errors import UserError
from coupled_adam.config.builtin_files import RUN
from coupled_adam.config.loading import Setting, Values, build, given_settings, read_values
from coupled_adam.config.optimizer_names import member_parts, short_member_name, shortened
from coupled_adam.config.run_config import MATTERS_FOR_RESUME, Config, differences, values_by_key, with_rows
from coupled_adam.config.run_sections import OptimizerSection
from coupled_adam.config.schema import all_keys
from coupled_adam.config.study_config import Study
from coupled_adam.config.study_sections import ModelAxis, OptimizerAxis
from coupled_adam.models.model_config import parameter_count

MOST_LINES = 12
# The paper measures its theory at ten equidistant checkpoints.
THEORY_MILESTONES = 10
ROWS = "model.vocabulary_size"
OUTPUT_BIAS = "model.output_bias"
_KEYS_OF_0_1_0 = {
    "model": ("architecture", "layers", "heads", "width", "context", "vocabulary_size", "tied", "bias"),
    "data": ("tokenizer", "order"),
    "optimizer": (
        *("embeddings", "lr", "couple", "scale_exponent", "sgd_factor", "sgd_momentum", "centre"),
        *("beta1", "beta2", "eps", "weight_decay", "max_grad_norm", "z_loss"),
    ),
    "schedule": ("kind", "warmup", "final_fraction", "decay"),
    "training": ("tokens", "batch_size", "precision"),
}
HASHED_SINCE_0_1_0 = {"seed", *(f"{section}.{key}" for section, keys in _KEYS_OF_0_1_0.items() for key in keys)}
"""What `config_hash` always covered."""


@dataclass(frozen=True)
class Cell:
    """One run of a study. Runs with the same `id` differ in the seed alone."""

    id: str
    """Such as "125M-5B-coupled"; a folder is called after it."""
    seed: int
    model: str
    optimizer: str
    config: Config

    @property
    def label(self) -> str:
        """What the user calls this one run, and patterns are compared with."""
        return f"{self.id}/seed-{self.seed}"

    @property
    def run(self) -> Path:
        """The run folder, seen from the study folder."""
        return Path("runs") / self.id / f"seed-{self.seed}"

    @property
    def config_hash(self) -> str:
        """Of all settings that decide what the run computes."""
        return config_hash(self.config)

    @property
    def settings(self) -> dict[str, Any]:
        """What a report tells optimizers apart by: the section [optimizer], and what of the model they may set."""
        model = self.config.model
        bias = {} if model.output_bias == "none" else {"output_bias": model.output_bias}
        return optimizer_settings(self.config.optimizer) | {"tied": model.tied} | bias

    @property
    def parameters(self) -> int:
        """N, without an output bias: a report compares runs with and without one at the same size."""
        return parameter_count(replace(self.config.to_model_config(), output_bias="none"))


@dataclass(frozen=True)
class OptimizerVariant:
    """One optimizer of the grid: its name and the settings that make it."""

    name: str
    settings: dict[str, Any]
    has_own_name: bool = False
    """Whether the study gives it its name."""


def optimizer_settings(section: OptimizerSection) -> dict[str, Any]:
    """An [optimizer] section for a result file: what Muon and single tables have of their own only where it is set."""
    settings = section.model_dump(exclude={"matrices", "muon", "tables", "input_table"})
    changed = section.model_dump(include={"matrices", "muon", "tables", "input_table"}, exclude_defaults=True)
    return settings | changed


def cells_of(study: Study, settings: Sequence[Setting] = ()) -> list[Cell]:
    """All runs of a study, models outermost, seeds innermost.

    Args:
        study: as `load_study` reads it.
        settings: of all runs, as `with_settings` leaves them; they win over everything in the study.

    Raises:
        ValueError: for every mistake in a config, with the name of a run that has it; and for two runs of one name.

    Example:
        >>> from coupled_adam.config.study_config import load_study
        >>> [cell.label for cell in cells_of(load_study("demo"))][2:4]
        ['tiny-307.2k-standard/seed-3', 'tiny-307.2k-coupled/seed-1']
    """
    configs: list[tuple[ModelAxis | None, OptimizerVariant, Config]] = []
    wrong: dict[str, list[str]] = {}  # the runs that each mistake is in
    files: dict[str, Values] = {}
    last = [*given_settings(study.override, Config), *settings]
    sets_seed = any(setting.key == "seed" for setting in last)
    for model, tokens, variant in _grid(study):
        own = study.set | (model.set if model else {}) | ({} if tokens is None else {"training.tokens": tokens})
        own |= variant.settings | {"seed": study.seeds[0]}
        base = study.base_of(model)
        try:
            if base not in files:
                files[base] = read_values(base, RUN)
            config = _config(study, files[base], [*given_settings(own, Config), *last])
        except UserError as error:
            for line in str(error).splitlines():
                wrong.setdefault(line, []).append(f"{model.name if model else study.base}, {variant.name}")
            continue
        configs.append((model, variant, config))
    if wrong:
        raise UserError("\n".join(_mistakes(study, wrong)))
    has_both = len({config.optimizer.matrices for _, _, config in configs}) > 1
    cells: list[Cell] = []
    for model, variant, config in configs:
        named = _named_after_matrices(variant, config) if has_both else variant
        for seed in study.seeds:
            seeded = config if sets_seed else config.model_copy(update={"seed": seed})
            cells.append(_cell(study, model, named, seeded))
    _require_different_names(study, cells)
    return cells


def _config(study: Study, base: Values, settings: Sequence[Setting]) -> Config:
    """The config that the runs of a cell share, but for the seed."""
    config = build(Config, base.source, base.values, settings, mixed="the study's settings")
    config = with_milestones(config) if study.evaluation.theory else config
    _ = config.rows  # says where a tokenizer is missing or not known
    return config


def with_milestones(config: Config) -> Config:
    """The config of a run whose theory is measured: it keeps ten milestones, where it would keep none."""
    if config.checkpoints.milestones:
        return config
    if config.total_steps < THEORY_MILESTONES:
        raise UserError(
            f"evaluation.theory = true: a run of {config.total_steps} steps has no {THEORY_MILESTONES} milestones; "
            f"raise training.tokens, or set checkpoints.milestones = {config.total_steps}"
        )
    kept = config.checkpoints.model_copy(update={"milestones": THEORY_MILESTONES})
    return config.model_copy(update={"checkpoints": kept})


def with_rows_in_numbers(study: Study, cells: Sequence[Cell]) -> Study:
    """The study as its folder keeps it: where the rows of a model are "auto", with their number. Moved to a place
    without the corpus, the folder still means the same runs.

    Args:
        study: as it is run.
        cells: all its runs; their corpora are there.
    """
    override = {key: value for key, value in study.override.items() if (key, value) != (ROWS, "auto")}
    models = [_with_rows(model, [cell for cell in cells if cell.model == model.name]) for model in study.models]
    found = {"set": study.set | _open_rows(cells)} if not models else {"models": models}
    return study.model_copy(update={"override": override, **found})


def _with_rows(model: ModelAxis, cells: Sequence[Cell]) -> ModelAxis:
    return model.model_copy(update={"set": model.set | _open_rows(cells)})


def _open_rows(cells: Sequence[Cell]) -> dict[str, Any]:
    """The setting that gives cells the rows which "auto" stands for; none where they differ, or none is "auto"."""
    rows = {cell.config.rows for cell in cells if cell.config.model.vocabulary_size == "auto"}
    return {ROWS: rows.pop()} if len(rows) == 1 else {}


def _grid(study: Study) -> Iterator[tuple[ModelAxis | None, int | None, OptimizerVariant]]:
    variants = [
        _named_after_bias(variant, optimizer) for optimizer in study.optimizers for variant in variants_of(optimizer)
    ]
    models: Sequence[ModelAxis | None] = study.models or [None]
    for model in models:
        sizes: Sequence[int | None] = (model.tokens if model is not None else None) or study.tokens or [None]
        for tokens, variant in itertools.product(sizes, variants):
            yield model, tokens, variant


def _named_after_bias(variant: OptimizerVariant, optimizer: OptimizerAxis) -> OptimizerVariant:
    """An optimizer without a name of its own is also called after the output bias it sets: "coupled unigram bias"."""
    bias = optimizer.set.get(OUTPUT_BIAS, "none")
    if optimizer.name is not None or bias == "none":
        return variant
    return replace(variant, name=f"{variant.name} {bias} bias")


def _named_after_matrices(variant: OptimizerVariant, config: Config) -> OptimizerVariant:
    """Where a study trains the matrices of the blocks by AdamW and by Muon: "coupled Muon"."""
    if variant.has_own_name or config.optimizer.matrices == "adamw":
        return variant
    return replace(variant, name=f"{variant.name} Muon")


def variants_of(optimizer: OptimizerAxis) -> list[OptimizerVariant]:
    """The optimizers that an entry of [[optimizers]] stands for: one for each value of its lists.

    Example:
        >>> entry = OptimizerAxis(embeddings="coupled", row_exponent=[0.0, 0.25], mean_free=True)
        >>> [variant.name for variant in variants_of(entry)]
        ['coupled mean-free', 'partial y=0.25 mean-free']
    """
    axes: list[Sequence[float | None]] = [
        optimizer.scale_exponent or [None],
        optimizer.column_exponent or [None],
        optimizer.row_exponent or [None],
        optimizer.sgd_factor or [None],
    ]
    variants = []
    for n, x, y, f in itertools.product(*axes):
        own = {
            "embeddings": optimizer.embeddings,
            "scale_exponent": n,
            "column_exponent": x,
            "row_exponent": y,
            "mean_free": optimizer.mean_free,
            "row_exponent_start": optimizer.row_exponent_start,
            "anneal": optimizer.anneal,
            "sgd_factor": f,
            "couple": optimizer.couple,
            "centre": optimizer.centre,
        }
        given = {key: value for key, value in own.items() if value is not None}
        settings = {f"optimizer.{key}": value for key, value in given.items()} | optimizer.set
        if optimizer.name is None:
            name = _plain_name(optimizer, given)
        else:
            of_lists = zip("nxyf", (n, x, y, f), axes, strict=True)
            parts = [f"{letter}={value:g}" for letter, value, axis in of_lists if value is not None and len(axis) > 1]
            name = " ".join([optimizer.name, *parts])
        variants.append(OptimizerVariant(name, settings, optimizer.name is not None))
    return variants


def _plain_name(optimizer: OptimizerAxis, settings: Mapping[str, Any]) -> str:
    """The name of an optimizer without one of its own: what it is, then on which tables."""
    name, parts = {"adamw": "standard", "sgd": "sgd"}.get(optimizer.embeddings), shortened(member_parts(settings))
    if name is None:
        name, *parts = short_member_name(settings).split(" ")
    if "sgd_factor" in settings:
        parts.append(f"f={settings['sgd_factor']:g}")
    tables = [] if optimizer.couple in (None, "output") else [optimizer.couple]
    return " ".join([name, *tables, *(["centred"] if optimizer.centre else []), *parts])


def _cell(study: Study, model: ModelAxis | None, variant: OptimizerVariant, config: Config) -> Cell:
    name = model.name if model is not None else config.name
    id = f"{name}-{exact_amount(config.training.tokens)}-{file_name(variant.name)}"
    config = config.model_copy(update={"name": f"{study.name}-{id}"})
    return Cell(id=id, seed=config.seed, model=name, optimizer=variant.name, config=config)


def exact_amount(amount: int) -> str:
    """An amount with its largest suffix and all its digits, so that two different amounts are never written alike.

    Example:
        >>> exact_amount(5_000_000_000), exact_amount(307_200), exact_amount(81_985_536), exact_amount(16)
        ('5B', '307.2k', '81.985536M', '16')
    """
    for suffix, digits in (("T", 12), ("B", 9), ("M", 6), ("k", 3)):
        whole, rest = divmod(amount, 10**digits)
        if whole:
            return f"{whole}.{rest:0{digits}d}".rstrip("0").rstrip(".") + suffix
    return str(amount)


def file_name(text: str) -> str:
    """A name as part of a folder's name.

    Example:
        >>> file_name("coupled n=-2"), file_name("sgd f=300")
        ('coupled-n-2', 'sgd-f300')
    """
    return re.sub(r"[ ,]+", "-", text.replace("=", "")).strip("-")


def config_hash(config: Config) -> str:
    """Twelve hex digits that change when a setting does that decides what a run computes.

    Names, logging, checkpoints and where it runs (device, threads, the data's folder) do not count: the same run on
    another machine has the same hash.

    Example:
        >>> from coupled_adam.config.run_config import load_config
        >>> a, b, c = (load_config("tiny", [change]) for change in ("seed=1", "training.threads=2", "seed=2"))
        >>> config_hash(a) == config_hash(b), config_hash(a) == config_hash(c)
        (True, False)
    """
    given = values_by_key(with_rows(config))
    values = {key: value for key, value in given.items() if key in MATTERS_FOR_RESUME and _is_hashed(key, value)}
    values["data"] = _text_name(config)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def _is_hashed(key: str, value: Any) -> bool:
    """A key that came later counts only where it is set: the runs of version 0.1.0 keep their hashes."""
    return key in HASHED_SINCE_0_1_0 or value != all_keys(Config)[key].default


def settings_that_differ(a: Config, b: Config) -> list[str]:
    """The settings that give two configs different hashes; none where the hashes are equal.

    Example:
        >>> from coupled_adam.config.run_config import load_config
        >>> settings_that_differ(load_config("tiny"), load_config("tiny", ["seed=2", "training.threads=2"]))
        ['seed']
    """
    counting = set(MATTERS_FOR_RESUME)
    if _text_name(a) != _text_name(b):
        counting.add("data.source" if a.data.source != b.data.source else "data.folder")
    return [key for key in differences(with_rows(a), with_rows(b)) if key in counting]


def _text_name(config: Config) -> str:
    """What the text of a run is called: by its source; without one, a folder has only its own name."""
    return config.data.source or Path(config.data.folder).name


def chosen(cells: Sequence[Cell], patterns: Sequence[str]) -> list[Cell]:
    """The runs that one of the patterns means; all where there is none.

    Args:
        cells: of the study.
        patterns: such as `*-coupled`, `125M-*`, `*/seed-1`; compared with the whole name, with or without its seed.

    Example:
        >>> from coupled_adam.config.study_config import load_study
        >>> [cell.label for cell in chosen(cells_of(load_study("demo")), ["*coupled/seed-[12]"])]
        ['tiny-307.2k-coupled/seed-1', 'tiny-307.2k-coupled/seed-2']
    """
    for pattern in patterns:
        if not any(_matches(cell, pattern) for cell in cells):
            known = ", ".join(dict.fromkeys(cell.id for cell in cells))
            raise UserError(
                f"--only {pattern}: no run is called that; expected a pattern such as '*/seed-1' for: {known}"
            )
    return [cell for cell in cells if not patterns or any(_matches(cell, pattern) for pattern in patterns)]


def _matches(cell: Cell, pattern: str) -> bool:
    return fnmatch.fnmatchcase(cell.label, pattern) or fnmatch.fnmatchcase(cell.id, pattern)


def _mistakes(study: Study, wrong: dict[str, list[str]]) -> Iterator[str]:
    for line, places in list(wrong.items())[:MOST_LINES]:
        different = list(dict.fromkeys(places))
        count = len(different) - 1
        others = f" and {count} other{'s' if count > 1 else ''}" if count else ""
        yield f"study {study.name}: {line} ({different[0]}{others})"
    if len(wrong) > MOST_LINES:
        yield f"and {len(wrong) - MOST_LINES} more"


def _require_different_names(study: Study, cells: Sequence[Cell]) -> None:
    seen: set[str] = set()
    for cell in cells:
        if cell.label in seen:
            raise UserError(
                f"study {study.name}: two runs are called {cell.label}; give the optimizers different names, and set "
                "no seed and no training.tokens that the axes set; to run a part of a study, --only '*/seed-1'"
            )
        seen.add(cell.label)
