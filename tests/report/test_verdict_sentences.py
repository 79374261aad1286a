"""The wording of the verdict, tested only here; all other tests check outcomes, names and numbers."""

import pytest
from verdict_samples import (
    BEATEN,
    HIGH,
    LOW,
    NEAR_HIGH,
    OTHER_BEATEN,
    RATIO_HIGH,
    RATIO_LOW,
    UNCLEAR,
    losses,
    pair,
)

from coupled_adam.report.several_optimizers import AgainstBaseline, verdict_against_baseline, verdict_of_many
from coupled_adam.report.verdict_sentences import PAPERS_TEST, Outcome

SIZES = "combinations of data and model size"
FIRST, NO_TEST = "in 1 of 2 sizes (at 1B tokens, S)", "untested for lack of seeds in 1 (at 2B tokens, S)"
LENGTH = "of a typical embedding's length"
CLOSER, FARTHER, SAME, UNTESTED = (
    (RATIO_HIGH, RATIO_LOW),
    (RATIO_LOW, RATIO_HIGH),
    (RATIO_LOW, RATIO_LOW),
    ([0.8], [0.02]),
)
LOW_C, HIGH_C, ALL_HIGH_C = (
    {"a": LOW, "b": HIGH, "c": [3.05]},
    {"a": HIGH, "b": LOW, "c": [3.05]},
    {"a": HIGH, "b": HIGH, "c": [3.05]},
)

LOSS_OF_A_PAIR = {
    "Coupled Adam reaches a lower test loss than standard Adam: 3.02(1) against 3.11(1), significant at 95% over 3 "
    "seeds each.": [(HIGH, LOW)],
    "Coupled Adam reaches a lower test loss than standard Adam: 3.01(1) against 3.11(1), significant at 95% over 3 "
    "and 2 seeds.": [(HIGH, LOW[:2])],
    "Coupled Adam reaches a higher test loss than standard Adam: 3.11(1) against 3.02(1), significant at 95% over 3 "
    "seeds each.": [(LOW, HIGH)],
    "The test losses of Coupled Adam (3.11(2)) and standard Adam (3.12(2)) do not differ significantly at 95% over 3 "
    "seeds each.": [([3.10, 3.12, 3.14], NEAR_HIGH)],
    "With one seed each nothing can be claimed about the test loss: 3.020 with Coupled Adam, 3.110 with standard "
    "Adam.": [([3.11], [3.02])],
    "The test loss of Coupled Adam is significantly lower than that of standard Adam in 2 of 4 "
    f"{SIZES} (at 1B tokens, S; 2B tokens, S), significantly higher in 1 (at 3B tokens, S) and not significantly "
    "different in 1 (at 4B tokens, S); tested at 95%.": [
        (HIGH, LOW),
        (HIGH, LOW),
        (LOW, HIGH),
        (NEAR_HIGH, NEAR_HIGH),
    ],
    f"The test loss of Coupled Adam is significantly lower than that of standard Adam in all 3 {SIZES} (at 95%).": 3
    * [(HIGH, LOW)],
    f"The test loss of Coupled Adam is significantly higher than that of standard Adam in all 3 {SIZES} (at 95%).": 3
    * [(LOW, HIGH)],
    "The test loss of Coupled Adam is not significantly different from that of standard Adam in all 3 "
    f"{SIZES} (at 95%).": 3 * [(HIGH, HIGH)],
    f"The test loss of Coupled Adam is significantly lower than that of standard Adam in 1 of 2 {SIZES} (at 1B "
    "tokens, S) and untested for lack of seeds in 1 (at 2B tokens, S); tested at 95%.": [(HIGH, LOW), ([3.0], [2.9])],
    "With one seed each nothing can be claimed; the test loss of Coupled Adam is below that of standard Adam in 1 of 2 "
    f"{SIZES}.": [([3.0], [2.9]), ([3.0], [3.1])],
    "With so few seeds nothing can be claimed; the test loss of Coupled Adam is below that of standard Adam in 2 of 2 "
    f"{SIZES}.": [([3.0], [2.9]), (HIGH, [2.9])],
    "The test loss was not measured for both standard Adam and Coupled Adam.": [],
}
EMBEDDINGS_OF_A_PAIR = {
    f"The embeddings of Coupled Adam stay centred at the origin: its mean embedding has 2% {LENGTH}, against 85% with "
    "standard Adam, significant at 95%.": [CLOSER],
    f"The embeddings of Coupled Adam stay centred at the origin: its mean embedding has 2% {LENGTH}, against 85% with "
    "standard Adam, significant at 95% in both.": [CLOSER, CLOSER],
    f"The embeddings of Coupled Adam lie closer to the origin: its mean embedding has 41% {LENGTH}, against 85% with "
    "standard Adam, significant at 95%.": [(RATIO_HIGH, [0.40, 0.41, 0.42])],
    f"The embeddings of Coupled Adam lie farther from the origin: its mean embedding has 85% {LENGTH}, against 2% with "
    "standard Adam, significant at 95%.": [FARTHER],
    "The embeddings of Coupled Adam are not significantly closer to the origin at 95%: its mean embedding has 2% "
    f"{LENGTH}, against 2% with standard Adam.": [SAME],
    f"With Coupled Adam the mean embedding has 2% {LENGTH}, against 85% with standard Adam; there are too few seeds "
    "to test this.": [([0.85], [0.02])],
    f"The embeddings of Coupled Adam are significantly closer to the origin {FIRST} and {NO_TEST}: its mean embedding "
    f"has 2% {LENGTH}, against 80% to 85% with standard Adam.": [CLOSER, UNTESTED],
    f"The embeddings of Coupled Adam are significantly farther from the origin {FIRST} and {NO_TEST}: its mean "
    f"embedding has 2% to 85% {LENGTH}, against 2% to 80% with standard Adam.": [FARTHER, UNTESTED],
    f"The embeddings of Coupled Adam are not significantly closer to the origin {FIRST} and {NO_TEST}: its mean "
    f"embedding has 2% {LENGTH}, against 2% to 80% with standard Adam.": [SAME, UNTESTED],
    "The embeddings of Coupled Adam are significantly closer to the origin in 1 of 3 sizes (at 1B tokens, S), not "
    "significantly closer in 1 (at 2B tokens, S) and untested for lack of seeds in 1 (at 3B tokens, S): its mean "
    f"embedding has 2% {LENGTH}, against 2% to 85% with standard Adam.": [CLOSER, SAME, UNTESTED],
    f"The embeddings of Coupled Adam are significantly closer to the origin {FIRST} and significantly farther from it "
    f"in 1 (at 2B tokens, S): its mean embedding has 2% to 85% {LENGTH}, against 2% to 85% with standard Adam.": [
        CLOSER,
        FARTHER,
    ],
    "The embeddings were not measured.": [],
}
LOSS_OF_MANY = {
    f"Of 3 optimizers, a has the lowest test loss, 3.02(1): both others are significantly higher "
    f"at 95%{PAPERS_TEST}.": [BEATEN],
    f"Of 2 optimizers, a has the lowest test loss, 3.02(1): the other is not significantly higher "
    f"at 95%{PAPERS_TEST}.": [{"a": LOW, "b": LOW}],
    "Of 3 optimizers, a has the lowest test loss, 3.02(1): 1 of the 2 others is significantly higher at "
    f"95%{PAPERS_TEST}.": [UNCLEAR],
    "Of 3 optimizers, a has the lowest test loss, 3.02(1): 1 of the 2 others is significantly higher at "
    f"95%{PAPERS_TEST}; 1 cannot be tested (one seed).": [{"a": LOW, "b": HIGH, "c": [3.2]}],
    "Of 4 optimizers, a has the lowest test loss, 3.02(1): none of the 3 others is significantly higher at "
    f"95%{PAPERS_TEST}; 2 cannot be tested (one seed each).": [{"a": LOW, "b": LOW, "c": [3.2], "d": [3.3]}],
    "Of 3 optimizers, a has the lowest test loss, 3.000; with one seed each, nothing can be claimed.": [
        {"a": [3.0], "b": [3.1], "c": [3.2]}
    ],
    "Of 3 optimizers, a has the lowest test loss, 3.000; it has one seed, so nothing can be claimed.": [
        {"a": [3.0], "b": HIGH, "c": HIGH}
    ],
    "Of 3 optimizers, a has the lowest test loss, 3.02(1); the others have one seed each, so nothing can be claimed.": [
        {"a": LOW, "b": [3.1], "c": [3.2]}
    ],
    f"Over 2 {SIZES}, a has the lowest test loss in both, each time significantly lower than all others (at "
    f"95%{PAPERS_TEST}).": [
        BEATEN,
        BEATEN,
    ],
    f"Over 2 {SIZES}, a has the lowest test loss in 1 and b in 1, each time significantly lower than all others (at "
    f"95%{PAPERS_TEST}).": [BEATEN, OTHER_BEATEN],
    f"Over 3 {SIZES}, a has the lowest test loss in all 3, nowhere significantly lower than all others (at "
    f"95%{PAPERS_TEST}).": [
        UNCLEAR,
        UNCLEAR,
        UNCLEAR,
    ],
    f"Over 3 {SIZES}, a has the lowest test loss in all 3 (significantly in 2); significantly: lower than all "
    f"others at 95%{PAPERS_TEST}.": [BEATEN, BEATEN, UNCLEAR],
    f"Over 3 {SIZES}, a has the lowest test loss in 2 (significantly) and b in 1 (not significantly); significantly: "
    f"lower than all others at 95%{PAPERS_TEST}.": [BEATEN, BEATEN, {"a": HIGH, "b": [3.09, 3.10, 3.12], "c": HIGH}],
    f"Over 2 {SIZES}, a has the lowest test loss in 1 and b in 1, each time significantly lower than all others with "
    f"more than one seed (at 95%{PAPERS_TEST}).": [LOW_C, HIGH_C],
    f"Over 2 {SIZES}, a has the lowest test loss in 1 (significantly) and c in 1 (no claim for lack of seeds); "
    f"significantly: lower than all others with more than one seed at 95%{PAPERS_TEST}.": [LOW_C, ALL_HIGH_C],
    f"Over 2 {SIZES}, c has the lowest test loss in both; with so few seeds, nothing can be claimed.": [
        ALL_HIGH_C,
        ALL_HIGH_C,
    ],
    "The test loss was not measured.": [],
}
EMBEDDINGS_OF_MANY = {
    "The length of the mean embedding, relative to a typical embedding, ranges from 2% with a to 10% with b; 0% means "
    "centred at the origin.": [{"a": RATIO_LOW, "b": [0.09, 0.10, 0.11]}],
    f"With every optimizer, the mean embedding has 2% {LENGTH}; 0% means centred at the origin.": [
        {"a": RATIO_LOW, "b": RATIO_LOW}
    ],
    "The embeddings were not measured.": [],
}
CORRECTED = ", corrected for 4 comparisons"


def against(*outcomes: dict[str, Outcome]) -> list[AgainstBaseline]:
    """Comparisons with the baseline a, by optimizer; one mapping per size."""
    return [
        AgainstBaseline(f"{place}B tokens, S", "a", name, outcome)
        for place, of_size in enumerate(outcomes, 1)
        for name, outcome in of_size.items()
    ]


LOSS_AGAINST_A = {
    "Of 3 optimizers, b has the lowest test loss, 3.02(1). Compared with a at 3.11(1), b is significantly lower and c "
    f"is not significantly different; tested at 95%{CORRECTED}.": (
        [OTHER_BEATEN],
        against({"b": "better", "c": "open"}),
    ),
    "Of 3 optimizers, a has the lowest test loss, 3.02(1). Compared with it, b and c are significantly higher; tested "
    f"at 95%{CORRECTED}.": ([BEATEN], against({"b": "worse", "c": "worse"})),
    f"Over 2 {SIZES}, a has the lowest test loss in 1 and b in 1. Compared with a, b (at 2B tokens, S) is "
    "significantly lower, c (both sizes) is significantly higher and b (at 1B tokens, S) is untested for lack of "
    f"common seeds; tested at 95%{CORRECTED}.": (
        [BEATEN, OTHER_BEATEN],
        against({"b": "no claim", "c": "worse"}, {"b": "better", "c": "worse"}),
    ),
    "Of 9 optimizers, a has the lowest test loss, 3.02(1). Compared with it, 1 of 8 losses is significantly lower and "
    f"7 are not significantly different; tested at 95%{CORRECTED}.": (
        [{"a": LOW, **dict.fromkeys("bcdefghi", HIGH)}],
        against({"b": "better", **dict.fromkeys("cdefghi", "open")}),
    ),
    "Of 3 optimizers, a has the lowest test loss, 3.000; with one seed each, nothing can be claimed.": (
        [{"a": [3.0], "b": [3.1], "c": [3.2]}],
        against(dict.fromkeys("bc", "no claim")),
    ),
    "Of 3 optimizers, a has the lowest test loss, 3.02(1); no other optimizer shares two seeds with a, so nothing can "
    "be claimed.": ([BEATEN], against(dict.fromkeys("bc", "no claim"))),
}


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        *((pair(*pairs).loss, sentence) for sentence, pairs in LOSS_OF_A_PAIR.items()),
        *(
            (pair((HIGH, LOW), ratios=losses(*pairs)).embeddings, sentence)
            for sentence, pairs in EMBEDDINGS_OF_A_PAIR.items()
        ),
        *((verdict_of_many(sizes, []).loss, sentence) for sentence, sizes in LOSS_OF_MANY.items()),
        *(
            (verdict_against_baseline(sizes, [], compared, test=CORRECTED).loss, sentence)
            for sentence, (sizes, compared) in LOSS_AGAINST_A.items()
        ),
        *((verdict_of_many([], sizes).embeddings, sentence) for sentence, sizes in EMBEDDINGS_OF_MANY.items()),
    ],
)
def test_the_verdict_has_this_wording(said: str, sentence: str) -> None:
    assert said == sentence
