"""`coupled-adam study run`, `study report`, `study list`, `study show` and `study status`."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from coupled_adam.base.errors import UserError
from coupled_adam.base.progress import wide_enough
from coupled_adam.commands.refusal import refuse, user_errors
from coupled_adam.commands.tidy_help import TidyGroup

if TYPE_CHECKING:
    from coupled_adam.config.study_config import Study
    from coupled_adam.data.corpus import Corpus
    from coupled_adam.report.contents import Contents
    from coupled_adam.study.expansion import Cell
    from coupled_adam.study.folder import StudyFolder
    from coupled_adam.study.runner import StudyOutcome

app = typer.Typer(
    cls=TidyGroup,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Repeat the paper's experiments at any scale, with statistics, tables, figures and one report.",
)


@app.command()
def run(
    study: Annotated[str, typer.Argument(metavar="STUDY", help="A built-in study (see `study list`), or a TOML file.")],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the study.  [default: runs/NAME]")] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Runs at a time.  [default: as many as there are GPUs, or cores]"),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", help="Only these runs, such as `'*-coupled'` or `'*/seed-1'`; may be repeated."
        ),
    ] = None,
    launcher: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="`local`: one process for each run. `torchrun`: several, one for each GPU. `slurm`: jobs of a "
            "cluster.",
        ),
    ] = "local",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and what it takes, and exit.")] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change one setting of all runs, such as `data.folder=DIR`; may be repeated.",
        ),
    ] = None,
) -> None:
    """Train and evaluate every cell of a study, then write its report.

    What is finished is never done again: stop with Ctrl-C, and go on with the same command. A run that fails is
    reported, and the others go on.

    A study that is stopped ends with exit code 130 (Ctrl-C), 143 (SIGTERM) or 129 (SIGHUP: the terminal was closed),
    one with a failed run with 1.

    Try: `coupled-adam study run demo`, `coupled-adam study run paper-small-scale --dry-run`

    A study of your own: `coupled-adam study show demo > mine.toml`, edit it, `coupled-adam study run mine.toml`.
    """
    again = ["coupled-adam", "study", "run", study]
    for option, values in (("--out", [out] if out else []), ("--only", only or []), ("--set", settings or [])):
        again += [part for value in values for part in (option, str(value))]
    again += [] if jobs is None else ["--jobs", str(jobs)]
    again += [] if launcher == "local" else ["--launcher", launcher]
    run_and_report(
        study, out, jobs=jobs, only=only or [], launcher=launcher, dry_run=dry_run, settings=settings or [], again=again
    )


def run_and_report(
    spec: str,
    out: Path | None,
    *,
    jobs: int | None = None,
    only: Sequence[str] = (),
    launcher: str = "local",
    dry_run: bool = False,
    settings: Sequence[str] = (),
    again: Sequence[str],
) -> None:
    """Run a study and report it; ends the command with an exit code other than 0 when not all is well.

    Args:
        again: the command that goes on with the study.
        spec, out, jobs, only, launcher, dry_run, settings: as the options of `study run`.
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
        refuse(f"--launcher is {launcher!r}, expected one of: {', '.join(LAUNCHERS)}")
    with user_errors():
        study, of_runs = with_settings(load_study(spec), settings)
        all_cells = cells_of(study, of_runs)
        study = with_override(study, of_runs)
        cells = with_candidates(chosen(all_cells, only), all_cells)
        folder = StudyFolder(out or RUNS_HERE / study.name)
        known = cells_now(all_cells, folder, study)
        labels = {cell.label for cell in cells}
        planned = [cell for cell in known if cell.label in labels]
    if dry_run:
        with user_errors():
            _print_plan(console, study, planned, all_cells, folder)
        return
    display = StudyDisplay(console)

    def before_runs() -> None:
        for note in _check_installed(study):
            display.say(note)
        _check_tokenizers(study, cells, prepare_data(cells, display.say))

    with _unmade_if_refused(folder.path), user_errors():
        require_packages()  # now, and not after the training
        _require_writable(folder.path / "report.html")
        folder.require_fit(study, known)
        amount = gpu_hours(planned)
        takes = f", about {hours(amount)} GPU hours on H100 or H200" if amount > GPU_HOURS_WORTH_SAYING else ""
        display.say(f"{study.title}: {len(planned)} runs in {folder.path}{takes}")
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
    _print_outcome(console, outcome, shlex.join(again))


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR", help="Folders of studies; several are merged.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where to write.  [default: the folder itself; of several, needed]"),
    ] = None,
) -> None:
    """Write tables, figures and report.html again.

    Try: `coupled-adam study report runs/demo`, or merge what two machines did:
    `coupled-adam study report a/runs/demo b/runs/demo --out both`
    """
    if out is None and len(folders) > 1:
        refuse("--out is missing: several studies are merged into a folder of their own")
    from coupled_adam.config.builtin_files import STUDY_FILE
    from coupled_adam.config.study_config import load_study
    from coupled_adam.study.expansion import cells_of
    from coupled_adam.study.folder import StudyFolder
    from coupled_adam.study.selection import cells_now

    console = Console(highlight=False)
    with user_errors():
        for folder in folders:
            _require_study(folder)
            if (folder / STUDY_FILE).is_file():  # jobs of a cluster may have finished since the runner was here
                study = load_study(str(folder / STUDY_FILE))
                cells = cells_of(study)
                StudyFolder(folder).gather(cells_now(cells, StudyFolder(folder), study))
                _say_outside(lambda text: console.print(Text(text), soft_wrap=True), StudyFolder(folder), cells)
    _report(console, folders, out or folders[0])


@app.command(name="list")
def list_studies() -> None:
    """Show the built-in studies, and what they take.

    Try: `coupled-adam study list`
    """
    from coupled_adam.study.overview import shipped_table

    with user_errors():
        table = shipped_table()
    Console(highlight=False).print(table)


@app.command()
def show(
    study: Annotated[str, typer.Argument(metavar="NAME", help="A built-in study, or a study folder.")],
) -> None:
    """Print the file of a study: a good start for one of your own.

    Try: `coupled-adam study show demo > mine.toml`
    """
    from coupled_adam.config.builtin_files import STUDIES, study_text
    from coupled_adam.config.study_config import load_study
    from coupled_adam.config.toml_writing import to_toml

    with user_errors():
        text = study_text(study) if study in STUDIES else to_toml(load_study(study))
    typer.echo(text, nl=False)


@app.command()
def status(folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a study.")]) -> None:
    """Show how the runs of a study stand.

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
    console.print(table)
    for line in selected.values():
        console.print(Text(f"Selected: {line}"), soft_wrap=True)
    console.print(", ".join(f"{count} {name}" for name, count in found.items()))


def _say_outside(say: Callable[[str], None], folder: "StudyFolder", cells: "Sequence[Cell]") -> None:
    others = folder.outside(cells)
    if others:
        say(f"Not in the study any more, and left out of its results: {', '.join(others)}")


def _require_study(folder: Path) -> None:
    """Refuse what is no folder of a study; whoever gives the name of a study, as to `study run`, is told its folder."""
    from coupled_adam.config.builtin_files import STUDY_FILE
    from coupled_adam.study.folder import RUNS_HERE
    from coupled_adam.study.results import RESULTS_FILE

    if any((folder / name).is_file() for name in (STUDY_FILE, RESULTS_FILE)):
        return
    meant = RUNS_HERE / folder
    if (meant / STUDY_FILE).is_file():
        raise UserError(f"{folder} is not the folder of a study; give its folder: {meant}")
    raise UserError(
        f"{folder} is not the folder of a study, it has neither {STUDY_FILE} nor {RESULTS_FILE}; give one that "
        f"`coupled-adam study run` wrote, such as {RUNS_HERE / 'demo'}"
    )


@contextmanager
def _unmade_if_refused(folder: Path) -> Iterator[None]:
    """Removes a folder that a study had made, and left empty, when it was refused."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except typer.Exit:
        with suppress(OSError):  # it is not empty
            for path in made:
                path.rmdir()
        raise


def _require_writable(path: Path) -> None:
    """Now, and not after the training."""
    from coupled_adam.base.files import require_writable

    try:
        require_writable(path)
    except OSError as error:
        refuse(f"cannot write {str(path)!r} ({error.strerror}); give a folder that can be written with --out")


def _print_plan(
    console: Console, study: "Study", cells: "Sequence[Cell]", all_cells: "Sequence[Cell]", folder: Any
) -> None:
    """Print the runs that are known to be needed, and how many there may be at most.

    Args:
        all_cells: of the study, also the candidates that may be added beyond the edges.
    """
    from coupled_adam.config.study_config import one_paragraph
    from coupled_adam.study.folder import TO_BE_MEASURED
    from coupled_adam.study.overview import counts, plan_table, worst_case

    console.print(Text(study.title, style="bold"))
    console.print(Text(one_paragraph(study.description)))
    console.print(plan_table(study, cells, folder))
    for line in worst_case(study, cells, all_cells):
        console.print(Text(line))
    trained = counts(study, cells, folder).get(TO_BE_MEASURED)
    if trained:
        console.print(Text(f"{trained} of these runs are trained and only to be measured; that takes no training."))
    console.print(Text("Nothing was started: --dry-run."))


def _check_installed(study: "Study") -> list[str]:
    """See that what tasks and theory need is here, before hours of preparing data; what the user should know."""
    if not study.evaluation.tasks and not study.evaluation.theory:
        return []
    from coupled_adam.study.task_evaluation import check_task_names  # loads torch
    from coupled_adam.study.theory_evaluation import notes_on_theory

    check_task_names(study.evaluation)
    return list(notes_on_theory(study.evaluation))


def _check_tokenizers(study: "Study", cells: "Sequence[Cell]", corpora: "Mapping[str, Corpus]") -> None:
    """See that what is measured with the tokenizers of the corpora can be."""
    if study.evaluation.measures and study.evaluation.wordsim is not None:
        from coupled_adam.study.words import check_words

        check_words(study.evaluation, corpora.values())
    if study.evaluation.tasks:
        from coupled_adam.study.task_evaluation import check_tokenizers

        check_tokenizers(study.evaluation, [cell.config for cell in cells], corpora)


def _report(console: Console, folders: Sequence[Path], out: Path) -> None:
    """Write the report, and print what is in it in short."""
    from coupled_adam.report.contents import read_report
    from coupled_adam.report.report_writer import require_packages, write_contents

    with user_errors():
        require_packages()
        contents = read_report(folders)
        path = write_contents(contents, out)
    _print_comparison(console, contents)
    console.print(Text(f"Report: {path}"), soft_wrap=True)


def _print_comparison(console: Console, contents: "Contents") -> None:
    from coupled_adam.base.text import printable_lines
    from coupled_adam.report.table_formats import for_console, to_rich_comparison

    for table in contents.tables[:1]:
        notes = tuple(note for note in table.notes if note != contents.section.loss_note)  # the verdict has it
        table = for_console(replace(table, notes=notes), console)
        shown = to_rich_comparison(table)
        wide_enough(console, shown).print(shown)
        for note in table.notes:
            console.print(Text(note, style="dim"))
    for table in contents.tables:
        if table.name == "selection":
            for note in table.notes[1:]:  # winners at an edge
                console.print(Text(note, style="bold"), soft_wrap=True)
    for plan in contents.plans:
        if plan.problem:
            console.print(Text(printable_lines(plan.problem), style="dim"))
    console.print(Text(contents.verdict.text))


def _print_outcome(console: Console, outcome: "StudyOutcome", again: str) -> None:
    from coupled_adam.training.interruption import exit_code

    def say(text: str) -> None:
        console.print(Text(text), soft_wrap=True)

    for label, reason in outcome.failed.items():
        say(f"Failed: {label}: {reason}")
    for label, reason in outcome.busy.items():
        say(f"Left to another process: {label}: {reason}")
    for label, reason in outcome.waiting.items():
        say(f"Not started: {label}: {reason}")
    if outcome.signal is not None:
        state = "jobs go on; gather" if outcome.runs_go_on else "saved; go on"
        left = "1 run is" if outcome.left == 1 else f"{outcome.left} runs are"
        say(f"{outcome.signal}: {left} not finished ({state} with the same command): {again}")
        raise typer.Exit(exit_code(outcome.signal))
    if outcome.failed:
        failed, them = ("1 run", "it") if len(outcome.failed) == 1 else (f"{len(outcome.failed)} runs", "them")
        say(f"{failed} failed; when the cause is mended, the same command tries {them} again: {again}")
    if outcome.failed or (outcome.waiting and not outcome.busy):
        raise typer.Exit(1)
