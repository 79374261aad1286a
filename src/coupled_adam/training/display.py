"""What a training shows while it runs: one live line on a terminal, plain lines where there is none.

The parts of the live line find room in the order of their importance, so that a narrow terminal still shows how far
the training is, its loss and the time left. It is drawn a few times a second however fast the steps are, by the
training itself and not by a thread. A display that can no longer be written to (a closed pipe, a full disk) falls
silent, and the training goes on.
"""

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from coupled_adam.base.text import duration, learning_rate, si
from coupled_adam.metrics import METRICS

SECONDS_BETWEEN_DRAWINGS = 0.25
# Plain lines go to files: a run of days should not fill them. One percent of the time so far, within these bounds.
SECONDS_BETWEEN_LINES = (5.0, 60.0)
SEPARATION = "  "
BAR = "bar"
NARROWEST_BAR, WIDEST_BAR = 6, 40
# Who finds room first.
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
# From left to right: how wide each value usually is, so that nothing moves when one loses a digit, and what is shown.
FORMATS: dict[str, tuple[int, Callable[[float], str]]] = {
    "loss": (10, lambda loss: f"{METRICS['train_loss'].short} {loss:.3f}"),
    "lr": (9, lambda lr: f"{METRICS['lr'].short} {learning_rate(lr)}"),
    "grad_norm": (10, lambda norm: f"{METRICS['grad_norm'].short} {norm:.3g}"),
    "mu_norm_ratio": (14, lambda ratio: f"{METRICS['mu_norm_ratio'].short} {ratio:.3f}"),
    "tokens_per_second": (10, lambda rate: f"{si(rate)} {METRICS['tokens_per_second'].short}"),
    "mfu": (7, lambda mfu: f"{METRICS['mfu'].short} {100 * mfu:.0f}%"),
    "memory_bytes": (6, lambda size: f"{si(size)}B"),
    "seconds_left": (11, lambda seconds: f"{duration(seconds)} left"),
}


class Part(NamedTuple):
    """A piece of the line."""

    name: str
    text: str


def parts_of(step: int, total_steps: int, values: Mapping[str, float]) -> list[Part]:
    """All that there is to show, from left to right."""
    percent = 100 * step // total_steps  # rounded down: 100% is the end
    parts = [
        Part("step", f"{step:>{len(str(total_steps))}}/{total_steps} {percent:>3}%"),
        Part(BAR, " " * NARROWEST_BAR),
    ]
    shown = {name: (width, show(values[name])) for name, (width, show) in FORMATS.items() if name in values}
    parts += [Part(name, text.ljust(width)) for name, (width, text) in shown.items()]
    return parts if shown else [*parts, Part("loss", "waiting for the first loss")]


def fitting(parts: list[Part], width: int) -> list[Part]:
    """The most important parts that fit side by side into `width` columns, in their order; the first one always."""
    room = width + len(SEPARATION)
    chosen: set[str] = set()
    for part in sorted(parts, key=lambda part: IMPORTANCE.index(part.name)):
        needed = len(part.text) + len(SEPARATION)
        if needed <= room or not chosen:
            chosen.add(part.name)
            room -= needed
    return [part for part in parts if part.name in chosen]


class LiveLine:
    """The line as rich draws it, as wide as the terminal is at that moment."""

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
                # Two kinds of strokes, for there may be no colours.
                done, still_to_do = "#." if options.ascii_only else "━─"
                filled = bar_width * self.step // self.total_steps
                yield Segment(done * filled, console.get_style("bar.complete"))
                yield Segment(still_to_do * (bar_width - filled), console.get_style("bar.back"))
            else:
                yield Segment(part.text)
        yield Segment.line()


class TrainingDisplay:
    """The display of one training, as a context manager.

    Args:
        console: where to show; a live line on a terminal, plain lines elsewhere.
        total_steps: when the training is complete.
        start_step: steps that were finished before.
        shown: False on all ranks but the first: then nothing is shown.
        clock: seconds that only increase.

    Example:
        >>> with TrainingDisplay(Console(), total_steps=300) as display:
        ...     display.update(150, {"loss": 4.2134, "lr": 6e-4, "tokens_per_second": 541_234, "seconds_left": 3780})
        ...     display.message("checkpoint saved")
        step 150/300  50%  loss 4.213  lr 6.0e-4  541k tok/s  1h 03m left
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
        # Not console.is_terminal alone: FORCE_COLOR makes that true for files as well.
        is_live = shown and console.is_interactive and console.file.isatty()
        self._live = Live(self._line, console=console, auto_refresh=False) if is_live else None
        self._started = clock()
        self._last_shown: float | None = None  # when the line was drawn or printed last
        self._step_shown = start_step

    def __enter__(self) -> Self:
        if self._live is not None:
            self._guarded(self._live.start, True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._shown = True  # also where it has fallen silent, standard output must be given back
            self._guarded(self._live.stop)
        elif self._line.values and self._line.step != self._step_shown:
            self._guarded(self._show)

    def update(self, step: int, values: Mapping[str, float | int | str | None] | None = None) -> None:
        """Say that `step` steps are finished; cheap enough to be called after each.

        Args:
            step: finished steps.
            values: numbers by the names that they have in metrics.jsonl (`FORMATS`); other names are ignored, and those
                that are not given keep their last value. A plain line is printed only when there are new values.
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
        """Print a sentence, above the live line where there is one."""
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
            if not self._console.quiet:  # not what rich does when a pipe is closed: it goes quiet and ends the program
                raise
            self._shown = False
