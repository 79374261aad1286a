"""Expand a study into its runs: one `Cell` per model, data size, optimizer and seed, with its full training config.

All configs are built before anything starts, by the same code as for `coupled-adam train`, so that an error anywhere
in the grid is found immediately.
"""

import fnmatch
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coupled_adam.base.errors import UserError
from coupled_adam.base.text import counted, some_of
from coupled_adam.config.builtin_files import RUN
from coupled_adam.config.loading import Setting, Values, build, given_settings, read_values
from coupled_adam.config.run_config import Config
from coupled_adam.config.run_sections import OptimizerSection
from coupled_adam.config.study_config import Study
from coupled_adam.config.study_sections import ModelAxis
from coupled_adam.models.model_config import parameter_count
from coupled_adam.study.config_hash import config_hash
from coupled_adam.study.optimizer_variants import (
    OptimizerVariant,
    named_after_bias,
    named_after_matrices,
    variants_of,
)
from coupled_adam.study.trials import Trial, all_beyond

MOST_LINES = 12
MOST_NAMES = 8  # of runs in an error message
# The paper measures its theory at ten equidistant checkpoints.
THEORY_MILESTONES = 10
ROWS = "model.vocabulary_size"
ONLY_WHERE_SET = {"matrices", "muon", "tables", "input_table", "mu_loss"}


@dataclass(frozen=True)
class Cell:
    """One run of a study. Runs with the same `id` differ only in the seed."""

    id: str
    """Such as "125M-5B-coupled"; also the name of a folder."""
    seed: int
    model: str
    optimizer: str
    config: Config
    trial: Trial | None = None
    """The run's role in a selection; None if it has none."""

    @property
    def is_candidate(self) -> bool:
        """Whether the run only serves to select a setting and is not reported."""
        return self.trial is not None and self.trial.is_candidate

    @property
    def is_open(self) -> bool:
        """Whether a setting of the run is not selected yet; until then `config` has the first value to try."""
        return self.trial is not None and self.trial.value is None

    @property
    def label(self) -> str:
        """Name of this run, which patterns of --only match."""
        return f"{self.id}/seed-{self.seed}"

    @property
    def run(self) -> Path:
        """The run folder, relative to the study folder."""
        return Path("runs") / self.id / f"seed-{self.seed}"

    @property
    def config_hash(self) -> str:
        """Hash of the settings that determine what the run computes."""
        return config_hash(self.config)

    @property
    def settings(self) -> dict[str, Any]:
        """What distinguishes optimizers in a report: [optimizer], and the model settings that optimizers may change."""
        model = self.config.model
        bias = {} if model.output_bias == "none" else {"output_bias": model.output_bias}
        cap = {} if model.logit_cap is None else {"logit_cap": model.logit_cap}
        residual = {} if model.residual_dtype == "float32" else {"residual_dtype": model.residual_dtype}
        return optimizer_settings(self.config.optimizer) | {"tied": model.tied} | bias | cap | residual

    @property
    def parameters(self) -> int:
        """N without the output bias, so that a report compares runs with and without a bias at the same size."""
        return parameter_count(replace(self.config.to_model_config(), output_bias="none"))


def optimizer_settings(section: OptimizerSection) -> dict[str, Any]:
    """Convert an [optimizer] section for a result file; some keys newer than 0.1.0 are included only if set."""
    settings = section.model_dump(exclude=ONLY_WHERE_SET)
    changed = section.model_dump(include=ONLY_WHERE_SET, exclude_defaults=True)
    return settings | changed


def cells_of(study: Study, settings: Sequence[Setting] = ()) -> list[Cell]:
    """List all runs of a study, models outermost, seeds innermost.

    For a study that selects a setting, this lists every candidate that may ever be tried, followed by the reported
    runs, whose setting is still open. `selection.cells_in` returns those that are needed, given the finished runs.

    Args:
        study: from `load_study`.
        settings: for all runs, from `with_settings`; they override everything in the study.

    Raises:
        ValueError: for every error in a config, with the name of an affected run; and for two runs of the same name.

    Example:
        >>> from coupled_adam.config.study_config import load_study
        >>> [cell.label for cell in cells_of(load_study("demo"))][2:4]
        ['tiny-307.2k-standard/seed-3', 'tiny-307.2k-coupled/seed-1']
    """
    planned: list[tuple[ModelAxis | None, OptimizerVariant, Config, dict[float, Config]]] = []
    wrong: dict[str, list[str]] = {}  # runs by error
    files: dict[str, Values] = {}
    last = [*given_settings(study.override, Config), *settings]
    sets_seed = any(setting.key == "seed" for setting in last)
    _require_free(study, last)
    for model, tokens, variant in _grid(study):
        own = study.set | (model.set if model else {}) | ({} if tokens is None else {"training.tokens": tokens})
        own |= variant.settings | {"seed": study.seeds[0]}
        base = study.base_of(model)
        reported: Config | None = None
        candidates: dict[float, Config] = {}
        for value in _values_of(study, variant):
            key = variant.selects[0] if variant.selects else ""
            tried = {} if value is None else {key: value}
            try:
                if base not in files:
                    files[base] = read_values(base, RUN)
                given = [*given_settings(own | tried, Config), *last]
                config = _config(study, files[base], given)
                reported = reported or config
                if value is not None:
                    candidates[value] = _shorter(study, files[base], given, config)
            except UserError as error:
                is_own = variant.selects is None or value in variant.selects[1]
                hint = "" if is_own else "; select.extend would try this value: lower select.extend, or set it to 0"
                for line in str(error).splitlines():
                    wrong.setdefault(line + hint, []).append(f"{model.name if model else study.base}, {variant.name}")
        if wrong or reported is None:
            continue
        planned.append((model, variant, reported, candidates))
    if wrong:
        raise UserError("\n".join(_mistakes(study, wrong)))
    has_both = len({config.optimizer.matrices for _, _, config, _ in planned}) > 1
    seeds: Sequence[int | None] = [None] * len(study.seeds) if sets_seed else study.seeds
    cells: list[Cell] = []
    for model, variant, config, candidates in planned:
        named = named_after_matrices(variant, config) if has_both else variant
        cells += _cells(study, model, named, config, candidates, seeds)
    _require_different_names(study, cells)
    return cells


def _values_of(study: Study, variant: OptimizerVariant) -> list[float | None]:
    """Every value of a selected setting that may be tried, the study's own first; [None] if nothing is selected."""
    if variant.selects is None:
        return [None]
    values = variant.selects[1]
    return [*values, *all_beyond(values, study.select.extend)]


def _cells(
    study: Study,
    model: ModelAxis | None,
    variant: OptimizerVariant,
    config: Config,
    candidates: Mapping[float, Config],
    seeds: Sequence[int | None],
) -> list[Cell]:
    """List the runs of one model, data size and optimizer.

    Args:
        config: of the reported runs, with the first value of the selected setting.
        candidates: by the value of the selected setting; empty if nothing is selected.
        seeds: of the reported runs; None for the config's seed.
    """

    def seeded(config: Config, seed: int | None) -> Config:
        return config if seed is None else config.model_copy(update={"seed": seed})

    reported = [_cell(study, model, variant, seeded(config, seed)) for seed in seeds]
    if variant.selects is None:
        return reported
    key, _ = variant.selects
    of = reported[0].id
    cells = []
    for value, own in candidates.items():
        named = replace(variant, name=f"{variant.name} {key.rpartition('.')[2]}={value:g}")
        cell = _cell(study, model, named, seeded(own, study.select.trial_seed))
        cells.append(replace(cell, optimizer=variant.name, trial=Trial(key, value, True, of)))
    return cells + [replace(cell, trial=Trial(key, None, False, of)) for cell in reported]


def with_value_of(cell: Cell, candidate: Cell) -> Cell:
    """Give a reported run the setting of the winning candidate, which may have trained on fewer tokens."""
    assert cell.trial is not None
    assert candidate.trial is not None
    training = candidate.config.training.model_copy(update={"tokens": cell.config.training.tokens})
    own = {"seed": cell.seed, "name": cell.config.name, "training": training}
    config = candidate.config.model_copy(update=own)
    return replace(cell, config=config, trial=replace(cell.trial, value=candidate.trial.value))


def _require_free(study: Study, settings: Sequence[Setting]) -> None:
    """Raise if a setting for all runs, as from --set, is one that the study selects."""
    selected = {found[0] for optimizer in study.optimizers if (found := study.candidates_of(optimizer))}
    for setting in settings:
        if setting.key in selected or (selected and setting.key == "seed"):
            raise UserError(
                f"{setting.blamed(setting.text)}: the study selects {', '.join(sorted(selected))} with its own seed; "
                f"edit a copy instead: coupled-adam study show {study.name} > mine.toml"
            )


def _config(study: Study, base: Values, settings: Sequence[Setting]) -> Config:
    """Build the config that the runs of a cell share, except for the seed."""
    config = build(Config, base.source, base.values, settings, mixed="the study's settings")
    config = with_milestones(config) if study.evaluation.theory else config
    _ = config.rows  # raises if a tokenizer is missing or unknown
    return config


def _shorter(study: Study, base: Values, settings: Sequence[Setting], config: Config) -> Config:
    """Build the config of a candidate: with the fraction of the tokens that candidates train on."""
    fraction = study.select.trial_fraction
    if fraction == 1.0:
        return config
    tokens = {"training.tokens": round(fraction * config.training.tokens)}
    try:
        return _config(study, base, [*settings, *given_settings(tokens, Config)])
    except UserError as error:
        hint = f"; select.trial_fraction = {fraction:g} shortens this candidate: raise it"
        raise UserError("\n".join(line + hint for line in str(error).splitlines())) from None


def with_milestones(config: Config) -> Config:
    """Keep ten milestones, which the theory needs, if the config keeps none."""
    if config.checkpoints.milestones:
        return config
    if config.total_steps < THEORY_MILESTONES:
        raise UserError(
            f"evaluation.theory = true: {counted(config.total_steps, 'step is', 'steps are')} too few for "
            f"{THEORY_MILESTONES} milestones; "
            f"raise training.tokens, or set checkpoints.milestones = {config.total_steps}"
        )
    kept = config.checkpoints.model_copy(update={"milestones": THEORY_MILESTONES})
    return config.model_copy(update={"checkpoints": kept})


def with_rows_in_numbers(study: Study, cells: Sequence[Cell]) -> Study:
    """Replace "auto" rows by their number, for the study.toml in the folder.

    The folder then describes the same runs if it is moved to a machine without the corpus.

    Args:
        study: to be stored.
        cells: all its runs; their corpora must exist.
    """
    override = {key: value for key, value in study.override.items() if (key, value) != (ROWS, "auto")}
    models = [_with_rows(model, [cell for cell in cells if cell.model == model.name]) for model in study.models]
    found = {"set": study.set | _open_rows(cells)} if not models else {"models": models}
    return study.model_copy(update={"override": override, **found})


def _with_rows(model: ModelAxis, cells: Sequence[Cell]) -> ModelAxis:
    return model.model_copy(update={"set": model.set | _open_rows(cells)})


def _open_rows(cells: Sequence[Cell]) -> dict[str, Any]:
    """The setting with the number of rows that "auto" stands for; empty if they differ or none is "auto"."""
    rows = {cell.config.rows for cell in cells if cell.config.model.vocabulary_size == "auto"}
    return {ROWS: rows.pop()} if len(rows) == 1 else {}


def _grid(study: Study) -> Iterator[tuple[ModelAxis | None, int | None, OptimizerVariant]]:
    variants = [
        replace(named_after_bias(variant, optimizer), selects=study.candidates_of(optimizer))
        for optimizer in study.optimizers
        for variant in variants_of(optimizer)
    ]
    models: Sequence[ModelAxis | None] = study.models or [None]
    for model in models:
        sizes: Sequence[int | None] = (model.tokens if model is not None else None) or study.tokens or [None]
        for tokens, variant in itertools.product(sizes, variants):
            yield model, tokens, variant


def _cell(study: Study, model: ModelAxis | None, variant: OptimizerVariant, config: Config) -> Cell:
    name = model.name if model is not None else config.name
    id = f"{name}-{exact_amount(config.training.tokens)}-{file_name(variant.name)}"
    config = config.model_copy(update={"name": f"{study.name}-{id}"})
    return Cell(id=id, seed=config.seed, model=name, optimizer=variant.name, config=config)


def exact_amount(amount: int) -> str:
    """Write an amount with its largest suffix and all digits, so that different amounts never look the same.

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
    """Turn a name into part of a folder name.

    Example:
        >>> file_name("coupled n=-2"), file_name("sgd f=300")
        ('coupled-n-2', 'sgd-f300')
    """
    return re.sub(r"[ ,]+", "-", text.replace("=", "")).strip("-")


def chosen(cells: Sequence[Cell], patterns: Sequence[str]) -> list[Cell]:
    """Filter runs by patterns; without patterns, return all.

    Args:
        cells: of the study.
        patterns: such as `*-coupled`, `125M-*`, `*/seed-1`; matched against the full name, with or without its seed.

    Example:
        >>> from coupled_adam.config.study_config import load_study
        >>> [cell.label for cell in chosen(cells_of(load_study("demo")), ["*coupled/seed-[12]"])]
        ['tiny-307.2k-coupled/seed-1', 'tiny-307.2k-coupled/seed-2']
    """
    for pattern in patterns:
        if not any(_matches(cell, pattern) for cell in cells):
            reported_first = sorted(cells, key=lambda cell: cell.is_candidate)
            known = some_of(dict.fromkeys(cell.id for cell in reported_first), MOST_NAMES)
            example = "expected a pattern such as '*/seed-1' for"
            raise UserError(f"--only {pattern}: no run matches; {example}: {known} (--dry-run shows all)")
    return [cell for cell in cells if not patterns or any(_matches(cell, pattern) for pattern in patterns)]


def _matches(cell: Cell, pattern: str) -> bool:
    return fnmatch.fnmatchcase(cell.label, pattern) or fnmatch.fnmatchcase(cell.id, pattern)


def _mistakes(study: Study, wrong: dict[str, list[str]]) -> Iterator[str]:
    for line, places in list(wrong.items())[:MOST_LINES]:
        different = list(dict.fromkeys(places))
        count = len(different) - 1
        others = f" and {counted(count, 'other')}" if count else ""
        yield f"study {study.name}: {line} ({different[0]}{others})"
    if len(wrong) > MOST_LINES:
        yield f"and {len(wrong) - MOST_LINES} more"


def _require_different_names(study: Study, cells: Sequence[Cell]) -> None:
    seen: set[str] = set()
    for cell in cells:
        if cell.label in seen:
            raise UserError(
                f"study {study.name}: two runs are named {cell.label}; give the optimizers different names, and do not "
                "set a seed or training.tokens that an axis sets; to run part of a study, use --only '*/seed-1'"
            )
        seen.add(cell.label)
