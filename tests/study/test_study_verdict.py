"""The two sentences: what they claim, and above all what they do not."""

from dataclasses import replace
from pathlib import Path

import pytest
from fabricated_study import COUPLED, OPTIMIZERS, STANDARD, fabricate, scaled, sgd

from coupled_adam.study.report_data import main_pair, variants
from coupled_adam.study.results import read_results
from coupled_adam.study.statistics import Comparison, compare
from coupled_adam.study.verdict import Verdict, verdict, verdict_of_many, verdict_of_pair

OLD, NEW = "standard Adam", "Coupled Adam"
LOW, HIGH, NEAR_HIGH = [3.01, 3.02, 3.03], [3.10, 3.11, 3.12], [3.09, 3.11, 3.13]
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
            "closer to the origin in 1 of 2, significantly farther",
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
    clear, unclear = {"a": LOW, "b": HIGH, "c": HIGH}, {"a": HIGH, "b": [3.09, 3.10, 3.12], "c": HIGH}
    found = verdict_of_many([clear, clear, unclear], [])
    assert found.outcome == "mixed"
    assert found.loss == (
        "Over 3 combinations of data and model size, a has the lowest test loss in 2, b in 1; it is significantly "
        "lower than all others in 2."
    )


def test_no_clear_win_over_sizes_is_said_in_words() -> None:
    found = verdict_of_many([{"a": HIGH, "b": NEAR_HIGH, "c": HIGH}] * 2, [])
    assert found.loss.endswith("; in none of them is it significantly lower than all others.")


def test_a_study_of_a_pair_is_judged_as_a_pair(tmp_path: Path) -> None:
    found = verdict(read_results(fabricate(tmp_path / "s", with_runs=False)))
    assert found.outcome == "better"
    assert found.loss.startswith("Coupled Adam reaches a lower test loss than standard Adam")


def test_a_study_in_which_coupled_is_worse_says_so(tmp_path: Path) -> None:
    found = verdict(read_results(fabricate(tmp_path / "s", gain=-0.1, with_runs=False)))
    assert found.outcome == "worse"
    assert "Coupled Adam is worse" in found.loss


def test_an_ablation_is_judged_as_many(tmp_path: Path) -> None:
    exponents = {f"coupled n={n}": scaled(n) for n in (-2, 0, 2)}
    found = verdict(read_results(fabricate(tmp_path / "s", optimizers=exponents, noise=0.001, with_runs=False)))
    assert found.loss.startswith("Of 3 optimizers, coupled n=0 has the lowest test loss")


def test_ablations_at_one_of_many_sizes_do_not_hide_the_pair(tmp_path: Path) -> None:
    sizes = [("125M", 125_000_000, tokens) for tokens in (10**9, 2 * 10**9)]
    pairs = read_results(fabricate(tmp_path / "a", sizes=sizes, with_runs=False))
    others = read_results(
        fabricate(tmp_path / "b", optimizers={"sgd f=300": sgd(300)}, sizes=sizes[:1], with_runs=False)
    )
    assert "all 2 combinations" in verdict([*pairs, *others]).loss
    assert verdict([*pairs[:6], *others]).loss.startswith("Of 3 optimizers")


def test_a_pair_beside_as_many_other_sizes_is_not_the_whole_story(tmp_path: Path) -> None:
    tied = read_results(fabricate(tmp_path / "a", sizes=(("30M", 30_000_000, 10**9),), with_runs=False))
    settings = {f"untied {name}": {**each, "tied": False} for name, each in OPTIMIZERS.items()}
    sizes = (("30M", 49_000_000, 10**9),)
    untied = read_results(fabricate(tmp_path / "b", sizes=sizes, optimizers=settings, with_runs=False))
    found = verdict([*tied, *untied])
    assert found.loss.startswith("Of 4 optimizers, Coupled Adam has the lowest test loss")
    # Tied and untied models of one name stand against each other even where they are the only two.
    alone = [each for each in (*tied, *untied) if each.optimizer in ("standard", "untied coupled")]
    assert verdict(alone).loss.startswith("Untied coupled reaches a lower test loss than standard Adam")


def test_a_validation_loss_is_not_called_a_test_loss(tmp_path: Path) -> None:
    results = [replace(each, loss_split="val") for each in read_results(fabricate(tmp_path / "a", with_runs=False))]
    assert verdict(results).loss.startswith("Coupled Adam reaches a lower validation loss than standard Adam")
    sizes = [("125M", 125_000_000, tokens) for tokens in (10**9, 2 * 10**9)]
    exponents = {f"coupled n={n}": scaled(n) for n in (-2, 0, 2)}
    for number, settings in enumerate((OPTIMIZERS, exponents)):
        many = read_results(fabricate(tmp_path / f"b{number}", sizes=sizes, optimizers=settings, with_runs=False))
        text = verdict([replace(each, loss_split="val") for each in many]).loss
        assert "validation loss" in text
        assert "test" not in text
        mixed = verdict([replace(each, loss_split="val" if each.seed == 1 else "test") for each in many]).loss
        assert "test" not in mixed
        assert "validation" not in mixed


def test_a_name_of_the_paper_is_kept_for_what_it_means(tmp_path: Path) -> None:
    optimizers = {"standard": STANDARD, "coupled": sgd(3)}
    results = read_results(fabricate(tmp_path / "s", optimizers=optimizers, with_runs=False))
    assert [each.label for each in variants(results)] == ["standard Adam", "coupled"]
    assert "Coupled Adam" not in verdict(results).loss


def test_a_single_optimizer_has_nothing_to_compare(tmp_path: Path) -> None:
    found = verdict(read_results(fabricate(tmp_path / "s", optimizers={"coupled": COUPLED}, with_runs=False)))
    assert found.outcome == "no claim"
    assert "Only Coupled Adam has finished runs" in found.loss


def test_the_pair_is_standard_first_whatever_the_order_of_the_study(tmp_path: Path) -> None:
    optimizers = {"sgd f=2": sgd(2), "coupled n=1": scaled(1), "coupled": COUPLED, "standard": STANDARD}
    results = read_results(fabricate(tmp_path / "s", optimizers=optimizers, with_runs=False))
    assert [each.name for each in variants(results)] == ["standard", "coupled", "coupled n=1", "sgd f=2"]
    found = main_pair(results)
    assert found is not None
    assert [each.name for each in found] == list(OPTIMIZERS)
