"""The verdict: its claims, and above all the claims it must not make."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fabricated_study import COUPLED, OPTIMIZERS, STANDARD, fabricate, scaled, sgd
from verdict_samples import (
    BEATEN,
    CENTRED,
    HIGH,
    LOW,
    NEAR_HIGH,
    NEW,
    OLD,
    OTHER_BEATEN,
    RATIO_HIGH,
    RATIO_LOW,
    UNCLEAR,
    Pair,
    losses,
    pair,
)

from coupled_adam.config.study_sections import ReportSection
from coupled_adam.metrics import METRICS
from coupled_adam.report.contents import contents_of
from coupled_adam.report.grid import gather_grid
from coupled_adam.report.report_page import render_report, what_was_compared
from coupled_adam.report.result_notes import table_note
from coupled_adam.report.result_tables import build_tables
from coupled_adam.report.several_optimizers import verdict_of_many
from coupled_adam.report.verdict import verdict
from coupled_adam.report.verdict_sentences import SizedComparison, verdict_of_pair
from coupled_adam.study.results import Result, read_results

LOSS, VALIDATION_LOSS = METRICS["loss"].label, METRICS["val_loss"].label


def in_order(text: str, *things: object) -> bool:
    """Whether a sentence contains these names and numbers in this order."""
    return re.search(".*".join(rf"(?<!\w){re.escape(str(each))}(?!\w)" for each in things), text) is not None


@pytest.mark.parametrize(
    ("one", "outcome", "numbers"),
    [((HIGH, LOW), "better", ("3.02(1)", "3.11(1)")), ((LOW, HIGH), "worse", ("3.11(1)", "3.02(1)"))],
)
def test_a_significant_difference_in_loss_is_stated_with_its_numbers_and_seeds(
    one: Pair, outcome: str, numbers: tuple[str, str]
) -> None:
    found = pair(one)
    assert found.outcome == outcome
    assert in_order(found.loss, NEW, LOSS, OLD, *numbers, "95%", "3 seeds"), found.loss


def test_a_lower_loss_within_the_noise_is_not_called_better() -> None:
    found = pair(([3.10, 3.12, 3.14], NEAR_HIGH))
    assert found.outcome == "open"
    assert in_order(found.loss, NEW, "3.11(2)", OLD, "3.12(2)", "95%", "3 seeds"), found.loss
    assert "lower" not in found.loss
    assert "worse" not in found.loss


def test_one_seed_each_claims_nothing_in_either_sentence() -> None:
    found = pair(([3.11], [3.02]), ratios=losses(([0.85], [0.02])))
    assert (found.outcome, found.embeddings_outcome) == ("no claim", "no claim")
    assert in_order(found.loss, "one seed", LOSS, "3.020", NEW, "3.110", OLD), found.loss
    assert in_order(found.embeddings, NEW, "2%", "85%", OLD), found.embeddings
    assert not re.search("significant|lower|95%", found.loss + found.embeddings)


def test_different_numbers_of_seeds_are_named() -> None:
    assert "3 and 2 seeds" in pair((HIGH, LOW[:2])).loss


def test_sizes_that_disagree_are_counted() -> None:
    found = pair((HIGH, LOW), (HIGH, LOW), (LOW, HIGH), (NEAR_HIGH, NEAR_HIGH), ratios=CENTRED * 4)
    assert found.outcome == "mixed"
    assert in_order(found.loss, LOSS, NEW, OLD, "2 of 4", 1, 1, "95%"), found.loss


@pytest.mark.parametrize(("one", "outcome"), [((HIGH, LOW), "better"), ((LOW, HIGH), "worse"), ((HIGH, HIGH), "open")])
def test_sizes_that_agree_share_one_statement(one: Pair, outcome: str) -> None:
    found = pair(one, one, one, ratios=CENTRED * 3)
    assert found.outcome == outcome
    assert in_order(found.loss, LOSS, NEW, OLD, "all 3", "95%"), found.loss


def test_several_sizes_with_one_seed_each_claim_nothing() -> None:
    found = pair(([3.0], [2.9]), ([3.0], [3.1]))
    assert found.outcome == "no claim"
    assert in_order(found.loss, "one seed", NEW, OLD, "1 of 2"), found.loss
    assert not re.search("significant|95%", found.loss)


def test_sizes_without_enough_seeds_are_not_counted_as_undecided() -> None:
    found = pair((HIGH, LOW), ([3.0], [2.9]))
    assert found.outcome == "mixed"
    assert in_order(found.loss, NEW, OLD, "1 of 2", "seeds", 1), found.loss
    assert "different" not in found.loss


def test_seeds_that_differ_from_size_to_size_are_not_called_one_each() -> None:
    found = pair(([3.0], [2.9]), (HIGH, [2.9]))
    assert found.outcome == "no claim"
    assert "one seed" not in found.loss
    assert in_order(found.loss, "seeds", NEW, OLD, "2 of 2"), found.loss
    assert "one seed" in pair(([3.0], [2.9]), ([3.0], [2.9])).loss


@pytest.mark.parametrize(
    ("pairs", "numbers"),
    [
        (((RATIO_HIGH, RATIO_LOW), ([0.8], [0.02])), ("1 of 2", 1, "2%", "80% to 85%")),
        (((RATIO_LOW, RATIO_HIGH), ([0.8], [0.02])), ("1 of 2", 1, "2% to 85%", "2% to 80%")),
        (((RATIO_LOW, RATIO_LOW), ([0.8], [0.02])), ("1 of 2", 1, "2%", "2% to 80%")),
        (
            ((RATIO_HIGH, RATIO_LOW), (RATIO_LOW, RATIO_LOW), ([0.8], [0.02])),
            ("1 of 3", 1, 1, "2%", "2% to 85%"),
        ),
    ],
)
def test_embeddings_without_enough_seeds_do_not_count_as_worse(
    pairs: tuple[Pair, ...], numbers: tuple[object, ...]
) -> None:
    found = pair((HIGH, LOW), ratios=losses(*pairs))
    assert found.embeddings_outcome == "mixed"
    assert in_order(found.embeddings, NEW, *numbers, OLD), found.embeddings


@pytest.mark.parametrize(
    ("ratios", "outcome", "numbers", "centred"),
    [
        (CENTRED, "better", ("2%", "85%"), True),
        (losses((RATIO_HIGH, [0.40, 0.41, 0.42])), "better", ("41%", "85%"), False),
        (losses((RATIO_LOW, RATIO_HIGH)), "worse", ("85%", "2%"), False),
        (losses((RATIO_LOW, RATIO_LOW)), "open", ("2%", "2%"), False),
        (losses((RATIO_HIGH, RATIO_LOW), (RATIO_LOW, RATIO_HIGH)), "mixed", ("1 of 2", 1, "2% to 85%"), False),
        ([], "no claim", (), False),
    ],
)
def test_only_embeddings_that_stay_centred_are_called_centred(
    ratios: list[SizedComparison], outcome: str, numbers: tuple[object, ...], centred: bool
) -> None:
    found = pair((HIGH, LOW), ratios=ratios)
    assert found.embeddings_outcome == outcome
    assert in_order(found.embeddings, "embeddings", *((NEW, *numbers, OLD) if numbers else ())), found.embeddings
    assert ("centred" in found.embeddings) is centred
    assert ("%" in found.embeddings) is bool(numbers)


def test_an_unmeasured_loss_is_mentioned() -> None:
    found = verdict_of_pair(OLD, NEW, [], CENTRED)
    assert found.outcome == "no claim"
    assert in_order(found.loss, LOSS, "measured", OLD, NEW), found.loss


def test_the_best_of_many_says_how_many_it_beats() -> None:
    samples = {"coupled n=0": LOW, "coupled n=1": [3.02, 3.03, 3.04], "coupled n=5": HIGH}
    found = verdict_of_many([samples], [{"coupled n=0": RATIO_LOW, "coupled n=5": [0.09, 0.10, 0.11]}])
    assert found.outcome == "open"
    assert in_order(found.loss, "3 optimizers", "coupled n=0", LOSS, "3.02(1)", 1, 2, "95%"), found.loss
    assert "from 2% with coupled n=0 to 10% with coupled n=5" in found.embeddings


def test_the_best_of_many_with_one_seed_claims_nothing() -> None:
    found = verdict_of_many([{"a": [3.0], "b": [3.1], "c": [3.2]}], [])
    assert found.outcome == "no claim"
    assert in_order(found.loss, "3 optimizers", "a", "3.000", "one seed"), found.loss
    assert "95%" not in found.loss


@pytest.mark.parametrize(
    ("sizes", "outcome", "things"),
    [
        (2 * [BEATEN], "better", (2, "a", "both")),
        ([BEATEN, OTHER_BEATEN], "mixed", (2, "a", 1, "b", 1)),
        (3 * [UNCLEAR], "mixed", (3, "a", "all 3")),
        ([BEATEN, BEATEN, UNCLEAR], "mixed", (3, "a", "all 3", 2)),
        ([BEATEN, BEATEN, {"a": HIGH, "b": [3.09, 3.10, 3.12], "c": HIGH}], "mixed", (3, "a", 2, "b", 1)),
    ],
)
def test_wins_over_sizes_are_counted_for_each_winner(
    sizes: list[dict[str, list[float]]], outcome: str, things: tuple[object, ...]
) -> None:
    found = verdict_of_many(sizes, [])
    assert found.outcome == outcome
    assert in_order(found.loss, *things, "95%"), found.loss


@pytest.mark.parametrize(
    ("size", "outcome", "things"),
    [
        ({"a": [3.0], "b": HIGH, "c": HIGH}, "no claim", ("3.000", "one seed")),
        ({"a": LOW, "b": [3.1], "c": [3.2]}, "no claim", ("3.02(1)", "others", "one seed")),
        ({"a": LOW, "b": HIGH, "c": [3.2]}, "open", ("3.02(1)", 1, "2 others", "95%", 1, "one seed")),
        ({"a": LOW, "b": LOW, "c": [3.2], "d": [3.3]}, "open", ("3.02(1)", "3 others", "95%", 2, "one seed")),
        ({"a": LOW, "b": HIGH, "c": HIGH}, "better", ("3.02(1)", "both", "95%")),
        ({"a": LOW, "b": LOW}, "open", ("3.02(1)", "not", "95%")),
    ],
)
def test_an_optimizer_with_one_seed_is_not_tested_against_others_with_more(
    size: dict[str, list[float]], outcome: str, things: tuple[object, ...]
) -> None:
    found = verdict_of_many([size], [])
    assert found.outcome == outcome
    assert in_order(found.loss, f"{len(size)} optimizers", "a", LOSS, *things), found.loss
    assert ("95%" in found.loss) is (outcome != "no claim")
    assert ("seed" in found.loss) is any(len(values) == 1 for values in size.values())


def test_a_single_seed_does_not_invalidate_claims_over_sizes() -> None:
    low, high = {"a": LOW, "b": HIGH, "c": [3.05]}, {"a": HIGH, "b": LOW, "c": [3.05]}
    text = verdict_of_many([low, high], []).loss
    assert in_order(text, 2, "a", 1, "b", 1, "one seed", "95%"), text
    # Green requires a test against all others.
    assert verdict_of_many([low, low], []).outcome == "mixed"
    untested = {"a": HIGH, "b": HIGH, "c": [3.05]}
    text = verdict_of_many([low, untested], []).loss
    assert in_order(text, 2, "a", 1, "c", 1, "seeds", "one seed", "95%"), text
    nothing = verdict_of_many([untested, untested], [])
    assert nothing.outcome == "no claim"
    assert in_order(nothing.loss, 2, "c", "both", "seeds"), nothing.loss
    assert "95%" not in nothing.loss


def test_a_study_of_a_pair_is_judged_as_a_pair(tmp_path: Path) -> None:
    found = verdict(gather_grid(read_results(fabricate(tmp_path / "s", with_runs=False))))
    assert found.outcome == "better"
    assert in_order(found.loss, NEW, LOSS, OLD), found.loss


def test_a_study_in_which_coupled_is_worse_says_so(tmp_path: Path) -> None:
    found = verdict(gather_grid(read_results(fabricate(tmp_path / "s", gain=-0.1, with_runs=False))))
    assert found.outcome == "worse"
    assert in_order(found.loss, NEW, "higher", OLD), found.loss


def test_an_ablation_is_judged_as_a_ranking(tmp_path: Path) -> None:
    exponents = {f"coupled n={n}": scaled(n) for n in (-2, 0, 2)}
    found = verdict(
        gather_grid(read_results(fabricate(tmp_path / "s", optimizers=exponents, noise=0.001, with_runs=False)))
    )
    assert in_order(found.loss, "3 optimizers", "coupled n=0", LOSS), found.loss


def test_ablations_at_one_of_many_sizes_do_not_hide_the_pair(tmp_path: Path) -> None:
    sizes = [("125M", 125_000_000, tokens) for tokens in (10**9, 2 * 10**9)]
    pairs = read_results(fabricate(tmp_path / "a", sizes=sizes, with_runs=False))
    others = read_results(
        fabricate(tmp_path / "b", optimizers={"sgd f=300": sgd(300)}, sizes=sizes[:1], with_runs=False)
    )
    assert in_order(verdict(gather_grid([*pairs, *others])).loss, NEW, OLD, "both")
    assert "3 optimizers" in verdict(gather_grid([*pairs[:6], *others])).loss


def test_a_tied_pair_and_an_untied_pair_are_judged_together(tmp_path: Path) -> None:
    tied = read_results(fabricate(tmp_path / "a", sizes=(("30M", 30_000_000, 10**9),), with_runs=False))
    settings = {f"untied {name}": {**each, "tied": False} for name, each in OPTIMIZERS.items()}
    sizes = (("30M", 49_000_000, 10**9),)
    untied = read_results(fabricate(tmp_path / "b", sizes=sizes, optimizers=settings, with_runs=False))
    found = verdict(gather_grid([*tied, *untied]))
    assert in_order(found.loss, "4 optimizers", NEW, LOSS), found.loss
    # Tied and untied models of one name are compared even if they are the only two.
    alone = [each for each in (*tied, *untied) if each.optimizer in ("standard", "untied coupled")]
    found = verdict(gather_grid(alone))
    assert found.outcome == "better"
    assert in_order(found.loss, "Untied coupled", LOSS, OLD), found.loss


def test_if_one_of_two_models_is_untied_the_output_embeddings_are_named(tmp_path: Path) -> None:
    for tied in (True, False):
        settings = {"standard": STANDARD, "coupled": {**COUPLED, "tied": tied}}
        results = read_results(fabricate(tmp_path / str(tied), optimizers=settings, with_runs=False))
        assert ("output embedding" in verdict(gather_grid(results)).embeddings) is not tied


def test_a_validation_loss_is_not_called_a_test_loss(tmp_path: Path) -> None:
    results = [replace(each, loss_split="val") for each in read_results(fabricate(tmp_path / "a", with_runs=False))]
    assert in_order(verdict(gather_grid(results)).loss, NEW, VALIDATION_LOSS, OLD)
    sizes = [("125M", 125_000_000, tokens) for tokens in (10**9, 2 * 10**9)]
    exponents = {f"coupled n={n}": scaled(n) for n in (-2, 0, 2)}
    for number, settings in enumerate((OPTIMIZERS, exponents)):
        many = read_results(fabricate(tmp_path / f"b{number}", sizes=sizes, optimizers=settings, with_runs=False))
        text = verdict(gather_grid([replace(each, loss_split="val") for each in many])).loss
        assert VALIDATION_LOSS in text
        assert LOSS not in text
        mixed = verdict(
            gather_grid([replace(each, loss_split="val" if each.seed == 1 else "test") for each in many])
        ).loss
        assert LOSS not in mixed
        assert "validation" not in mixed


def test_a_name_from_the_paper_is_used_only_for_its_own_settings(tmp_path: Path) -> None:
    optimizers = {"standard": STANDARD, "coupled": sgd(3)}
    results = read_results(fabricate(tmp_path / "s", optimizers=optimizers, with_runs=False))
    assert [each.label for each in gather_grid(results).variants] == ["standard Adam", "coupled"]
    assert "Coupled Adam" not in verdict(gather_grid(results)).loss


def test_a_single_optimizer_has_nothing_to_compare(tmp_path: Path) -> None:
    found = verdict(
        gather_grid(read_results(fabricate(tmp_path / "s", optimizers={"coupled": COUPLED}, with_runs=False)))
    )
    assert found.outcome == "no claim"
    assert NEW in found.loss
    assert OLD not in found.text


def test_the_pair_starts_with_standard_in_any_order_of_the_study(tmp_path: Path) -> None:
    optimizers = {"sgd f=2": sgd(2), "coupled n=1": scaled(1), "coupled": COUPLED, "standard": STANDARD}
    results = read_results(fabricate(tmp_path / "s", optimizers=optimizers, with_runs=False))
    assert [each.name for each in gather_grid(results).variants] == ["standard", "coupled", "coupled n=1", "sgd f=2"]
    found = gather_grid(results).main_pair
    assert found is not None
    assert [each.name for each in found] == list(OPTIMIZERS)


def untied_runs(folder: Path, names: dict[str, str], **options: Any) -> list[Result]:
    """Runs of untied models, with the settings of the names in `OPTIMIZERS`."""
    settings = {name: {**OPTIMIZERS[of], "tied": False} for name, of in names.items()}
    return read_results(fabricate(folder, optimizers=settings, untied=True, with_runs=False, **options))


def test_for_untied_models_only_the_output_table_is_mentioned(tmp_path: Path) -> None:
    names = {"untied standard": "standard", "untied coupled output": "coupled"}
    two = untied_runs(tmp_path / "two", names)
    one_seed = untied_runs(tmp_path / "one", names, seeds=(1,))
    three = untied_runs(tmp_path / "three", {**names, "untied coupled all": "coupled"})
    for results in (two, one_seed, three):
        text = verdict(gather_grid(results)).embeddings
        assert in_order(text, "mean output embedding", "2%"), text
        assert not re.search("(?<!output )embeddings", text), text
        assert "input" not in text


def test_tied_models_next_to_untied_ones_have_only_one_table(tmp_path: Path) -> None:
    sizes = [("30M", 30_000_000, tokens) for tokens in (10**9, 2 * 10**9)]
    tied = read_results(fabricate(tmp_path / "a", sizes=sizes, with_runs=False))
    untied = untied_runs(tmp_path / "b", {"untied coupled": "coupled"}, sizes=[("30M", 49_000_000, 10**9)])
    found = verdict(gather_grid([*tied, *untied]))
    assert found.embeddings_outcome == "better"
    assert in_order(found.embeddings, NEW, "2%"), found.embeddings
    assert "output" not in found.embeddings


def test_the_first_screen_says_which_table_of_an_untied_model_is_measured(tmp_path: Path) -> None:
    two = untied_runs(tmp_path / "two", {"a": "standard", "b": "coupled"})
    four = untied_runs(tmp_path / "four", {"a": "standard", "b": "coupled", "c": "coupled", "d": "coupled"})
    for results in (two, four):  # side by side, and as rows
        note = table_note(results)
        assert in_order(note, "output table", "input table"), note
        page = render_report(contents_of(results, []), [], tmp_path)
        assert note in page[page.index('id="main-table"') : page.index("<h2>Tables")]
        with_note = [table.name for table in build_tables(gather_grid(results)) if note in table.notes]
        assert with_note == ["main"]
    tied = read_results(fabricate(tmp_path / "tied", with_runs=False))
    assert "untied" not in render_report(contents_of(tied, []), [], tmp_path)
    without = [replace(each, metrics={**each.metrics, "input_iso": None, "input_mu_norm_ratio": None}) for each in two]
    note = table_note(without)
    assert "output table" in note
    assert "input" not in note


def test_the_verdict_starts_with_the_lead_of_the_study(tmp_path: Path) -> None:
    results = read_results(fabricate(tmp_path / "s", with_runs=False))
    plain, turned = (
        verdict(gather_grid(results)),
        verdict(gather_grid(results), ReportSection(lead="embeddings", loss_note="Too small.")),
    )
    assert plain.text == f"{plain.loss} {plain.embeddings}"
    assert turned.text == f"{plain.embeddings} {plain.loss} Too small."
    assert [claim.outcome for claim in turned.claims] == ["better", "better"]
    unmeasured = [replace(each, metrics={**each.metrics, "loss": None}) for each in results]
    assert "Too small." not in verdict(gather_grid(unmeasured), ReportSection(loss_note="Too small.")).text
    alone = [each for each in results if each.optimizer == "coupled"]
    assert (
        verdict(gather_grid(alone), ReportSection(lead="embeddings")).text == verdict(gather_grid(alone)).text
    )  # the advice comes last


def test_a_name_with_a_comma_is_distinguished_from_two_names(tmp_path: Path) -> None:
    optimizers = {"standard": STANDARD, "standard, centred": {**STANDARD, "centre": True}, "coupled": COUPLED}
    results = read_results(fabricate(tmp_path / "s", optimizers=optimizers, with_runs=False))
    assert what_was_compared(gather_grid(results))[0].split("; ") == ["Standard Adam", "standard, centred", NEW]
