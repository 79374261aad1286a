"""Checks between keys of a run config or a study whose values are each valid alone."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coupled_adam.base.text import counted
from coupled_adam.config.optimizer_names import is_coupled_adam
from coupled_adam.config.schema import Section
from coupled_adam.config.toml_writing import toml_value

if TYPE_CHECKING:
    from coupled_adam.config.run_config import Config
    from coupled_adam.config.study_config import Study

GPT2_TOKENS = 50257


def wrong_between_keys_of_run(config: "Config") -> Iterator[str]:
    """Yield one error line per conflict between keys of a run config."""
    yield from _wrong_in_model(config)
    yield from _wrong_in_optimizer(config)
    yield from _wrong_in_length(config)
    yield from _without_effect(config)


def _wrong_in_model(config: "Config") -> Iterator[str]:
    model = config.model
    if model.width % model.heads:
        yield f"model.width = {model.width}: expected a multiple of model.heads = {model.heads}"
    elif model.architecture == "llama" and model.width // model.heads % 2:
        yield (
            f"model.heads = {model.heads}: rotary positions need heads of even width, "
            f"{model.width} / {model.heads} = {model.width // model.heads} is odd"
        )
    if model.architecture == "llama" and model.bias:
        yield 'model.bias = true: expected false with model.architecture = "llama"'
    training = config.training
    in_float32 = training.precision == "float32" or (training.precision == "auto" and training.device == "cpu")
    if model.residual_dtype != "float32" and in_float32:
        yield residual_without_bf16(model.residual_dtype)
    tokenizer = config.data.tokenizer
    bpe = re.fullmatch(r"bpe:(\d+)", tokenizer)
    if tokenizer.startswith("bpe:") and not bpe:
        yield f'data.tokenizer = {toml_value(tokenizer)}: expected a number of tokens after "bpe:", such as "bpe:4096"'
    # Without a source, the folder exists and its own tokenizer counts. A tokenizer trained on little text may have
    # fewer tokens than requested, so bpe:N is checked only when the text is prepared.
    if (
        config.data.source is not None
        and tokenizer == "gpt2"
        and model.vocabulary_size != "auto"
        and model.vocabulary_size < GPT2_TOKENS
    ):
        yield too_few_rows(model.vocabulary_size, GPT2_TOKENS, tokenizer)


def residual_without_bf16(residual_dtype: str) -> str:
    """Error message for a narrow residual stream in a run without bf16 autocast."""
    return (
        f'model.residual_dtype = {toml_value(residual_dtype)}: expected "float32" in a run in float32, or '
        'training.precision = "bf16"'
    )


def too_few_rows(rows: int, tokens: int, tokenizer: str) -> str:
    """Error message for a table with fewer rows than the tokenizer has tokens."""
    return (
        f'model.vocabulary_size = {rows}: expected "auto" or at least {tokens}, the tokens of data.tokenizer = '
        f"{toml_value(tokenizer)}"
    )


def _wrong_in_optimizer(config: "Config") -> Iterator[str]:
    optimizer = config.optimizer
    if optimizer.embeddings == "sgd" and optimizer.sgd_factor is None:
        yield 'optimizer.sgd_factor is missing: optimizer.embeddings = "sgd" needs it; the paper finds 300 to 400'
    if optimizer.couple != "output" and config.model.tied:
        yield (
            f"optimizer.couple = {toml_value(optimizer.couple)}: a tied model has one table, which counts as "
            'output; expected "output", or model.tied = false'
        )
    yield from _wrong_in_tables(config)
    yield from _wrong_in_annealing(config)
    if optimizer.centre and optimizer.embeddings == "coupled" and not is_coupled_adam(optimizer.model_dump()):
        yield (
            "optimizer.centre = true: expected false with row_exponent, column_exponent or mean_free; "
            "optimizer.mean_free = true keeps the mean embedding where it is"
        )
    if config.training.cuda_graphs is True and config.training.device == "cpu":
        yield 'training.cuda_graphs = true: expected false or "auto" with training.device = "cpu"'


def _wrong_in_tables(config: "Config") -> Iterator[str]:
    """Yield one error line per setting of a table that does not exist or that SGD trains."""
    optimizer, tied = config.optimizer, config.model.tied
    for name, table, coupled_by in (
        ("tables", optimizer.tables, ("output", "all")),
        ("input_table", optimizer.input_table, ("input", "all")),
    ):
        for key, value in changed_keys(table).items():
            given = f"optimizer.{name}.{key} = {toml_value(value)}"
            if name == "input_table" and tied:
                yield (
                    f"{given}: a tied model has one table, configured in [optimizer.tables]; expected "
                    "model.tied = false"
                )
            elif optimizer.embeddings == "sgd" and optimizer.couple in coupled_by:
                yield (
                    f'{given} has no effect with optimizer.embeddings = "sgd", which trains this table with '
                    'optimizer.sgd_factor and sgd_momentum; leave it out, or set optimizer.embeddings = "coupled" or '
                    '"adamw"'
                )


def changed_keys(section: Section) -> dict[str, Any]:
    """The keys of a section whose values differ from their defaults."""
    return section.model_dump(exclude_defaults=True)


def _wrong_in_annealing(config: "Config") -> Iterator[str]:
    start, end, anneal = (
        config.optimizer.row_exponent_start,
        config.optimizer.row_exponent,
        config.optimizer.anneal,
    )
    if start is not None and anneal is None:
        yield (
            f'optimizer.anneal is missing: optimizer.row_exponent_start = {start} needs it, such as "10%"; or leave '
            "row_exponent_start out"
        )
    elif start is None and anneal is not None:
        yield (
            f"optimizer.row_exponent_start is missing: optimizer.anneal = {toml_value(anneal)} needs it; or leave "
            "anneal out for a constant row_exponent"
        )
    elif start is not None and start == end:
        yield (
            f"optimizer.row_exponent_start = {start}: expected a value other than optimizer.row_exponent; for a "
            "constant row_exponent, leave row_exponent_start and anneal out"
        )


def _wrong_in_length(config: "Config") -> Iterator[str]:
    training, total = config.training, config.total_steps
    if training.micro_batch_size and training.batch_size % training.micro_batch_size:
        yield (
            f"training.micro_batch_size = {training.micro_batch_size}: expected a number that divides "
            f"training.batch_size = {training.batch_size}"
        )
    if total == 0:
        yield (
            f"training.tokens = {training.tokens}: expected at least {config.tokens_per_step}, the tokens of one step "
            f"(training.batch_size = {training.batch_size}, model.context = {config.model.context})"
        )
        return
    if config.warmup_steps >= total:
        yield (
            f"schedule.warmup = {toml_value(config.schedule.warmup)}: expected fewer steps than the run's {total} "
            f"(training.tokens = {training.tokens})"
        )
    elif config.warmup_steps + config.decay_steps > total:
        yield (
            f"schedule.decay = {toml_value(config.schedule.decay)}: expected at most the "
            f"{counted(total - config.warmup_steps, 'step')} that the warm-up leaves of {total:,}"
        )
    if config.optimizer.anneal is not None and not 0 < config.anneal_steps <= total:
        yield (
            f"optimizer.anneal = {toml_value(config.optimizer.anneal)}: expected from 1 to the run's "
            f"{counted(total, 'step')} (training.tokens = {training.tokens})"
        )
    if config.checkpoints.milestones > total:
        most = counted(total, "step")
        yield f"checkpoints.milestones = {config.checkpoints.milestones}: expected at most the run's {most}"


def _without_effect(config: "Config") -> Iterator[str]:
    """Yield one error line per setting without effect: it is more often a mistake than intended."""
    embeddings, kind = config.optimizer.embeddings, config.schedule.kind
    if config.optimizer.couple != "output" and embeddings == "adamw" and not config.optimizer.centre:
        yield (
            f"optimizer.couple = {toml_value(config.optimizer.couple)} has no effect with optimizer.embeddings = "
            '"adamw"; leave it out, or set optimizer.embeddings = "coupled" or "sgd", or optimizer.centre = true'
        )
    if config.optimizer.matrices == "adamw":
        for key, value in changed_keys(config.optimizer.muon).items():
            yield (
                f'optimizer.muon.{key} = {toml_value(value)} has no effect with optimizer.matrices = "adamw"; leave it '
                'out, or set optimizer.matrices = "muon"'
            )
    for section, key, choice, chosen, needed in (
        ("optimizer", "scale_exponent", "embeddings", embeddings, ("coupled",)),
        ("optimizer", "row_exponent", "embeddings", embeddings, ("coupled",)),
        ("optimizer", "column_exponent", "embeddings", embeddings, ("coupled",)),
        ("optimizer", "mean_free", "embeddings", embeddings, ("coupled",)),
        ("optimizer", "row_exponent_start", "embeddings", embeddings, ("coupled",)),
        ("optimizer", "anneal", "embeddings", embeddings, ("coupled",)),
        ("optimizer", "state_dtype", "embeddings", embeddings, ("coupled",)),
        ("optimizer", "sgd_factor", "embeddings", embeddings, ("sgd",)),
        ("optimizer", "sgd_momentum", "embeddings", embeddings, ("sgd",)),
        ("schedule", "final_fraction", "kind", kind, ("cosine", "wsd")),
        ("schedule", "decay", "kind", kind, ("wsd",)),
    ):
        values = getattr(config, section)
        value, default = getattr(values, key), type(values).model_fields[key].default
        if value != default and chosen not in needed:
            yield (
                f"{section}.{key} = {toml_value(value)} has no effect with {section}.{choice} = {toml_value(chosen)}; "
                f"leave it out, or set {section}.{choice} = {' or '.join(map(toml_value, needed))}"
            )


def wrong_between_keys_of_study(study: "Study") -> Iterator[str]:
    """Yield one error line per conflict between keys of a study."""
    if not study.optimizers:
        yield '[[optimizers]] is missing: expected at least one, such as [[optimizers]] with embeddings = "coupled"'
    for key, entries in (
        ("seeds", list(map(str, study.seeds))),
        ("tokens", list(map(str, study.tokens or []))),
        ("[[models]] name", [model.name for model in study.models]),
    ):
        twice = sorted({entry for entry in entries if entries.count(entry) > 1})
        if twice:
            yield f"{key}: {', '.join(twice)} is listed twice; list each once"
    for optimizer in study.optimizers:
        given = {*optimizer.set, *(study.candidates_of(optimizer) or ("",))[:1]}
        if optimizer.embeddings == "sgd" and not optimizer.sgd_factor and "optimizer.sgd_factor" not in given:
            yield '[[optimizers]] with embeddings = "sgd": sgd_factor is missing; the paper searches 100 to 600'
    yield from _wrong_in_selection(study)


def _wrong_in_selection(study: "Study") -> Iterator[str]:
    """Yield one error line per problem that makes a selection unfair or impossible."""
    select = study.select
    entries = [("select.values", select.values)]
    entries += [("[[optimizers]] select", optimizer.select) for optimizer in study.optimizers if optimizer.select]
    entries = [(place, values) for place, values in entries if values]
    if not entries:
        return
    if any(study.candidates_of(optimizer) is None for optimizer in study.optimizers):
        yield (
            "select.values is missing: some [[optimizers]] have their own select and others have none; give every "
            "optimizer the same number of values, or set select.values for all"
        )
    if select.trial_seed in study.seeds:
        yield (
            f"select.trial_seed = {select.trial_seed}: expected a seed that is not among seeds = "
            f"{toml_value(study.seeds)}; reusing the seed that selects a value would favour that value"
        )
    if len({len(numbers) for _, values in entries for numbers in values.values()}) > 1:
        yield "select: expected the same number of values for every optimizer, so that all have equally many trials"
    for place, values in entries:
        yield from _wrong_in_candidates(study, place, values)


# Not settings of a method, or their validation losses cannot be compared.
NOT_SELECTED = ("name", "seed", "training.tokens", "log.val_batches")


def _wrong_in_candidates(study: "Study", place: str, values: "Mapping[str, Sequence[float]]") -> Iterator[str]:
    if len(values) > 1:
        yield f"{place} = {toml_value(dict(values))}: expected one setting; give each its own study"
    for key, numbers in values.items():
        written = f"{place}: {key} = {toml_value(list(numbers))}"
        if len(numbers) < 2:
            yield f"{written}: expected at least two values to select from; put a single value in set"
        elif any(a >= b for a, b in itertools.pairwise(numbers)):
            yield f"{written}: expected ascending values, each once"
        elif study.select.extend and numbers[0] <= 0:
            yield f"{written}: expected values above 0, since select.extend needs their ratio; or set select.extend = 0"
        if key in NOT_SELECTED or key.startswith("data."):
            yield f"{place}: {key} cannot be selected: validation losses of its values cannot be compared"
        fixed = [("override", study.override)]
        fixed += [
            ("[[optimizers]] set", each.set) for each in study.optimizers if key in (study.candidates_of(each) or ())
        ]
        for where, settings in fixed:
            if key in settings:
                yield f"{where}: {key} = {toml_value(settings[key])} is also selected by {place}; leave out one of them"
