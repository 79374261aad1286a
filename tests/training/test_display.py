"""The display of a training: on terminals of any width, in files, through closed pipes, and how often."""

import contextlib
import io
import os
import pty
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from coupled_adam.base.text import duration, setting, short, significant
from coupled_adam.metrics import METRICS
from coupled_adam.training.display import IMPORTANCE, LiveLine, TrainingDisplay, parts_of

VALUES = {
    "loss": 4.2134,
    "lr": 3.27e-4,
    "grad_norm": 0.4213,
    "mu_norm_ratio": 0.1234,
    "tokens_per_second": 541_234,
    "mfu": 0.4712,
    "memory_bytes": 36.94e9,
    "seconds_left": 3780,
}
ALL = [
    "loss 4.213",
    "lr 0.00033",
    "grad 0.421",
    "mu ratio 0.1234",
    "541k tok/s",
    "MFU 47%",
    "36.9 GB",
    "1 h 3 min left",
]


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def drawn(width: int, step: int = 16954, total_steps: int = 50862, encoding: str = "utf-8") -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
    line = LiveLine(step, total_steps)
    line.values = dict(VALUES)
    Console(file=file, width=width, no_color=True).print(line)
    file.seek(0)
    return file.read()


@pytest.mark.parametrize(
    ("width", "left_out"),
    [
        (60, ["lr 0.00033", "grad 0.421", "mu ratio 0.1234", "MFU 47%", "36.9 GB"]),
        (80, ["lr 0.00033", "grad 0.421", "MFU 47%", "36.9 GB"]),
        (120, ["36.9 GB"]),
        (130, []),
        (200, []),
    ],
)
def test_a_narrow_terminal_shows_the_most_important(width: int, left_out: list[str]) -> None:
    line = drawn(width)
    assert line.startswith("16,954/50,862  33%")
    assert [text for text in ALL if text not in line] == left_out


@pytest.mark.parametrize("total_steps", [300, 50862, 1_234_567])
def test_on_every_width_it_is_one_line_and_a_part_is_missing_only_if_it_does_not_fit(total_steps: int) -> None:
    parts = parts_of(7, total_steps, VALUES)
    for width in range(len(parts[0].text), 220):
        line = drawn(width, 7, total_steps)
        assert line.count("\n") == 1
        assert len(line) - 1 <= width, f"{width} columns"
        shown = [part for part in parts if part.text.strip() in line and part.name != "bar"]
        shown += [part for part in parts if part.name == "bar" and "─" in line]
        for missing in set(parts) - set(shown):
            ahead = [p for p in shown if IMPORTANCE.index(p.name) < IMPORTANCE.index(missing.name)]
            assert sum(len(p.text) + 2 for p in [*ahead, missing]) - 2 > width, f"{missing} on {width} columns"


def test_no_terminal_is_too_narrow_for_the_step() -> None:
    assert drawn(6).startswith("16,954")


def test_nothing_moves_when_a_value_gains_a_digit() -> None:
    line = LiveLine(1, 300)
    positions = set()
    for values in (VALUES, VALUES | {"lr": 0, "grad_norm": 1.0, "seconds_left": 2}):
        line.values = dict(values)
        file = io.StringIO()
        Console(file=file, width=150).print(line)
        positions.add((file.getvalue().index("mu ratio"), file.getvalue().index("MFU")))
    assert len(positions) == 1


def test_the_bar_shows_the_progress_of_the_training() -> None:
    for step, filled in ((0, 0), (50, 20), (99, 39), (100, 40)):
        line = drawn(200, step, 100)
        assert (line.count("━"), line.count("─")) == (filled, 40 - filled)
    assert drawn(200, 50, 100, encoding="ascii").count("#") == 20
    assert " 99%" in drawn(80, 99_999, 100_000)


def test_before_the_first_values_it_says_so() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(LiveLine(0, 300))
    assert "waiting" in console.file.getvalue()
    assert "nan" not in console.file.getvalue()


@contextlib.contextmanager
def terminal() -> Iterator[tuple[Console, Callable[[], str]]]:
    """A console on a real terminal, and the output since the last call."""
    master, slave = pty.openpty()
    attributes = termios.tcgetattr(slave)
    attributes[1] &= ~termios.OPOST  # bytes arrive as they were written
    termios.tcsetattr(slave, termios.TCSANOW, attributes)
    os.set_blocking(master, False)
    with os.fdopen(slave, "w", encoding="utf-8") as file:

        def written() -> str:
            received = b""
            with contextlib.suppress(BlockingIOError):
                while True:
                    received += os.read(master, 65536)
            return received.decode()

        yield Console(file=file, width=80, force_interactive=True), written
    os.close(master)


def test_the_live_line_is_drawn_at_most_four_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    clock = Clock()
    drawings = 0
    with terminal() as (console, written), TrainingDisplay(console, 1000, clock=clock) as display:
        written()
        for step in range(1, 1001):
            clock.now += 0.01  # ten seconds in total
            display.update(step, {"loss": 5.0} if step % 10 == 0 else None)
            drawings += written().count("/1,000")
    assert 35 <= drawings <= 41


def test_the_live_line_stays_at_the_end_with_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    with terminal() as (console, written):
        with TrainingDisplay(console, 10) as display:
            for step in range(1, 11):
                display.update(step, {"loss": 5.0 + step})
        last = written().split("\r")[-1]
    assert "10/10 100%" in last
    assert "loss 15.000" in last
    assert "\x1b[?25h" in last  # the cursor is back


def test_standard_output_is_restored_after_the_terminal_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    before = sys.stdout
    with terminal() as (console, _), TrainingDisplay(console, 10) as display:

        def hang_up(*_: object) -> None:
            raise OSError("the terminal is gone")

        monkeypatch.setattr(console.file, "flush", hang_up)
        display.update(1, {"loss": 5.0})
        monkeypatch.undo()
    assert sys.stdout is before


def test_a_message_is_printed_above_the_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    with terminal() as (console, written), TrainingDisplay(console, 10) as display:
        display.update(3, {"loss": 5.0})
        written()
        display.message("saved [3] runs/a/checkpoints/step-000000003")
        output = written()
    assert output.index("\x1b[2K") < output.index("saved [3] runs/a/checkpoints/step-000000003") < output.index("3/10")


def plain_output(clock: Clock, steps: Callable[[TrainingDisplay], None], total_steps: int = 1000) -> list[str]:
    file = io.StringIO()
    with TrainingDisplay(Console(file=file, width=80), total_steps, clock=clock) as display:
        steps(display)
    return file.getvalue().splitlines()


def test_without_a_terminal_plain_lines_have_all_values() -> None:
    (line,) = plain_output(Clock(), lambda display: display.update(150, VALUES))
    assert line == "step 150/1,000  15%  " + "  ".join(ALL)


def test_plain_lines_come_every_few_seconds_with_the_first_and_the_last() -> None:
    clock = Clock()

    def train(display: TrainingDisplay) -> None:
        for step in range(1, 998):
            clock.now += 0.125
            display.update(step)
            if step % 10 == 0 or step == 997:
                display.update(step, {"loss": 5.0})

    steps = [int(line.split("/")[0].removeprefix("step")) for line in plain_output(clock, train)]
    assert steps == [10, *range(50, 991, 40), 997]


def test_plain_lines_become_rare_in_a_long_run() -> None:
    clock = Clock()

    def train(display: TrainingDisplay) -> None:
        for step in range(1, 17281):  # a day
            clock.now += 5
            display.update(step, {"loss": 5.0})

    lines = plain_output(clock, train, 17280)
    assert 24 * 60 < len(lines) < 24 * 60 + 500
    assert lines[-1].startswith("step 17,280/17,280 100%")


def test_the_last_line_is_not_printed_twice() -> None:
    def train(display: TrainingDisplay) -> None:
        display.update(1000, {"loss": 5.0})
        display.update(1000, {"mu_norm_ratio": 0.5})

    assert plain_output(Clock(), train) == ["step 1,000/1,000 100%  loss 5.000"]


def test_a_stopped_run_shows_its_step() -> None:
    def train(display: TrainingDisplay) -> None:
        display.update(10, {"loss": 5.0})
        for step in range(11, 15):
            display.update(step)

    assert plain_output(Clock(), train)[-1].startswith("step 14/1,000")


def test_a_run_that_ends_before_its_first_values_shows_no_line() -> None:
    assert plain_output(Clock(), lambda display: display.update(3)) == []


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE", "COLORTERM"])
def test_files_never_get_control_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    with (tmp_path / "log").open("w", encoding="utf-8") as file, TrainingDisplay(Console(file=file), 300) as display:
        for step in range(1, 301):
            display.update(step, VALUES)
        display.message("resumed from runs/a/checkpoints/step-000000300 " + 10 * "word ")
    text = (tmp_path / "log").read_text(encoding="utf-8")
    assert all(letter.isprintable() or letter == "\n" for letter in text), repr(text)
    assert "step-000000300 " + 10 * "word " in text  # not wrapped


def test_ranks_other_than_the_first_show_nothing() -> None:
    file = io.StringIO()
    with TrainingDisplay(Console(file=file), 300, shown=False) as display:
        display.update(150, VALUES)
        display.message("checkpoint saved")
    assert file.getvalue() == ""


def test_values_stay_until_replaced_and_none_is_ignored() -> None:
    clock = Clock()

    def train(display: TrainingDisplay) -> None:
        display.update(100, {"loss": 5.0, "mu_norm_ratio": 0.5, "mfu": None, "note": "text"})
        clock.now += 10
        display.update(110, {"loss": float("nan"), "lr": float("nan"), "seconds_left": float("inf")})

    ratio = f"{METRICS['mu_norm_ratio'].short} 0.5"
    assert [line.split("  ") for line in plain_output(clock, train)] == [
        ["step 100/1,000", "10%", "loss 5.000", ratio],
        ["step 110/1,000", "11%", "loss nan", "lr nan", ratio, "? left"],
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device without room")
def test_a_full_disk_under_the_output_does_not_end_the_training() -> None:
    reached_the_end = False
    with contextlib.suppress(OSError), open("/dev/full", "w") as file:  # closing it tries to write again
        with TrainingDisplay(Console(file=file), 300) as display:
            display.update(150, VALUES)
            display.message("checkpoint saved")
        reached_the_end = True
    assert reached_the_end


PIPED = """
import sys
from rich.console import Console
from coupled_adam.training.display import TrainingDisplay
sys.stdin.read()  # until the other end of the output is closed
with TrainingDisplay(Console(), 300) as display:
    display.update(150, {"loss": 5.0})
    display.message("checkpoint saved")
    display.update(300, {"loss": 5.0})
print("end", file=sys.stderr)
"""


def test_a_closed_pipe_does_not_end_the_training() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PIPED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stdin is not None
        process.stdin.close()
        assert process.stderr is not None
        assert process.stderr.read() == "end\n"
    assert process.returncode == 0


@pytest.mark.parametrize("exception", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_during_display_ends_the_training(
    monkeypatch: pytest.MonkeyPatch, exception: type[BaseException]
) -> None:
    console = Console(file=io.StringIO())

    def interrupt(*_: object, **__: object) -> None:
        raise exception

    display = TrainingDisplay(console, 300)
    monkeypatch.setattr(console, "print", interrupt)
    with pytest.raises(exception):
        display.message("checkpoint saved")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7, "7"),
        (999.4, "999"),
        (999.6, "1k"),
        (9_996, "10k"),
        (20_712, "20.7k"),
        (541_234, "541k"),
        (999_600, "1M"),
        (1_900_000, "1.9M"),
        (float("nan"), "nan"),
    ],
)
def test_large_numbers_have_at_most_three_digits_and_a_suffix(value: float, text: str) -> None:
    assert short(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0.0 s"),
        (0.42, "0.4 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (80, "1 min 20 s"),
        (3599.6, "1 h 0 min"),
        (3780, "1 h 3 min"),
        (86_399, "23 h 59 min"),
        (86_400, "1 d 0 h"),
        (float("nan"), "?"),
    ],
)
def test_times_have_their_two_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_learning_rates_have_at_most_six_digits_and_short_exponents() -> None:
    rates = (6e-4, 2.5e-4, 0.00195, 3.27e-5, 1.0, 0.0)
    assert [setting(lr) for lr in rates] == ["0.0006", "0.00025", "0.00195", "3.27e-5", "1", "0"]
    assert [significant(lr, 2) for lr in (3.27e-4, 3.27e-5)] == ["0.00033", "3.3e-5"]
