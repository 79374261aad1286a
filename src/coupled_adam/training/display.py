"""Training progress: one live line on a terminal, plain lines elsewhere.

The parts of the live line are fitted in order of importance, so a narrow terminal still shows the progress, the loss
and the remaining time. The training itself redraws the line, at most a few times per second; there is no thread. If
the output cannot be written (a closed pipe, a full disk), the display stops and the training continues.
"""

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from coupled_adam.base.text import duration, percent, short, significant, size_text
from coupled_adam.metrics import METRICS

SECONDS_BETWEEN_DRAWINGS = 0.25
# Plain lines often go to files, which a run of days should not fill: wait 1% of the elapsed time, within these bounds.
SECONDS_BETWEEN_LINES = (5.0, 60.0)
SEPARATION = "  "
BAR = "bar"
NARROWEST_BAR, WIDEST_BAR = 6, 40
# Most important first.
IMPORTANCE = (
    "step",
    "loss",
    "seconds_left",
    "tokens_per_second",
    "mu_norm_ratio",
    BAR,
    "lr",
    "grad_norm",
    "mfu",
    "memory_bytes",
)
# From left to right: the usual width of each value, so that the line does not jump, and its format.
FORMATS: dict[str, tuple[int, Callable[[float], str]]] = {
    "loss": (10, lambda loss: f"{METRICS['train_loss'].short} {METRICS['train_loss'].text(loss)}"),
    "lr": (10, lambda lr: f"{METRICS['lr'].short} {significant(lr, 2)}"),
    "grad_norm": (10, lambda norm: f"{METRICS['grad_norm'].short} {significant(norm, 3)}"),
    "mu_norm_ratio": (16, lambda ratio: f"{METRICS['mu_norm_ratio'].short} {METRICS['mu_norm_ratio'].text(ratio)}"),
    "tokens_per_second": (10, lambda rate: f"{short(rate)} {METRICS['tokens_per_second'].short}"),
    "mfu": (7, lambda mfu: f"{METRICS['mfu'].short} {percent(mfu)}"),
    "memory_bytes": (7, lambda size: size_text(int(size))),
    "seconds_left": (15, lambda seconds: f"{duration(seconds)} left"),
}


class Part(NamedTuple):
    """A part of the line."""

    name: str
    text: str


def parts_of(step: int, total_steps: int, values: Mapping[str, float]) -> list[Part]:
    """All parts of the line, from left to right."""
    done = 100 * step // total_steps  # rounded down, so that 100% means finished
    parts = [
        Part("step", f"{step:>{len(f'{total_steps:,}')},}/{total_steps:,} {done:>3}%"),
        Part(BAR, " " * NARROWEST_BAR),
    ]
    shown = {name: (width, show(values[name])) for name, (width, show) in FORMATS.items() if name in values}
    parts += [Part(name, text.ljust(width)) for name, (width, text) in shown.items()]
    return parts if shown else [*parts, Part("loss", "waiting for the first loss")]


def fitting(parts: list[Part], width: int) -> list[Part]:
    """The most important parts that fit into `width` columns, in order, with at least one part."""
    room = width + len(SEPARATION)
    chosen: set[str] = set()
    for part in sorted(parts, key=lambda part: IMPORTANCE.index(part.name)):
        needed = len(part.text) + len(SEPARATION)
        if needed <= room or not chosen:
            chosen.add(part.name)
            room -= needed
    return [part for part in parts if part.name in chosen]


class LiveLine:
    """The line as a rich renderable, as wide as the terminal at the moment of drawing."""

    def __init__(self, step: int, total_steps: int) -> None:
        self.step = step
        self.total_steps = total_steps
        self.values: dict[str, float] = {}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts = fitting(parts_of(self.step, self.total_steps, self.values), options.max_width)
        left_over = options.max_width - len(SEPARATION.join(part.text for part in parts))
        bar_width = min(NARROWEST_BAR + left_over, WIDEST_BAR)
        for position, part in enumerate(parts):
            if position > 0:
                yield Segment(SEPARATION)
            if part.name == BAR:
                # Different characters, because the terminal may have no colours.
                done, still_to_do = "#." if options.ascii_only else "━─"
                filled = bar_width * self.step // self.total_steps
                yield Segment(done * filled, console.get_style("bar.complete"))
                yield Segment(still_to_do * (bar_width - filled), console.get_style("bar.back"))
            else:
                yield Segment(part.text)
        yield Segment.line()


class TrainingDisplay:
    """Context manager that displays the progress of a training.

    Args:
        console: the output; a live line on a terminal, plain lines elsewhere.
        total_steps: number of steps in the run.
        start_step: number of steps finished before.
        shown: whether to show anything; False on all ranks but the first.
        clock: monotonic clock in seconds.

    Example:
        >>> with TrainingDisplay(Console(), total_steps=300) as display:
        ...     display.update(150, {"loss": 4.2134, "lr": 6e-4, "tokens_per_second": 541_234, "seconds_left": 3780})
        ...     display.message("checkpoint saved")
        step 150/300  50%  loss 4.213  lr 0.0006  541k tok/s  1 h 3 min left
        checkpoint saved
    """

    def __init__(
        self,
        console: Console,
        total_steps: int,
        start_step: int = 0,
        *,
        shown: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._shown = shown
        self._clock = clock
        self._line = LiveLine(start_step, total_steps)
        # console.is_terminal is not enough: FORCE_COLOR makes it true for files as well.
        is_live = shown and console.is_interactive and console.file.isatty()
        self._live = Live(self._line, console=console, auto_refresh=False) if is_live else None
        self._started = clock()
        self._last_shown: float | None = None  # time of the last drawn or printed line
        self._step_shown = start_step

    def __enter__(self) -> Self:
        if self._live is not None:
            self._guarded(self._live.start, True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._shown = True  # rich must restore standard output even after the display has stopped
            self._guarded(self._live.stop)
        elif self._line.values and self._line.step != self._step_shown:
            self._guarded(self._show)

    def update(self, step: int, values: Mapping[str, float | int | str | None] | None = None) -> None:
        """Report that `step` steps are finished; cheap enough to call after every step.

        Args:
            step: number of finished steps.
            values: numbers by their names in metrics.jsonl (see `FORMATS`); other names are ignored, and missing ones
                keep their last value. Plain lines are printed only if there are new values.
        """
        self._line.step = step
        if values is not None:
            known = {key: value for key, value in values.items() if key in FORMATS}
            self._line.values |= {key: value for key, value in known.items() if isinstance(value, (int, float))}
        if self._live is None and (values is None or "loss" not in self._line.values):
            return
        if self._last_shown is None or self._clock() - self._last_shown >= self._seconds_between():
            self._guarded(self._show)

    def message(self, text: str) -> None:
        """Print a message, above the live line if there is one."""
        self._guarded(lambda: self._console.print(Text(text), soft_wrap=True))

    def _seconds_between(self) -> float:
        if self._live is not None:
            return SECONDS_BETWEEN_DRAWINGS
        shortest, longest = SECONDS_BETWEEN_LINES
        return min(max((self._clock() - self._started) / 100, shortest), longest)

    def _show(self) -> None:
        self._last_shown = self._clock()
        self._step_shown = self._line.step
        if self._live is not None:
            self._live.refresh()
            return
        parts = parts_of(self._line.step, self._line.total_steps, self._line.values)
        text = SEPARATION.join(part.text.strip() for part in parts if part.name != BAR)
        self._console.print(Text(f"step {text}"), soft_wrap=True)

    def _guarded(self, show: Callable[..., None], *arguments: object) -> None:
        if not self._shown:
            return
        try:
            show(*arguments)
        except OSError:
            self._shown = False
        except SystemExit:
            if not self._console.quiet:  # on a closed pipe, rich sets quiet and exits; ignore only that
                raise
            self._shown = False
