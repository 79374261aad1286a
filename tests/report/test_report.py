"""The report: the contents of its folder and page, and that the page loads nothing."""

import csv
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from fabricated_study import COUPLED, PAGE_PARTS, STANDARD, fabricate, fabricated_demo, scaled
from markupsafe import escape
from typer.testing import CliRunner

from coupled_adam.base.extras import install_command
from coupled_adam.cli import app
from coupled_adam.config.builtin_files import study_text
from coupled_adam.config.study_config import load_study
from coupled_adam.metrics import METRICS
from coupled_adam.report import result_tables, verdict
from coupled_adam.report.figures.figure_list import AVERAGED
from coupled_adam.report.grid import Planned, Size, expected_of, gather_grid, variant_of
from coupled_adam.report.page_tables import address, headline
from coupled_adam.report.report_page import commands, what_was_compared
from coupled_adam.report.report_writer import write_report
from coupled_adam.report.result_notes import loss_note
from coupled_adam.report.study_plans import StudyPlan, shared_report
from coupled_adam.study.expansion import cells_of
from coupled_adam.study.results import merge_results, read_results

SIZES = [("125M", 124_373_760, 5 * 10**9), ("125M", 124_373_760, 10**10), ("355M", 354_000_000, 10**10)]


def test_the_folder_contains_figures_tables_and_the_page(demo: Path) -> None:
    folder = demo.parent
    for name in ("embedding_cloud", "training_loss", "mean_ratio_over_training", "singular_values"):
        assert (folder / "figures" / f"{name}.svg").is_file()
        assert (folder / "figures" / f"{name}.pdf").is_file()
    for name in ("main", "comparisons", "runs"):
        assert (folder / "tables" / f"{name}.csv").is_file()
    assert not list(folder.rglob("*.tmp"))


def test_the_first_screen_shows_the_comparison_and_its_outcome(demo: Path) -> None:
    html = demo.read_text()
    first = html[: html.index("Over training")]
    for words in (
        f"<title>{escape(load_study('demo').title)}</title>",
        "Standard Adam and Coupled Adam",
        "365k parameters",
        "307k training tokens",
        "3 seeds",
        METRICS["mu_norm_ratio"].label,
        ">standard Adam</text>",
        ">origin</text>",
    ):
        assert words in first, words
    ratio, loss = re.findall(r'<p class="better">(.*?)</p>', first[first.index('id="verdict"') :])
    assert re.search("Coupled Adam.* 2% .* 85% .*standard Adam", ratio), ratio
    assert re.search(rf"Coupled Adam.* {METRICS['loss'].label} .*standard Adam", loss), loss
    row = re.search(r"mean-embedding ratio.*?</tr>", first, re.DOTALL)
    assert row is not None
    assert re.search(r"<b>0\.02<small>\(0\)</small></b>", row[0])
    assert "better" in row[0]


def test_the_demo_leads_with_the_embeddings_and_has_one_caveat_in_the_verdict_beside_the_loss(demo: Path) -> None:
    study = load_study("demo")
    assert study.report.lead == "embeddings"
    note = study.report.loss_note
    assert note is not None
    html = demo.read_text()
    verdict, rest = html[html.index('id="verdict"') :].split("</div>", 1)
    ratio, loss = re.findall(r'<p class="better">(.*?)</p>', verdict)
    assert "2%" in ratio
    assert "test loss" in loss
    assert note in loss
    cards = re.findall(r"<h2>(.*?)\N{NO-BREAK SPACE}(.)</h2>", rest)
    assert cards[0] == ("mean-embedding ratio", "↓")
    assert cards[-1] == ("test loss", "↓")
    assert note not in rest[: rest.index("</section>")]
    rows = re.findall(r'<tr><th scope="row">([^<]*)\N{NO-BREAK SPACE}', html[html.index('class="headline"') :])
    assert rows[0] == "mean-embedding ratio"
    assert rows[-1] == "test loss"
    with (demo.parent / "tables" / "main.csv").open(encoding="utf-8", newline="") as file:
        columns = next(csv.reader(file))
    assert columns.index("mu_norm_ratio") < columns.index("iso") < columns.index("loss")
    assert note in (demo.parent / "tables" / "main.md").read_text()


def test_other_studies_lead_with_the_loss(tmp_path: Path) -> None:
    study = fabricate(tmp_path / "s", with_runs=False)
    html = write_report([study], study).read_text()
    first, second = re.findall(r'<p class="better">(.*?)</p>', html[html.index('id="verdict"') :])[:2]
    assert "test loss" in first
    assert "embeddings" in second
    assert re.findall(r"<h2>(.*?)\N{NO-BREAK SPACE}", html)[0] == "test loss"
    with (study / "tables" / "main.csv").open(encoding="utf-8", newline="") as file:
        assert next(csv.reader(file))[4] == "loss"


def test_key_numbers_name_their_size_and_mention_the_others(tmp_path: Path) -> None:
    html = write_report([fabricate(tmp_path / "s", sizes=SIZES, with_runs=False)], tmp_path / "s").read_text()
    numbers = html[html.index('id="key-numbers"') : html.index("</section>")]
    assert re.search("3 sizes: N = 355M, D = 10B", numbers)
    assert "3 of 3 sizes" in numbers


def test_merged_studies_lead_with_embeddings_only_if_all_of_them_do(tmp_path: Path) -> None:
    demo_text = study_text("demo")
    plans = [
        StudyPlan(tmp_path, "a", "", "", "", report=load_study("demo").report),
        StudyPlan(tmp_path, "b", "", "", ""),
    ]
    assert 'lead = "embeddings"' in demo_text
    assert shared_report(plans[:1]) == load_study("demo").report
    assert shared_report(plans[:1] * 2) == load_study("demo").report  # the common note appears once
    assert shared_report(plans).lead == "loss"
    assert shared_report(plans).loss_note == load_study("demo").report.loss_note


def test_every_part_of_the_page_is_there(demo: Path) -> None:
    html = demo.read_text()
    for part in PAGE_PARTS:
        assert f'id="{part}"' in html
    figures = list((demo.parent / "figures").glob("*.svg"))
    assert html.count("<figure") == html.count("<figcaption>") == len(figures) >= 7
    assert 'id="partial"' not in html
    assert 'id="unfinished"' not in html
    assert "coupled-adam study run" in html
    assert str(escape(install_command("study"))) in html
    assert "abc1234" in html  # the commit
    assert "c0ffee0000" in html  # the settings of a run
    assert "base = &#34;tiny&#34;" in html  # study.toml


def test_links_lead_to_run_folders_and_files_that_exist(demo: Path) -> None:
    links = re.findall(r'<a href="([^"]*)"', demo.read_text())
    local = [link for link in links if not link.startswith("#")]
    assert sum(link.startswith("./runs/") for link in local) == 6
    for link in local:
        assert (demo.parent / link).exists(), link


def test_the_page_loads_nothing_and_runs_only_its_own_script(demo: Path, hostile: Path) -> None:
    for page in (demo, hostile):
        html = page.read_text()
        assert html.startswith("<!DOCTYPE html>")
        assert re.findall(r"<script[^>]*>", html) == [
            '<script type="application/json" id="curves-data">',
            '<script type="application/json" id="clouds-data">',
            "<script>",
        ]
        assert "<img" not in html
        for link in re.findall(r'(?:href|src)="([^"]*)"', html):
            assert link.startswith(("#", "./", "data:image/png;base64,")), link
        assert "@import" not in html
        assert not re.findall(r"url\((?!#)", html)
        assert re.search(r"default-src 'none'; .*script-src 'sha256-[\w+/=]+'\"", html)


def test_ids_on_the_page_are_unique_and_every_reference_has_its_target(demo: Path) -> None:
    html = demo.read_text()
    ids = Counter(re.findall(r'\bid="([^"]*)"', html))
    assert max(ids.values()) == 1
    assert set(re.findall(r'(?:url\(#|href="#)([^")]*)', html)) <= set(ids)


def test_pictures_use_the_colours_of_the_page(demo: Path) -> None:
    html = demo.read_text()
    assert "#010203" not in html
    assert "#d9dde3" not in html
    assert "currentColor" in html
    assert len(html) < 2_000_000


def test_the_page_states_that_coupled_is_worse(tmp_path: Path) -> None:
    html = write_report([fabricated_demo(tmp_path / "s", gain=-0.1, with_runs=False)], tmp_path / "out").read_text()
    (loss,) = re.findall(r'<p class="worse">(.*?)</p>', html[html.index('id="verdict"') :])
    assert re.search(rf"Coupled Adam.* {METRICS['loss'].label} .*standard Adam", loss), loss
    assert '<td class="claim worse">worse' in html


def test_with_one_seed_the_page_claims_nothing(tmp_path: Path) -> None:
    html = write_report([fabricate(tmp_path / "s", seeds=(1,), with_runs=False)], tmp_path / "out").read_text()
    said = re.findall(r"<p class=\"(.*?)\">", html[html.index('id="verdict"') : html.index('id="key-numbers"')])
    assert said[:2] == ["no-claim", "no-claim"]
    assert '<td class="claim no-claim">no claim' in html
    assert "claim better" not in html
    assert "<b>" not in html


def test_unfinished_runs_are_listed_with_the_reason(tmp_path: Path) -> None:
    folder = fabricated_demo(tmp_path / "demo", with_runs=False)
    lines = (folder / "results.jsonl").read_text().splitlines(keepends=True)
    (folder / "results.jsonl").write_text("".join(lines[:4]))  # all of standard, one of coupled
    cell = cells_of(load_study("demo"))[4]
    (folder / cell.run).mkdir(parents=True)
    (folder / cell.run / "error.txt").write_text("the loss is <nan> at step 7\n\ndetails\n")
    html = write_report([folder], folder).read_text()
    assert re.search('id="partial".* 4 of 6 runs .*, 1 failed', html)
    assert "the loss is &lt;nan&gt; at step 7" in html  # from error.txt
    assert "details" not in html[html.index('id="unfinished"') : html.index('id="repeat"')].replace("<details", "")
    waiting = html[html.index('id="unfinished"') :]
    assert "tiny-307.2k-coupled/seed-3</th><td" in waiting
    assert "waiting" in waiting
    assert "1 of 3" in html  # seeds of coupled, in the table
    assert "1 to 3 seeds" in html
    (loss,) = re.findall(r'<p class="no-claim">(.*3 and 1 seeds.*)</p>', html[html.index('id="verdict"') :])
    assert METRICS["loss"].label in loss


def test_a_study_without_its_file_is_reported_with_a_note(tmp_path: Path) -> None:
    html = write_report([fabricate(tmp_path / "s", with_runs=False)], tmp_path / "s").read_text()
    assert "study.toml is missing" in html
    assert 'id="partial"' not in html


def test_several_folders_become_one_report(tmp_path: Path) -> None:
    first = fabricated_demo(tmp_path / "a", seeds=(1, 2))
    second = fabricated_demo(tmp_path / "b", seeds=(3,))
    page = write_report([first, second], tmp_path / "both")
    html = page.read_text()
    assert "3 seeds each" in html
    assert f"coupled-adam study report {first}-again {second}-again --out {tmp_path / 'both'}" in html
    assert 'id="partial"' not in html  # the folders complete each other
    links = re.findall(r'<a href="(\./[^"]*runs/[^"]*)"', html)
    assert len(links) == 6
    assert {link.split("/")[2] for link in links} == {"a", "b"}
    assert all((page.parent / link).is_dir() for link in links)
    assert f"study.toml of {second}" in html


def test_a_run_that_no_folder_has_finished_is_missing_once(tmp_path: Path) -> None:
    first = fabricated_demo(tmp_path / "a", seeds=(1,), with_runs=False)
    second = fabricated_demo(tmp_path / "b", seeds=(2,), with_runs=False)
    cell = next(each for each in cells_of(load_study("demo")) if each.seed == 3)
    (second / cell.run).mkdir(parents=True)
    (second / cell.run / "error.txt").write_text("out of memory\n")
    html = write_report([first, second], tmp_path / "both").read_text()
    assert re.search('id="partial".* 4 of 6 runs .*, 1 failed', html)
    assert html.count(f">{cell.label}</th>") == 1
    assert "out of memory" in html


def test_the_page_suggests_installing_the_newest_version(tmp_path: Path) -> None:
    results = read_results(fabricate(tmp_path / "s", with_runs=False))
    mixed = [replace(each, package=package) for each, package in zip(results, ["0.9.0", "0.10.0"] * 3, strict=True)]
    assert commands([], mixed, tmp_path)[0] == f"{install_command('study')}  # version 0.10.0"


def test_the_page_calls_a_validation_loss_by_its_name(tmp_path: Path) -> None:
    folder = fabricated_demo(tmp_path / "s", with_runs=False)
    text = (folder / "results.jsonl").read_text()
    (folder / "results.jsonl").write_text(text.replace('"loss_split": "test"', '"loss_split": "val"'))
    html = write_report([folder], folder).read_text()
    (loss, _) = re.findall(r'<p class="better">(.*?)</p>', html[html.index('id="verdict"') :])[::-1]
    assert METRICS["val_loss"].label in loss
    assert loss_note(read_results(folder)) in html[: html.index("<h2>Tables")]
    assert not re.search("test loss", html, re.IGNORECASE)


def test_tied_and_untied_models_of_one_name_share_the_first_table(tmp_path: Path) -> None:
    tied = fabricate(tmp_path / "a", optimizers={"coupled": COUPLED}, sizes=(("30M", 30_000_000, 10**9),))
    settings = {"untied standard": {**STANDARD, "tied": False}}
    untied = fabricate(tmp_path / "b", optimizers=settings, sizes=(("30M", 49_000_000, 10**9),))
    found = headline(gather_grid(merge_results([tied, untied])))
    assert found is not None
    assert list(found.optimizers) == ["untied standard, N = 49M", "Coupled Adam, N = 30M"]
    assert found.rows[0].claim == "better"
    html = write_report([tied, untied], tmp_path / "both").read_text()
    assert re.search(rf'<p class="better">Coupled Adam.* {METRICS["loss"].label} .*untied standard', html)


def test_published_values_next_to_the_headline_are_explained(tmp_path: Path) -> None:
    explained = "In brackets"
    for name, sizes, there in (("a", SIZES[:1], True), ("b", [("tiny", 364_864, 307_200)], False)):
        html = write_report([fabricate(tmp_path / name, sizes=sizes, with_runs=False)], tmp_path / name).read_text()
        assert (explained in html[: html.index("<h2>Tables")]) == there


def test_averaged_curves_have_a_note(tmp_path: Path) -> None:
    folder = fabricate(tmp_path / "s", seeds=(1,))
    assert AVERAGED not in write_report([folder], folder).read_text()
    for path in folder.glob("runs/*/*/metrics.jsonl"):
        path.write_text("".join(f'{{"kind": "train", "step": {step}, "loss": 3.0}}\n' for step in range(1, 402)))
    html = write_report([folder], folder).read_text()
    assert html.count(AVERAGED) == 1  # the training loss; the other curves are short
    assert "150 points" in html


def test_published_values_are_shown_next_to_the_measured_ones(tmp_path: Path) -> None:
    html = write_report([fabricate(tmp_path / "s", sizes=SIZES, with_runs=False)], tmp_path / "s").read_text()
    # Tab. results_S: 5B tokens, 125M parameters, Coupled: loss 3.12(1), bold.
    assert '<span class="published"><b>3.12<small>(1)</small></b></span>' in html
    assert "D = 5B, N = 125M" in html


def test_an_ablation_shows_its_table_and_figures(tmp_path: Path) -> None:
    exponents = {f"coupled n={n}": scaled(n) for n in range(-2, 3)}
    html = write_report([fabricate(tmp_path / "s", optimizers=exponents, with_runs=False)], tmp_path / "s").read_text()
    assert "Of 5 optimizers" in html
    assert 'id="figure-ablation_scale"' in html
    assert 'id="figure-ablation_scale_complete"' in html
    assert 'id="table-scale"' in html


def test_no_finished_run_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "results.jsonl").write_text("")
    with pytest.raises(ValueError, match=f"^{tmp_path / 's'}: .*`coupled-adam study run`"):
        write_report([tmp_path / "s"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_failure_while_rendering_keeps_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fabricate(tmp_path / "s", with_runs=False)
    (folder / "report.html").write_text("old")

    def fail(*_: object) -> str:
        raise RuntimeError("no")

    monkeypatch.setattr("coupled_adam.report.report_page.render_report", fail)
    with pytest.raises(RuntimeError):
        write_report([folder], folder)
    assert (folder / "report.html").read_text() == "old"


def test_hostile_names_are_escaped(hostile: Path) -> None:
    html = hostile.read_text()
    assert "<script>document" not in html
    assert "&lt;script&gt;document.title=&#39;run&#39;&lt;/script&gt;" in html
    assert "{{ 7 * 7 }}" in html
    assert ">49<" not in html


def test_addresses_cannot_become_scripts(tmp_path: Path) -> None:
    assert address(tmp_path / "javascript:alert(1)", tmp_path) == "./javascript%3Aalert%281%29/"
    assert address(tmp_path / "a" / 'q"<', tmp_path / "b") == "./../a/q%22%3C/"


def test_many_optimizers_are_shortened_to_the_first_and_last_names(tmp_path: Path) -> None:
    exponents = {f"coupled n={n}": scaled(n) for n in range(-3, 4)}
    words = what_was_compared(
        gather_grid(read_results(fabricate(tmp_path / "s", optimizers=exponents, with_runs=False)))
    )
    assert words[0] == f"Coupled n=-3, …, coupled n=3 ({len(exponents)} optimizers)"


@pytest.mark.parametrize(("metrics", "is_said"), [(("loss", "acc"), True), (("loss",), False)])
def test_the_first_screen_notes_accuracies_from_few_documents(
    metrics: tuple[str, ...], is_said: bool, tmp_path: Path
) -> None:
    study = fabricate(tmp_path / "study", metrics=metrics, with_runs=False)
    rows = [json.loads(line) for line in (study / "results.jsonl").read_text().splitlines()]
    for row in rows:
        row["metrics"]["task_limit"] = 10
    (study / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_report([study], study).read_text()
    first_screen = page.partition('id="main-table"')[2].partition("</section>")[0]
    assert ("first 10 documents" in first_screen) is is_said


def test_tables_and_verdict_of_a_report_are_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for module, name in ((result_tables, "comparison_table"), (verdict, "verdict_of_pair")):
        own = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, own=own, name=name: calls.append(name) or own(*args))
    folder = fabricate(tmp_path / "s", with_runs=False)
    found = CliRunner().invoke(app, ["study", "report", str(folder), "--out", str(tmp_path / "out")])
    assert found.exit_code == 0, found.output
    assert sorted(calls) == ["comparison_table", "verdict_of_pair"]


def test_a_size_that_is_only_planned_does_not_change_the_text_about_the_others(tmp_path: Path) -> None:
    results = read_results(fabricate(tmp_path / "s", with_runs=False))
    size = Size(10**9, 10**8, "large")
    planned = [*expected_of(results), Planned("large-coupled", size, variant_of("coupled", COUPLED), (1, 2))]
    with_plan, without = gather_grid(results, planned), gather_grid(results)
    assert [place.cells[0].size.model for place in with_plan.places] == ["0.4M", "large"]
    assert len(with_plan.finished.places) == len(without.places) == 1
    assert headline(with_plan) == headline(without) is not None
    assert verdict.verdict(with_plan) == verdict.verdict(without)
    assert what_was_compared(with_plan) == what_was_compared(without)
