"""The two sentences: what they claim, and above all what they do not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fabricated_study import COUPLED, OPTIMIZERS, STANDARD, fabricate, scaled, sgd

from coupled_adam.config.study_sections import ReportSection
from coupled_adam.report.contents import contents_of
from coupled_adam.report.grid import gather_grid
from coupled_adam.report.report_page import render_report, what_was_compared
from coupled_adam.report.result_notes import table_note
from coupled_adam.report.result_tables import build_tables
from coupled_adam.report.significance import Comparison, compare
from coupled_adam.report.verdict import verdict
from coupled_adam.report.verdict_sentences import Verdict, verdict_of_many, verdict_of_pair
from coupled_adam.study.results import Result, read_results

OLD, NEW = "standard Adam", "Coupled Adam"
LOW, HIGH, NEAR_HIGH = [3.01, 3.02, 3.03], [3.10, 3.11, 3.12], [3.09, 3.11, 3.13]
BEATEN, OTHER_BEATEN = {"a": LOW, "b": HIGH, "c": HIGH}, {"a": HIGH, "b": LOW, "c": HIGH}
UNCLEAR = {"a": LOW, "b": LOW, "c": HIGH}
RATIO_LOW, RATIO_HIGH = [0.01, 0.02, 0.03], [0.84, 0.85, 0.86]


def losses(*pairs: tuple[list[float], list[float]]) -> list[Comparison]:
    return [compare(old, new, "lower") for old, new in pairs]


CENTRED = losses((RATIO_HIGH, RATIO_LOW))


def pair(*pairs: tuple[list[float], list[float]], ratios: list[Comparison] = CENTRED) -> Verdict:
    return verdict_of_pair(OLD, NEW, losses(*pairs), ratios)


def test_a_significantly_lower_loss_is_said_with_its_numbers_and_seeds() -> None:
    found = pair((HIGH, LOW))
    assert found.outcome == "better"
    assert found.loss == (
        "Coupled Adam reaches a lower test loss than standard Adam: 3.02(1) against 3.11(1), significant at 95% over "
        "3 seeds each."
    )


def test_a_significantly_higher_loss_is_called_worse() -> None:
    found = pair((LOW, HIGH))
    assert found.outcome == "worse"
    assert found.loss == (
        "Coupled Adam is worse in test loss than standard Adam: 3.11(1) against 3.02(1), significant at 95% over "
        "3 seeds each."
    )


def test_a_lower_loss_within_the_noise_is_no_claim_of_being_better() -> None:
    found = pair(([3.10, 3.12, 3.14], NEAR_HIGH))
    assert found.outcome == "open"
    assert "do not differ significantly" in found.loss
    assert "lower" not in found.loss
    assert "worse" not in found.loss


def test_one_seed_each_claims_nothing_in_either_sentence() -> None:
    found = pair(([3.11], [3.02]), ratios=losses(([0.85], [0.02])))
    assert found.outcome == "no claim"
    assert found.loss.startswith("With one seed each nothing can be claimed about the test loss: 3.020 with Coupled")
    assert found.embeddings == (
        "With Coupled Adam the mean embedding has 2% of a typical embedding's length, against 85% with standard Adam; "
        "with so few seeds this is no claim."
    )
    assert "2%" in found.embeddings
    assert "significant" not in found.loss + found.embeddings


def test_different_numbers_of_seeds_are_named() -> None:
    assert "over 3 and 2 seeds" in pair((HIGH, LOW[:2])).loss


def test_sizes_that_disagree_are_counted() -> None:
    found = pair((HIGH, LOW), (HIGH, LOW), (LOW, HIGH), (NEAR_HIGH, NEAR_HIGH), ratios=CENTRED * 4)
    assert found.outcome == "mixed"
    assert found.loss == (
        "The test loss of Coupled Adam is significantly lower than that of standard Adam in 2 of 4 combinations of "
        "data and model size, significantly higher in 1 and not significantly different in 1 (at 95%)."
    )


@pytest.mark.parametrize(
    ("one", "outcome", "words"),
    [
        ((HIGH, LOW), "better", "significantly lower than that of standard Adam in all 3"),
        ((LOW, HIGH), "worse", "significantly higher than that of standard Adam in all 3"),
        ((HIGH, HIGH), "open", "not significantly different from that of standard Adam in all 3"),
    ],
)
def test_sizes_that_agree_are_said_at_once(one: tuple[list[float], list[float]], outcome: str, words: str) -> None:
    found = pair(one, one, one, ratios=CENTRED * 3)
    assert found.outcome == outcome
    assert f"{words} combinations of data and model size" in found.loss


def test_several_sizes_with_one_seed_each_claim_nothing() -> None:
    found = pair(([3.0], [2.9]), ([3.0], [3.1]))
    assert found.outcome == "no claim"
    assert "nothing can be claimed" in found.loss
    assert "in 1 of 2" in found.loss


def test_sizes_without_enough_seeds_are_not_counted_as_undecided() -> None:
    found = pair((HIGH, LOW), ([3.0], [2.9]))
    assert "in 1 of 2 combinations" in found.loss
    assert "without a claim for want of seeds in 1" in found.loss
    assert "not significantly different" not in found.loss


def test_seeds_that_differ_from_size_to_size_are_not_called_one_each() -> None:
    found = pair(([3.0], [2.9]), (HIGH, [2.9]))
    assert found.loss.startswith("With so few seeds nothing can be claimed; the test loss of Coupled Adam is below")
    assert pair(([3.0], [2.9]), ([3.0], [2.9])).loss.startswith("With one seed each nothing can be claimed;")


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        (
            ((RATIO_HIGH, RATIO_LOW), ([0.8], [0.02])),
            "lie significantly closer to the origin in 1 of 2 (no claim in 1)",
        ),
        (
            ((RATIO_LOW, RATIO_HIGH), ([0.8], [0.02])),
            "lie significantly farther from the origin in 1 of 2 (no claim in",
        ),
        (
            ((RATIO_LOW, RATIO_LOW), ([0.8], [0.02])),
            "lie no closer to the origin at 95% in 1 of 2 (no claim in 1): its",
        ),
        (
            ((RATIO_HIGH, RATIO_LOW), (RATIO_LOW, RATIO_LOW), ([0.8], [0.02])),
            "closer to the origin in 1 of 3 and no closer at 95% in 1 (no claim in 1): its mean embedding",
        ),
    ],
)
def test_embeddings_without_enough_seeds_are_no_failure(
    pairs: tuple[tuple[list[float], list[float]], ...], words: str
) -> None:
    assert words in pair((HIGH, LOW), ratios=losses(*pairs)).embeddings


def test_embeddings_that_stay_centred_are_said_in_percent() -> None:
    assert pair((HIGH, LOW)).embeddings == (
        "The embeddings of Coupled Adam stay centred at the origin: its mean embedding has 2% of a typical embedding's "
        "length, against 85% with standard Adam, significant at 95%."
    )


@pytest.mark.parametrize(
    ("ratios", "words"),
    [
        (losses((RATIO_HIGH, [0.40, 0.41, 0.42])), "lie closer to the origin"),
        (losses((RATIO_LOW, RATIO_HIGH)), "lie farther from the origin"),
        (losses((RATIO_LOW, RATIO_LOW)), "lie no closer to the origin"),
        (
            losses((RATIO_HIGH, RATIO_LOW), (RATIO_LOW, RATIO_HIGH)),
            "significantly closer to the origin in 1 of 2 and significantly farther from it in 1: its",
        ),
        ([], "were not measured"),
    ],
)
def test_embeddings_that_do_not_stay_centred_are_not_called_centred(ratios: list[Comparison], words: str) -> None:
    found = pair((HIGH, LOW), ratios=ratios).embeddings
    assert words in found
    assert "stay centred" not in found


def test_an_unmeasured_loss_is_said() -> None:
    assert verdict_of_pair(OLD, NEW, [], CENTRED).loss == (
        "The test loss was not measured for both standard Adam and Coupled Adam."
    )


def test_the_best_of_many_says_how_many_it_beats() -> None:
    samples = {"coupled n=0": LOW, "coupled n=1": [3.02, 3.03, 3.04], "coupled n=5": HIGH}
    found = verdict_of_many([samples], [{"coupled n=0": RATIO_LOW, "coupled n=5": [0.09, 0.10, 0.11]}])
    assert found.outcome == "open"
    assert found.loss == (
        "Of 3 optimizers, coupled n=0 has the lowest test loss, 3.02(1): 1 of the 2 others is significantly higher "
        "at 95%."
    )
    assert "from 2% (coupled n=0) to 10% (coupled n=5)" in found.embeddings


def test_the_best_of_many_with_one_seed_claims_nothing() -> None:
    found = verdict_of_many([{"a": [3.0], "b": [3.1], "c": [3.2]}], [])
    assert found.outcome == "no claim"
    assert found.loss.endswith("with one seed each, nothing can be claimed.")


def test_the_best_of_many_over_sizes_is_counted() -> None:
    unclear = {"a": HIGH, "b": [3.09, 3.10, 3.12], "c": HIGH}
    found = verdict_of_many([BEATEN, BEATEN, unclear], [])
    assert found.outcome == "mixed"
    assert found.loss == (
        "Over 3 combinations of data and model size, a has the lowest test loss in 2 (significantly) and b in 1 (not "
        "significantly); significantly means at 95% lower than all others."
    )


@pytest.mark.parametrize(
    ("sizes", "outcome", "words"),
    [
        (2 * [BEATEN], "better", "a has the lowest test loss in both, each time significantly lower than all others"),
        ([BEATEN, OTHER_BEATEN], "mixed", "in 1 and b in 1, each time significantly lower than all others (at 95%)."),
        (3 * [UNCLEAR], "mixed", "in all 3, nowhere significantly lower than all others (at 95%)."),
        (
            [BEATEN, BEATEN, UNCLEAR],
            "mixed",
            "in all 3 (significantly in 2); significantly means at 95% lower than all others",
        ),
    ],
)
def test_clear_wins_over_sizes_are_said_of_those_who_win(
    sizes: list[dict[str, list[float]]], outcome: str, words: str
) -> None:
    found = verdict_of_many(sizes, [])
    assert found.outcome == outcome
    assert words in found.loss


@pytest.mark.parametrize(
    ("size", "outcome", "words"),
    [
        ({"a": [3.0], "b": HIGH, "c": HIGH}, "no claim", ", 3.000; it has one seed, so nothing can be claimed."),
        ({"a": LOW, "b": [3.1], "c": [3.2]}, "no claim", "; the others have one seed each, so nothing can be claimed."),
        (
            {"a": LOW, "b": HIGH, "c": [3.2]},
            "open",
            "1 of the 2 others is significantly higher at 95%, 1 cannot be tested (one seed).",
        ),
        (
            {"a": LOW, "b": LOW, "c": [3.2], "d": [3.3]},
            "open",
            "none of the 3 others is significantly higher at 95%, 2 cannot be tested (one seed each).",
        ),
        ({"a": LOW, "b": HIGH, "c": HIGH}, "better", "3.02(1): both others are significantly higher at 95%."),
        ({"a": LOW, "b": LOW}, "open", "3.02(1): the other is not significantly higher at 95%."),
    ],
)
def test_what_has_one_seed_beside_others_with_more_is_not_tested(
    size: dict[str, list[float]], outcome: str, words: str
) -> None:
    found = verdict_of_many([size], [])
    assert found.outcome == outcome
    assert found.loss.endswith(words)


def test_one_seed_beside_more_does_not_undo_what_can_be_claimed_over_sizes() -> None:
    low, high = {"a": LOW, "b": HIGH, "c": [3.05]}, {"a": HIGH, "b": LOW, "c": [3.05]}
    assert verdict_of_many([low, high], []).loss.endswith(
        "a has the lowest test loss in 1 and b in 1, each time significantly lower than all others with more than one "
        "seed (at 95%)."
    )
    # Green is for what all others were tested for.
    assert verdict_of_many([low, low], []).outcome == "mixed"
    untested = {"a": HIGH, "b": HIGH, "c": [3.05]}
    assert verdict_of_many([low, untested], []).loss.endswith(
        "a has the lowest test loss in 1 (significantly) and c in 1 (no claim for want of seeds); significantly means "
        "at 95% lower than all others with more than one seed."
    )
    nothing = verdict_of_many([untested, untested], [])
    assert nothing.outcome == "no claim"
    assert nothing.loss.endswith("c has the lowest test loss in both; with so few seeds, nothing can be claimed.")


def test_a_study_of_a_pair_is_judged_as_a_pair(tmp_path: Path) -> None:
    found = verdict(gather_grid(read_results(fabricate(tmp_path / "s", with_runs=False))))
    assert found.outcome == "better"
    assert found.loss.startswith("Coupled Adam reaches a lower test loss than standard Adam")


def test_a_study_in_which_coupled_is_worse_says_so(tmp_path: Path) -> None:
    found = verdict(gather_grid(read_results(fabricate(tmp_path / "s", gain=-0.1, with_runs=False))))
    assert found.outcome == "worse"
    assert "Coupled Adam is worse" in found.loss


def test_an_ablation_is_judged_as_many(tmp_path: Path) -> None:
    exponents = {f"coupled n={n}": scaled(n) for n in (-2, 0, 2)}
    found = verdict(
        gather_grid(read_results(fabricate(tmp_path / "s", optimizers=exponents, noise=0.001, with_runs=False)))
    )
    assert found.loss.startswith("Of 3 optimizers, coupled n=0 has the lowest test loss")


def test_ablations_at_one_of_many_sizes_do_not_hide_the_pair(tmp_path: Path) -> None:
    sizes = [("125M", 125_000_000, tokens) for tokens in (10**9, 2 * 10**9)]
    pairs = read_results(fabricate(tmp_path / "a", sizes=sizes, with_runs=False))
    others = read_results(
        fabricate(tmp_path / "b", optimizers={"sgd f=300": sgd(300)}, sizes=sizes[:1], with_runs=False)
    )
    assert "both combinations" in verdict(gather_grid([*pairs, *others])).loss
    assert verdict(gather_grid([*pairs[:6], *others])).loss.startswith("Of 3 optimizers")


def test_a_pair_beside_as_many_other_sizes_is_not_the_whole_story(tmp_path: Path) -> None:
    tied = read_results(fabricate(tmp_path / "a", sizes=(("30M", 30_000_000, 10**9),), with_runs=False))
    settings = {f"untied {name}": {**each, "tied": False} for name, each in OPTIMIZERS.items()}
    sizes = (("30M", 49_000_000, 10**9),)
    untied = read_results(fabricate(tmp_path / "b", sizes=sizes, optimizers=settings, with_runs=False))
    found = verdict(gather_grid([*tied, *untied]))
    assert found.loss.startswith("Of 4 optimizers, Coupled Adam has the lowest test loss")
    # Tied and untied models of one name stand against each other even where they are the only two.
    alone = [each for each in (*tied, *untied) if each.optimizer in ("standard", "untied coupled")]
    assert verdict(gather_grid(alone)).loss.startswith("Untied coupled reaches a lower test loss than standard Adam")


def test_where_one_of_two_models_is_untied_the_output_embeddings_are_named(tmp_path: Path) -> None:
    for tied, words in ((True, "The embeddings of"), (False, "The output embeddings of")):
        settings = {"standard": STANDARD, "coupled": {**COUPLED, "tied": tied}}
        results = read_results(fabricate(tmp_path / str(tied), optimizers=settings, with_runs=False))
        assert verdict(gather_grid(results)).embeddings.startswith(words)


def test_a_validation_loss_is_not_called_a_test_loss(tmp_path: Path) -> None:
    results = [replace(each, loss_split="val") for each in read_results(fabricate(tmp_path / "a", with_runs=False))]
    assert verdict(gather_grid(results)).loss.startswith(
        "Coupled Adam reaches a lower validation loss than standard Adam"
    )
    sizes = [("125M", 125_000_000, tokens) for tokens in (10**9, 2 * 10**9)]
    exponents = {f"coupled n={n}": scaled(n) for n in (-2, 0, 2)}
    for number, settings in enumerate((OPTIMIZERS, exponents)):
        many = read_results(fabricate(tmp_path / f"b{number}", sizes=sizes, optimizers=settings, with_runs=False))
        text = verdict(gather_grid([replace(each, loss_split="val") for each in many])).loss
        assert "validation loss" in text
        assert "test" not in text
        mixed = verdict(
            gather_grid([replace(each, loss_split="val" if each.seed == 1 else "test") for each in many])
        ).loss
        assert "test" not in mixed
        assert "validation" not in mixed


def test_a_name_of_the_paper_is_kept_for_what_it_means(tmp_path: Path) -> None:
    optimizers = {"standard": STANDARD, "coupled": sgd(3)}
    results = read_results(fabricate(tmp_path / "s", optimizers=optimizers, with_runs=False))
    assert [each.label for each in gather_grid(results).variants] == ["standard Adam", "coupled"]
    assert "Coupled Adam" not in verdict(gather_grid(results)).loss


def test_a_single_optimizer_has_nothing_to_compare(tmp_path: Path) -> None:
    found = verdict(
        gather_grid(read_results(fabricate(tmp_path / "s", optimizers={"coupled": COUPLED}, with_runs=False)))
    )
    assert found.outcome == "no claim"
    assert "Only Coupled Adam has finished runs" in found.loss


def test_the_pair_is_standard_first_whatever_the_order_of_the_study(tmp_path: Path) -> None:
    optimizers = {"sgd f=2": sgd(2), "coupled n=1": scaled(1), "coupled": COUPLED, "standard": STANDARD}
    results = read_results(fabricate(tmp_path / "s", optimizers=optimizers, with_runs=False))
    assert [each.name for each in gather_grid(results).variants] == ["standard", "coupled", "coupled n=1", "sgd f=2"]
    found = gather_grid(results).main_pair
    assert found is not None
    assert [each.name for each in found] == list(OPTIMIZERS)


def untied_runs(folder: Path, names: dict[str, str], **options: Any) -> list[Result]:
    """Runs of untied models, the settings by the names in `OPTIMIZERS`."""
    settings = {name: {**OPTIMIZERS[of], "tied": False} for name, of in names.items()}
    return read_results(fabricate(folder, optimizers=settings, untied=True, with_runs=False, **options))


def test_of_untied_models_only_the_output_table_is_spoken_of(tmp_path: Path) -> None:
    names = {"untied standard": "standard", "untied coupled output": "coupled"}
    two = untied_runs(tmp_path / "two", names)
    assert verdict(gather_grid(two)).embeddings.startswith(
        "The output embeddings of untied coupled output stay centred at the origin: its mean output embedding has 2%"
    )
    one_seed = untied_runs(tmp_path / "one", names, seeds=(1,))
    assert verdict(gather_grid(one_seed)).embeddings.startswith(
        "With untied coupled output the mean output embedding has 2%"
    )
    three = untied_runs(tmp_path / "three", {**names, "untied coupled all": "coupled"})
    assert verdict(gather_grid(three)).embeddings.startswith("The mean output embedding has from 2%")


def test_tied_models_beside_untied_ones_have_but_one_table(tmp_path: Path) -> None:
    sizes = [("30M", 30_000_000, tokens) for tokens in (10**9, 2 * 10**9)]
    tied = read_results(fabricate(tmp_path / "a", sizes=sizes, with_runs=False))
    untied = untied_runs(tmp_path / "b", {"untied coupled": "coupled"}, sizes=[("30M", 49_000_000, 10**9)])
    assert verdict(gather_grid([*tied, *untied])).embeddings.startswith("The embeddings of Coupled Adam stay centred")


def test_the_first_screen_says_which_table_of_an_untied_model_is_measured(tmp_path: Path) -> None:
    note = "The embeddings of untied models are measured in the output table; Further measures has the input table."
    two = untied_runs(tmp_path / "two", {"a": "standard", "b": "coupled"})
    four = untied_runs(tmp_path / "four", {"a": "standard", "b": "coupled", "c": "coupled", "d": "coupled"})
    for results in (two, four):  # side by side, and as rows
        page = render_report(contents_of(results, []), [], tmp_path)
        assert note in page[page.index('id="main-table"') : page.index("<h2>Tables")]
        with_note = [table.name for table in build_tables(gather_grid(results)) if note in table.notes]
        assert with_note == ["main"]
    tied = read_results(fabricate(tmp_path / "tied", with_runs=False))
    assert "untied" not in render_report(contents_of(tied, []), [], tmp_path)
    without = [replace(each, metrics={**each.metrics, "input_iso": None, "input_mu_norm_ratio": None}) for each in two]
    assert table_note(without) == "The embeddings of untied models are measured in the output table."


def test_the_verdict_begins_with_what_the_study_leads_with(tmp_path: Path) -> None:
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
    )  # what to do comes last


def test_a_name_with_a_comma_is_told_from_two_names(tmp_path: Path) -> None:
    optimizers = {"standard": STANDARD, "standard, centred": {**STANDARD, "centre": True}, "coupled": COUPLED}
    results = read_results(fabricate(tmp_path / "s", optimizers=optimizers, with_runs=False))
    assert what_was_compared(gather_grid(results))[0] == "Standard Adam; standard, centred; Coupled Adam"
