"""`coupled-adam study run`, `study report`, `study list`, `study show` and `study status`."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from coupled_adam.base.errors import UserError
from coupled_adam.base.progress import with_whole_names
from coupled_adam.base.text import counted
from coupled_adam.commands.refusal import refuse, user_errors
from coupled_adam.commands.study_output import print_comparison, print_outcome, print_plan
from coupled_adam.commands.tidy_help import TidyGroup

if TYPE_CHECKING:
    from coupled_adam.config.study_config import Study
    from coupled_adam.data.corpus import Corpus
    from coupled_adam.study.expansion import Cell
    from coupled_adam.study.folder import StudyFolder

app = typer.Typer(
    cls=TidyGroup,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Repeat the paper's experiments at any scale, with statistics, tables, figures and a report.",
)


@app.command()
def run(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="Built-in study (see `study list`) or TOML file.")],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Study folder.  [default: runs/NAME]")] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Number of parallel runs.  [default: one per GPU, or per core]"),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", help="Runs to include, such as `'*-coupled'` or `'*/seed-1'`; may be repeated."
        ),
    ] = None,
    reuse: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR",
            help="Study folder whose finished runs count if their settings are the same; may be repeated.",
        ),
    ] = None,
    launcher: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="`local`: one process per run. `torchrun`: one process per GPU. `slurm`: cluster jobs.",
        ),
    ] = "local",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and its cost, and exit.")] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a setting of all runs (`train tiny --show` explains them), or a study key such as "
            "`evaluation.tasks`; may be repeated.",
        ),
    ] = None,
) -> None:
    """Train and evaluate every run of a study, then write its report.

    Press Ctrl-C to stop. Run the same command to resume; finished runs are not repeated. If a run fails, the others
    continue.

    For your own study: `coupled-adam study show demo > mine.toml`, edit the file, `coupled-adam study run mine.toml`

    To select the learning rate or another setting for each optimizer, copy `[select]` from
    `coupled-adam study show muon`

    Exit codes: 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP (the terminal was closed), 1 if a run failed.

    Try: `coupled-adam study run demo`, `coupled-adam study run paper-small-scale --dry-run`
    """
    again = ["coupled-adam", "study", "run", study]
    repeated: dict[str, Sequence[object]] = {
        "--out": [out] if out else [],
        "--only": only or [],
        "--reuse": reuse or [],
        "--set": settings or [],
    }
    again += [part for option, values in repeated.items() for value in values for part in (option, str(value))]
    again += [] if jobs is None else ["--jobs", str(jobs)]
    again += [] if launcher == "local" else ["--launcher", launcher]
    run_and_report(
        study,
        out,
        jobs=jobs,
        only=only or [],
        reuse=reuse or [],
        launcher=launcher,
        dry_run=dry_run,
        settings=settings or [],
        again=again,
    )


def run_and_report(
    spec: str,
    out: Path | None,
    *,
    jobs: int | None = None,
    only: Sequence[str] = (),
    reuse: Sequence[Path] = (),
    launcher: str = "local",
    dry_run: bool = False,
    settings: Sequence[str] = (),
    again: Sequence[str],
) -> None:
    """Run a study and write its report; exit with a non-zero code if it was stopped or a run failed.

    Args:
        again: the command that resumes the study.
        spec, out, jobs, only, reuse, launcher, dry_run, settings: the options of `study run`.
    """
    from coupled_adam.config.study_config import load_study, with_override, with_settings
    from coupled_adam.report.report_writer import require_packages
    from coupled_adam.study.expansion import cells_of, chosen
    from coupled_adam.study.folder import RUNS_HERE, StudyFolder
    from coupled_adam.study.overview import GPU_HOURS_WORTH_SAYING, gpu_hours, hours
    from coupled_adam.study.results import read_results
    from coupled_adam.study.runner import LAUNCHERS, prepare_data, run_study
    from coupled_adam.study.selection import cells_now, with_candidates
    from coupled_adam.study.study_display import StudyDisplay

    console = Console(highlight=False)
    place = next((name for name in LAUNCHERS if name == launcher), None)
    if place is None:
        refuse(f"--launcher is {launcher!r}; expected one of: {', '.join(LAUNCHERS)}")
    with user_errors():
        study, of_runs = with_settings(load_study(spec), settings)
        all_cells = cells_of(study, of_runs)
        study = with_override(study, of_runs)
        cells = with_candidates(chosen(all_cells, only), all_cells)
        folder = StudyFolder(out or RUNS_HERE / study.name, [result for path in reuse for result in read_results(path)])
        known = cells_now(all_cells, folder, study)
        labels = {cell.label for cell in cells}
        planned = [cell for cell in known if cell.label in labels]
    if dry_run:
        with user_errors():
            print_plan(console, study, planned, all_cells, folder)
        return
    display = StudyDisplay(console)

    def before_runs() -> None:
        for note in _check_installed(study):
            display.say(note)
        _check_tokenizers(study, cells, prepare_data(cells, display.say))

    with _unmade_if_refused(folder.path), user_errors():
        require_packages()  # fail before training, not after
        _require_writable(folder.path / "report.html")
        folder.require_fit(study, known)
        amount = gpu_hours(planned)
        takes = f", about {hours(amount)} GPU hours on H100 or H200" if amount > GPU_HOURS_WORTH_SAYING else ""
        display.say(f"{study.title}: {counted(len(planned), 'run')} in {folder.path}{takes}")
        _say_outside(display.say, folder, all_cells)
        outcome = run_study(
            study,
            cells,
            folder,
            all_cells=all_cells,
            jobs=jobs,
            launcher=place,
            display=display,
            before_runs=before_runs,
        )
    if outcome.finished and any(not result.is_candidate for result in read_results(folder.path)):
        _report(console, [folder.path], folder.path)
    print_outcome(console, outcome, shlex.join(again))


@app.command()
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR", help="Study folder; several are merged into one report.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder to write to; required to merge.  [default: the study folder]"),
    ] = None,
) -> None:
    """Rewrite the tables, figures and report.html of a study.

    Several folders, for example from two machines, are merged into one report.

    Try: `coupled-adam study report runs/demo`, `coupled-adam study report a/runs/demo b/runs/demo --out both`
    """
    if out is None and len(folders) > 1:
        refuse("--out is missing; pass a new folder for the merged report")
    from coupled_adam.config.builtin_files import STUDY_FILE
    from coupled_adam.config.study_config import load_study
    from coupled_adam.study.expansion import cells_of
    from coupled_adam.study.folder import StudyFolder
    from coupled_adam.study.selection import cells_now

    console = Console(highlight=False)
    with user_errors():
        for folder in folders:
            _require_study(folder)
            if (folder / STUDY_FILE).is_file():  # cluster jobs may have finished since the last `study run`
                study = load_study(str(folder / STUDY_FILE))
                cells = cells_of(study)
                StudyFolder(folder).gather(cells_now(cells, StudyFolder(folder), study))
                _say_outside(lambda text: console.print(Text(text), soft_wrap=True), StudyFolder(folder), cells)
    _report(console, folders, out or folders[0])


@app.command(name="list")
def list_studies() -> None:
    """List the built-in studies and their cost.

    Try: `coupled-adam study list`
    """
    from coupled_adam.study.overview import shipped_table

    with user_errors():
        table = shipped_table()
    Console(highlight=False).print(table)


@app.command()
def show(
    study: Annotated[str, typer.Argument(metavar="NAME", help="Built-in study or study folder.")],
) -> None:
    """Print a study as TOML, a starting point for your own.

    Try: `coupled-adam study show demo > mine.toml`
    """
    from coupled_adam.config.builtin_files import STUDIES, study_text
    from coupled_adam.config.study_config import load_study
    from coupled_adam.config.toml_writing import to_toml

    with user_errors():
        text = study_text(study) if study in STUDIES else to_toml(load_study(study))
    typer.echo(text, nl=False)


@app.command()
def status(folder: Annotated[Path, typer.Argument(metavar="DIR", help="Study folder.")]) -> None:
    """Show the status of a study's runs.

    Try: `coupled-adam study status runs/demo`
    """
    from coupled_adam.config.builtin_files import STUDY_FILE
    from coupled_adam.config.study_config import load_study
    from coupled_adam.study.folder import StudyFolder
    from coupled_adam.study.overview import counts, status_table
    from coupled_adam.study.selection import cells_in, selection_lines

    console = Console(highlight=False)
    with user_errors():
        _require_study(folder)
        study = load_study(str(folder / STUDY_FILE))
        cells = cells_in(StudyFolder(folder), study)
        table = status_table(study, cells, StudyFolder(folder))
        found = counts(study, cells, StudyFolder(folder))
        selected = selection_lines(StudyFolder(folder), study)
    with_whole_names(console, table).print(table)
    for line in selected.values():
        console.print(Text(f"Selected: {line}"), soft_wrap=True)
    console.print(", ".join(f"{count} {name}" for name, count in found.items()))


def _say_outside(say: Callable[[str], None], folder: "StudyFolder", cells: "Sequence[Cell]") -> None:
    others = folder.outside(cells)
    if others:
        say(f"No longer in the study and excluded from its results: {', '.join(others)}")


def _require_study(folder: Path) -> None:
    """Raise if this is not a study folder; for the name of a study, suggest its folder."""
    from coupled_adam.config.builtin_files import STUDY_FILE
    from coupled_adam.study.folder import RUNS_HERE
    from coupled_adam.study.results import RESULTS_FILE

    if any((folder / name).is_file() for name in (STUDY_FILE, RESULTS_FILE)):
        return
    meant = RUNS_HERE / folder
    if (meant / STUDY_FILE).is_file():
        raise UserError(f"{folder} is not a study folder; pass its folder: {meant}")
    raise UserError(
        f"{folder} is not a study folder: {STUDY_FILE} and {RESULTS_FILE} are missing; pass a folder written by "
        f"`coupled-adam study run`, such as {RUNS_HERE / 'demo'}"
    )


@contextmanager
def _unmade_if_refused(folder: Path) -> Iterator[None]:
    """If the study is refused, remove the empty folders it created."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except typer.Exit:
        with suppress(OSError):  # not empty
            for path in made:
                path.rmdir()
        raise


def _require_writable(path: Path) -> None:
    from coupled_adam.base.files import require_writable

    try:
        require_writable(path)
    except OSError as error:
        refuse(f"cannot write {str(path)!r} ({error.strerror}); pass a writable folder with --out")


def _check_installed(study: "Study") -> list[str]:
    """Check, before hours of data preparation, that tasks and theory can run; return notes for the user."""
    if not study.evaluation.tasks and not study.evaluation.theory:
        return []
    from coupled_adam.study.task_evaluation import check_task_names  # loads torch
    from coupled_adam.study.theory_evaluation import notes_on_theory

    check_task_names(study.evaluation)
    return list(notes_on_theory(study.evaluation))


def _check_tokenizers(study: "Study", cells: "Sequence[Cell]", corpora: "Mapping[str, Corpus]") -> None:
    """Check that the corpora have the tokenizers that the measurements need."""
    if study.evaluation.measures and study.evaluation.wordsim is not None:
        from coupled_adam.study.words import check_words

        check_words(study.evaluation, corpora.values())
    if study.evaluation.tasks:
        from coupled_adam.study.task_evaluation import check_tokenizers

        check_tokenizers(study.evaluation, [cell.config for cell in cells], corpora)


def _report(console: Console, folders: Sequence[Path], out: Path) -> None:
    """Write the report and print a summary."""
    from coupled_adam.report.contents import read_report
    from coupled_adam.report.report_writer import require_packages, write_contents

    with user_errors():
        require_packages()
        contents = read_report(folders)
        path = write_contents(contents, out)
    print_comparison(console, contents)
    console.print(Text(f"Report: {path}"), soft_wrap=True)
