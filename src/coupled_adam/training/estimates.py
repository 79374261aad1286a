"""Estimate a run's parameters, steps, memory and time from its config, without torch.

Weights, gradients and optimizer state are exact. Activations and time are estimates: activations are what the blocks
keep for the backward pass, without the compiler's changes; the time is the model's operations divided by the share of
the device's peak that such models reach in measurements.

Letters: V vocabulary rows, H width, L layers, M width of the MLP, N parameters.
"""

import textwrap
from dataclasses import dataclass

from rich import box
from rich.table import Table

from coupled_adam.base.text import counted, duration, percent, short, size_text
from coupled_adam.config.builtin_files import PRESETS
from coupled_adam.config.run_config import Config, load_config
from coupled_adam.config.run_sections import TableSection
from coupled_adam.models.model_config import flops_per_token, matrices_of_a_block, parameter_count

GB = 10**9
DAY = 86400
# The head computes its logits in chunks of at most this many bytes (CUDA).
LOGITS_BYTES = 2**30
# Rounds of Muon's iteration, as in coupled_adam.optimizer.newton_schulz, which would load torch.
NEWTON_SCHULZ_STEPS = 5


@dataclass(frozen=True)
class Machine:
    """A device for which to estimate the time of a run."""

    name: str
    flops: float
    """Expected operations per second in training: the peak times the utilisation."""
    seconds_per_step: float = 0.0
    """Minimum time of a step, however small the model."""


# GPT-2 models with at least 6 layers and width 384 were measured at 40 to 50% of the peak of both, 989 TFLOP/s (bf16).
UTILISATION = 0.45
H200 = Machine("H100 or H200", UTILISATION * 989e12, seconds_per_step=2e-3)


def gpu(name: str, peak_flops: float) -> Machine:
    """A GPU with this peak (bf16, dense)."""
    return Machine(name, UTILISATION * peak_flops, H200.seconds_per_step)


def cpu(cores: int) -> Machine:
    """CPU cores, at the rate of the preset `tiny` in float32; actual CPUs differ by several times."""
    return Machine(counted(cores, "CPU core"), 30e9 * cores)


def this_machine() -> Machine | None:
    """This machine's device: a GPU with a known peak, or the CPU; None for other GPUs. Imports torch."""
    import torch

    from coupled_adam.training.devices import device_name, peak_flops, pick_device

    device = pick_device("auto")
    if device.type == "cpu":
        return cpu(torch.get_num_threads())
    peak = peak_flops(device)
    return None if peak is None else gpu(device_name(device), peak)


@dataclass(frozen=True)
class Memory:
    """Memory of a run in bytes, with everything on one device."""

    weights: int
    """float32, and for bf16 the copies that autocast keeps for the backward pass."""
    gradients: int
    optimizer: int
    activations: int
    """What the blocks keep of one micro-batch for the backward pass."""
    head: int
    """Logits of a chunk, and the gradients of the output table and of its input."""

    @property
    def total(self) -> int:
        """The sum of all parts, slightly more than the true peak."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.head


def memory(config: Config) -> Memory:
    """Estimate the memory of a run on one device; precision "auto" counts as bf16.

    Example:
        >>> round(memory(load_config("gpt2-125m")).total / GB)
        37
    """
    model = config.to_model_config()
    N, table = parameter_count(model), model.vocabulary_size * model.width
    samples = config.micro_batch_size(ranks=1)
    number = 4 if config.training.precision == "float32" else 2  # bytes per number in matrix products
    tokens = samples * model.context
    logits = min(tokens * model.vocabulary_size * number, LOGITS_BYTES)
    fixed = model.vocabulary_size if model.output_bias == "unigram" else 0
    return Memory(
        weights=4 * (N + fixed) + (2 * N if number == 2 else 0),
        gradients=4 * N,
        optimizer=optimizer_bytes(config),
        activations=tokens * activation_bytes_per_token(config, number),
        head=logits + 4 * table + tokens * number * model.width,
    )


def optimizer_bytes(config: Config) -> int:
    """Bytes of the optimizer state: two float32 moments per parameter, minus the savings for embeddings and Muon.

    A coupled table keeps one second moment for all rows, (1, H), and with a row exponent one per row, (V, 1). Its first
    moments may be in bfloat16, and with beta1 = 0 there are none. A table with SGD and a matrix with Muon have only a
    momentum.
    """
    model, section = config.to_model_config(), config.optimizer
    adamw = 8 * parameter_count(model)
    tables: list[TableSection] = []
    if section.couple in ("output", "all"):
        tables.append(section.tables)
    if section.couple in ("input", "all"):
        tables.append(section.input_table)
    of_tables = sum(8 * model.vocabulary_size * model.width - table_bytes(config, table) for table in tables)
    of_muon = 4 * sum(m * n for m, n in hidden_matrices(config)) if section.matrices == "muon" else 0
    return adamw - of_tables - of_muon


def table_bytes(config: Config, table: TableSection) -> int:
    """Bytes of the optimizer state of a table that `optimizer.embeddings` applies to."""
    section = config.optimizer
    V, H = config.to_model_config().vocabulary_size, config.model.width
    if section.embeddings == "adamw":
        return 8 * V * H
    if section.embeddings == "sgd":
        return 4 * V * H if section.sgd_momentum else 0
    number = 2 if section.state_dtype == "bfloat16" else 4
    first = number * V * H if section.betas_of(table)[0] else 0
    rows = 4 * V if section.row_exponent or section.row_exponent_start is not None else 0
    return first + rows + 4 * H


def hidden_matrices(config: Config) -> list[tuple[int, int]]:
    """Shapes of all matrices of the blocks."""
    model = config.to_model_config()
    return model.layers * matrices_of_a_block(model)


def muon_flops(config: Config) -> int:
    """Operations of Muon's orthogonalization in one step; 0 without Muon.

    For m <= n, a round of the iteration has three products: A = X X' (2 m m n), its square (2 m m m), and the result
    times X (2 m m n).

    Example:
        >>> round(muon_flops(load_config("gpt2-125m", ["optimizer.matrices=muon"])) / 1e12, 1)
        1.5
    """
    if config.optimizer.matrices != "muon":
        return 0
    shapes = [sorted(shape) for shape in hidden_matrices(config)]
    return NEWTON_SCHULZ_STEPS * sum(2 * m * m * (2 * n + m) for m, n in shapes)


def activation_bytes_per_token(config: Config, number: int) -> int:
    """Bytes per token that the blocks keep for the backward pass; `number` is 2 for bf16 and 4 for float32.

    A block keeps: the residual stream before each norm (2 H of its dtype), both norms' results (2 H), queries, keys and
    values (3 H), the attention's result (H), and for GELU its input and result (2 M), for SwiGLU the two inputs, the
    SiLU and the product (4 M). After the blocks: the last norm's input (float32) and result.
    """
    model = config.to_model_config()
    H, M = model.width, model.mlp_width
    of_mlp = 2 * M if model.architecture == "gpt2" else 4 * M
    residual = 2 if model.residual_dtype == "bfloat16" else 4
    block = 2 * H * residual + (6 * H + of_mlp) * number
    return model.layers * block + H * (4 + number)


def seconds(config: Config, machine: Machine) -> float:
    """Estimate the time of the run's steps on one device, without validation, measures and checkpoints.

    Example:
        >>> round(seconds(load_config("gpt2-125m"), H200) / 3600, 1)  # hours
        2.7
    """
    of_model = flops_per_token(config.to_model_config()) * config.tokens_per_step
    operations = (of_model + muon_flops(config)) * config.total_steps
    return max(operations / machine.flops, config.total_steps * machine.seconds_per_step)


def preset_table(here: Machine | None = None) -> Table:
    """Table of the presets with their sizes and estimates.

    Args:
        here: this machine's device, if known; it gets its own column.
    """
    machines = [H200] if here is None else [H200, here]
    table = Table(
        title="Presets",
        box=box.SIMPLE_HEAD,  # without lines between columns it fits into 80 columns
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
        caption="N: parameters. D: tokens. Estimates: memory with everything on one GPU, without sharding; time on one "
        f"device, GPUs at {percent(UTILISATION)} of their bf16 peak.",
    )
    table.add_column("preset", no_wrap=True)
    table.add_column("data", no_wrap=True)
    for heading in ("N", "D", "steps", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    for machine in machines:
        heading_lines = ["time,", *textwrap.wrap(machine.name, len("24d 08h"), break_long_words=False)]
        table.add_column("\n".join(heading_lines), justify="right", no_wrap=True)
    for name in PRESETS:
        config = load_config(name)
        table.add_row(
            name,
            config.data.source or config.data.folder,
            short(parameter_count(config.to_model_config())),
            short(config.training.tokens),
            f"{config.total_steps:,}",
            size_text(memory(config).total),
            *(_time(seconds(config, machine)) for machine in machines),
        )
    return table


def _time(seconds: float) -> str:
    return "> 1 year" if seconds > 365 * DAY else duration(seconds)
