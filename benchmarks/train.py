"""Tokens per second, memory and where the time goes of a training step, ours and a plain loop's, in one run.

    python benchmarks/train.py                          GPT-2 125M on CUDA, a tiny model on the CPU
    python benchmarks/train.py --preset gpt2-355m --batch 32
    python benchmarks/train.py --layers 6 --width 384 --heads 6 --batch 16
    python benchmarks/train.py --peers ours --profile 0 --json OUT.json
    python benchmarks/train.py --peers ours muon torch-muon             the blocks' matrices by AdamW and by Muon
    python benchmarks/train.py --peers ours --residual-dtype float32 bfloat16 --combo-kernels off on

The plain loop is what one would write with torch alone: torch.compile, bf16 autocast, F.cross_entropy of all logits,
clip_grad_norm_, fused AdamW. Ours is the step that `coupled-adam train` takes, with the coupled optimizer; "muon" is
the same with Muon for the matrices of the blocks, "torch-muon" the plain loop with torch.optim.Muon for them. Model,
start, tokens and precision are the same. Tokens are on the device already, drawn by Zipf's law; reading them from disk
is not measured. The time is that of many steps in a row, between two waits for the device; the median of the rounds is
shown. Memory is the peak of all tensors, warm-up and compilation included.

On a GPU, watts and SM clock are means over the timed steps, read by nvidia-smi in its own process. If the timed steps
take less than three seconds, further untimed steps fill them up. With several values of --residual-dtype or
--combo-kernels, each of our peers is measured with each.
"""

import argparse
import functools
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import date
from typing import Any, Literal

import torch
import torch._inductor.config
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from coupled_adam.base.cpu import limit_instructions
from coupled_adam.config.run_config import load_config
from coupled_adam.config.run_sections import OptimizerSection
from coupled_adam.models.model_config import RESIDUAL_DTYPES, ModelConfig, flops_per_token, parameter_count
from coupled_adam.optimizer import param_groups
from coupled_adam.study.energy import visible_gpus
from coupled_adam.training import devices
from coupled_adam.training.optimizers import build_optimizers
from coupled_adam.training.parallel import Ranks, build
from coupled_adam.training.train_step import TrainStep
from gpu_load import SHORTEST_SECONDS, GpuLoad, LoadMeter
from kernel_shares import where_time_goes
from plain_gpt2 import PlainGPT2
from step import commit, hardware

Batch = tuple[Tensor, Tensor]
Step = Callable[[Batch, float], Tensor]
LR, WARM_UP_STEPS = 6e-4, 100


@dataclass
class Workload:
    """What is trained: a model and the shape of its batches."""

    model: ModelConfig
    batch_size: int
    micro_batch_size: int
    device: torch.device
    bf16: bool
    compile: bool
    cuda_graphs: bool
    combo_kernels: bool = False
    """Let Inductor put independent pointwise operations into one kernel; ours only."""

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.model.context

    def batches(self, count: int) -> list[Batch]:
        """Tokens (B, T) and the tokens after them, the id's frequency falling with 1 / (id + 3)."""
        V, T = self.model.vocabulary_size, self.model.context
        generator = torch.Generator().manual_seed(0)
        frequency = 1 / (torch.arange(V) + 3.0)
        windows = torch.multinomial(frequency, count * self.batch_size * (T + 1), replacement=True, generator=generator)
        windows = windows.view(count, self.batch_size, T + 1).to(self.device)
        return [(window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in windows]

    def precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else nullcontext()


@dataclass
class Measurement:
    """One peer on one workload."""

    peer: str
    milliseconds: float
    tokens_per_second: float
    mfu: float | None
    peak_gigabytes: float
    reserved_gigabytes: float | None
    first_losses: list[float]
    shares: dict[str, float]
    """Part of the time by kind of kernel, idle included."""
    load: GpuLoad | None = None
    """Mean power and clock of the GPU over the timed steps."""


def plain_step(workload: Workload, with_muon: bool = False) -> Step:
    _, model = build(workload.model, 1, Ranks(0, 1, workload.device, "none"), bf16=workload.bf16, compile=False)
    module = PlainGPT2(model)
    if workload.compile:
        module.compile(dynamic=False)
    groups = list(param_groups(model, weight_decay=0.1, couple="none"))
    optimizers: list[torch.optim.Optimizer] = []
    if with_muon:
        [decayed] = [group for group in groups if group["name"] == "decay"]
        groups.remove(decayed)
        optimizers.append(torch.optim.Muon([decayed], weight_decay=0.1, adjust_lr_fn="match_rms_adamw"))
    optimizers.append(torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True))
    shares = workload.batch_size // workload.micro_batch_size

    def step(batch: Batch, lr: float) -> Tensor:
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = lr
        total = torch.zeros((), device=workload.device)
        for tokens, targets in zip(*(part.split(workload.micro_batch_size) for part in batch), strict=True):
            with workload.precision():
                loss = module(tokens, targets) / shares
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return total

    return step


def our_step(workload: Workload, matrices: Literal["adamw", "muon"] = "adamw") -> Step:
    ranks = Ranks(0, 1, workload.device, "none")
    options = {"combo_kernels": True} if workload.combo_kernels else None
    module, model = build(
        workload.model, 1, ranks, bf16=workload.bf16, compile=workload.compile, inductor_options=options
    )
    optimizers = build_optimizers(model, OptimizerSection(lr=LR, matrices=matrices), capturable=workload.cuda_graphs)
    train_step = TrainStep(module, optimizers, precision=workload.precision, cuda_graphs=workload.cuda_graphs)

    def step(batch: Batch, lr: float) -> Tensor:
        parts = zip(*(part.split(workload.micro_batch_size) for part in batch), strict=True)
        return train_step(list(parts), lr)[0]

    return step


PEERS: dict[str, Callable[[Workload], Step]] = {
    "plain": plain_step,
    "ours": our_step,
    "muon": functools.partial(our_step, matrices="muon"),
    "torch-muon": functools.partial(plain_step, with_muon=True),
}
COMPARED_BY_DEFAULT = ["plain", "ours"]
OURS = ("ours", "muon")


def variants(arguments: argparse.Namespace, workload: Workload) -> Iterator[tuple[str, str, Workload]]:
    """Name, peer and workload of every measurement; the settings are those of our peers only."""
    settings = list(itertools.product(arguments.residual_dtype, arguments.combo_kernels))
    for peer in arguments.peers:
        if peer not in OURS:
            yield peer, peer, workload
            continue
        for dtype, combo in settings:
            name = peer + ("-bf16-residual" if dtype == "bfloat16" else "") + ("-combo" if combo == "on" else "")
            model = replace(workload.model, residual_dtype=dtype)
            yield name, peer, replace(workload, model=model, combo_kernels=combo == "on")


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class Run:
    """A peer's steps in a row, through the same batches again and again, with a linear warm-up."""

    def __init__(self, step: Step, workload: Workload) -> None:
        self.step, self.device = step, workload.device
        self.batches = workload.batches(8)
        self.steps = 0

    def take(self, steps: int) -> list[Tensor]:
        """The losses of further steps, on the device."""
        losses = []
        for _ in range(steps):
            lr = LR * min(1.0, (self.steps + 1) / WARM_UP_STEPS)
            losses.append(self.step(self.batches[self.steps % len(self.batches)], lr))
            self.steps += 1
        return losses

    def seconds(self, steps: int) -> float:
        """Seconds of each of further steps."""
        synchronise(self.device)
        begin = time.perf_counter()
        self.take(steps)
        synchronise(self.device)
        return (time.perf_counter() - begin) / steps


def timed(run: Run, steps: int, rounds: int, meter: LoadMeter) -> tuple[float, GpuLoad | None]:
    """The median seconds of a step, and the GPU's load over the timed steps, or over enough of the same kind."""
    begin = time.monotonic()
    seconds = statistics.median(run.seconds(steps) for _ in range(rounds))
    while meter.readings and time.monotonic() - begin < SHORTEST_SECONDS:
        run.seconds(steps)
    return seconds, meter.mean(begin, time.monotonic())


def measure(name: str, peer: str, workload: Workload, steps: int, rounds: int, profiled_steps: int) -> Measurement:
    """Build a peer, warm it up, time it, look where its time goes, and take it down."""
    device = workload.device
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    with LoadMeter(visible_gpus()[:1] if is_cuda else []) as meter:
        run = Run(PEERS[peer](workload), workload)
        losses = [loss.item() for loss in run.take(5)]  # compiles, and shows that it learns
        seconds, load = timed(run, steps, rounds, meter)
    shares = where_time_goes(run.seconds, profiled_steps, seconds, device) if profiled_steps else {}
    peak_flops = devices.peak_flops(device)
    rate = workload.tokens_per_step / seconds
    measurement = Measurement(
        peer=name,
        milliseconds=1e3 * seconds,
        tokens_per_second=rate,
        mfu=None if peak_flops is None else rate * flops_per_token(workload.model) / peak_flops,
        peak_gigabytes=devices.peak_memory(device) / 1e9,
        reserved_gigabytes=torch.cuda.max_memory_reserved() / 1e9 if is_cuda else None,
        first_losses=losses,
        shares=shares,
        load=load,
    )
    del run
    torch.compiler.reset()
    gc.collect()
    if is_cuda:
        torch.cuda.empty_cache()
    return measurement


def show(measurements: list[Measurement], workload: Workload, console: Console) -> None:
    model = workload.model
    table = Table(
        title=f"{model.architecture}, {parameter_count(model) / 1e6:,.1f}M parameters, {model.layers} layers, "
        f"{model.width} wide, V {model.vocabulary_size}, batch {workload.batch_size} x {model.context}"
    )
    compared = [peer for peer in COMPARED_BY_DEFAULT if any(m.peer == peer for m in measurements)]
    ratios = [f"x {peer}" for peer in compared]
    for column in (
        "step", "ms", "tokens/s", *ratios, "W", "SM MHz", "MFU %", "peak GB", "reserved GB", "loss after 5 steps",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column == "step" else "right")
    milliseconds = {m.peer: m.milliseconds for m in measurements}
    for m in measurements:
        table.add_row(
            m.peer,
            f"{m.milliseconds:.2f}",
            f"{m.tokens_per_second:,.0f}",
            *(f"{milliseconds[peer] / m.milliseconds:.2f}" for peer in compared),
            "-" if m.load is None or m.load.watts is None else f"{m.load.watts:.0f}",
            "-" if m.load is None or m.load.sm_megahertz is None else f"{m.load.sm_megahertz:.0f}",
            "-" if m.mfu is None else f"{100 * m.mfu:.1f}",
            f"{m.peak_gigabytes:.2f}",
            "-" if m.reserved_gigabytes is None else f"{m.reserved_gigabytes:.2f}",
            f"{m.first_losses[-1]:.4f}",
        )
    console.print(table)
    if not any(m.shares for m in measurements):
        return
    shares = Table(title="where the time goes, ms per step")
    shares.add_column("kind")
    for m in measurements:
        shares.add_column(m.peer, justify="right")
    for kind in next(m.shares for m in measurements if m.shares):
        shares.add_row(kind, *(f"{m.shares[kind] * m.milliseconds:.2f}" if m.shares else "-" for m in measurements))
    console.print(shares)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument(
        "--preset", help="as in `coupled-adam train --list`; default: gpt2-125m on CUDA, tiny on the CPU"
    )
    for name in ("layers", "heads", "width", "context", "vocabulary-size"):
        parser.add_argument(f"--{name}", type=int, help="instead of the preset's")
    parser.add_argument("--batch", type=int, help="samples per step, instead of the preset's")
    parser.add_argument("--micro-batch", type=int, help="samples per forward pass; default: all of them")
    parser.add_argument("--steps", type=int, help="in a row per round (default: 20 on CUDA, 5 on the CPU)")
    parser.add_argument("--rounds", type=int, default=3)
    # Enough steps that the GPU is as warm, and its clock as low, as in training.
    parser.add_argument("--profile", type=int, default=10, metavar="STEPS", help="0: do not look where the time goes")
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=COMPARED_BY_DEFAULT)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: on CUDA")
    parser.add_argument("--cuda-graphs", action=argparse.BooleanOptionalAction, help="ours only; default: on CUDA")
    parser.add_argument("--residual-dtype", nargs="+", choices=RESIDUAL_DTYPES, default=["float32"], help="ours only")
    parser.add_argument(
        "--combo-kernels", nargs="+", choices=["off", "on"], default=["off"], help="Inductor's, experimental; ours only"
    )
    parser.add_argument("--json", metavar="FILE", help="write the measurements there as well")
    parser.add_argument("--commit", default=commit(), help="what is measured, where git cannot tell")
    return parser.parse_args()


def workload_of(arguments: argparse.Namespace, device: torch.device) -> Workload:
    is_cuda = device.type == "cuda"
    names = ("layers", "heads", "width", "context", "vocabulary_size")
    given = {f"model.{name}": getattr(arguments, name) for name in names}
    given["training.batch_size"] = arguments.batch
    changes = [f"{key}={value}" for key, value in given.items() if value is not None]
    config = load_config(arguments.preset or ("gpt2-125m" if is_cuda else "tiny"), changes)
    batch_size = config.training.batch_size
    return Workload(
        model=config.to_model_config(),
        batch_size=batch_size,
        micro_batch_size=arguments.micro_batch or batch_size,
        device=device,
        bf16=is_cuda,
        compile=is_cuda if arguments.compile is None else arguments.compile,
        cuda_graphs=is_cuda if arguments.cuda_graphs is None else arguments.cuda_graphs,
    )


def require_effect(arguments: argparse.Namespace, workload: Workload) -> None:
    """Refuse settings that would not be measured."""
    if "bfloat16" in arguments.residual_dtype and not workload.bf16:
        raise SystemExit("--residual-dtype bfloat16 needs bf16 autocast, which is used on CUDA only; leave it out")
    if "on" in arguments.combo_kernels and not workload.compile:
        raise SystemExit("--combo-kernels on needs compilation; add --compile")
    if "on" in arguments.combo_kernels and not hasattr(torch._inductor.config, "combo_kernels"):
        raise SystemExit(f"torch {torch.__version__} has no combo kernels; leave out --combo-kernels on")


def main() -> None:
    arguments = parse()
    limit_instructions()
    device = devices.pick_device(arguments.device)
    devices.prepare_device(device, deterministic=False, threads=None)
    workload = workload_of(arguments, device)
    console = Console(width=140)
    console.print(f"{hardware(device.type)}, torch {torch.__version__}, {date.today()}, commit {arguments.commit}")
    steps = arguments.steps or (20 if device.type == "cuda" else 5)
    require_effect(arguments, workload)
    measurements = [
        measure(name, peer, variant, steps, arguments.rounds, arguments.profile)
        for name, peer, variant in variants(arguments, workload)
    ]
    show(measurements, workload, console)
    if arguments.json:
        report = {
            "hardware": hardware(device.type),
            "torch": torch.__version__,
            "date": str(date.today()),
            "commit": arguments.commit,
            "model": asdict(workload.model),
            "batch_size": workload.batch_size,
            "micro_batch_size": workload.micro_batch_size,
            "measurements": [asdict(m) for m in measurements],
        }
        with open(arguments.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
