"""Whether two models give the same probabilities: their log-probabilities on random tokens and on a text.

Legend: V vocabulary rows, T time.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from coupled_adam.base.errors import UserError
from coupled_adam.inspection.recentring.finished_model import FinishedModel

RANDOM, TEXT = "random tokens", "text"
LONGEST = 128
SEQUENCES = 2
SEED = 0
# Some of everything that tokenizers treat in their own ways: sentences, names, numbers, code, other scripts.
SAMPLE = """The lighthouse at the end of the harbour was built in 1887, and for the first forty years a keeper lived \
in it with his family. "You could hear the fog horn as far as the mill," his daughter wrote later. Since 1961 the lamp \
has been switched on and off by a clock.

def area(width: float, height: float) -> float:
    return width * height  # square metres

Die Fähre fährt um 7:45 Uhr; le billet coûte 12,50 €. Москва, 東京 and Αθήνα are capitals. See page 3."""


@dataclass(frozen=True)
class Difference:
    """How much the log-probabilities of two models differ."""

    tokens: str
    """RANDOM or TEXT."""
    positions: int
    """At how many positions all V log-probabilities were compared."""
    largest: float
    """Largest absolute difference of a log-probability, in nats."""
    mean_kl: float
    """Mean Kullback-Leibler divergence of the new model from the old one, in nats."""


Probes = Mapping[str, Tensor]  # each (n, T): tokens by what they are


def probes_of(model: FinishedModel) -> tuple[Probes, list[str]]:
    """The tokens that both models are asked with, and why there is no text where there is none."""
    length = min(model.context, LONGEST)
    generator = torch.Generator().manual_seed(SEED)
    probes = {RANDOM: torch.randint(model.rows, (SEQUENCES, length), generator=generator)}
    if model.tokenizer is None:
        return probes, ["no tokenizer.json with the model: probabilities are compared on random tokens only"]
    try:
        tokens = torch.tensor(model.tokenizer().encode(SAMPLE))
    except (UserError, OSError) as error:
        return probes, [f"the tokenizer cannot be used ({error}): probabilities are compared on random tokens only"]
    if not len(tokens):
        return probes, ["the tokenizer knows nothing of the text: probabilities are compared on random tokens only"]
    if int(tokens.max()) >= model.head.shape[0]:
        return probes, [
            f"the tokenizer has tokens beyond the {model.head.shape[0]:,} rows of the table, so it is not that of this "
            "model: probabilities are compared on random tokens only"
        ]
    texts = tokens.split(length)[:SEQUENCES]
    return probes | {TEXT: torch.stack([text for text in texts if len(text) == len(texts[0])])}, []


@torch.no_grad()
def log_probabilities(model: FinishedModel, probes: Probes) -> dict[str, Tensor]:
    """The log-probabilities (n * T, V) of every next token, in float64."""
    return {
        name: torch.cat([F.log_softmax(model.logits(row[None])[0].double(), dim=-1) for row in tokens])
        for name, tokens in probes.items()
    }


def differences(before: Mapping[str, Tensor], model: FinishedModel, probes: Probes) -> list[Difference]:
    """Compare the log-probabilities of a model with those `before`.

    A number that is not finite in one of them makes the difference infinite.
    """
    found = []
    for name, ours in log_probabilities(model, probes).items():
        theirs = before[name]
        gap = torch.where(ours == theirs, 0.0, (ours - theirs).abs()).nan_to_num(nan=torch.inf)
        kl = (theirs.exp() * (theirs - ours)).nan_to_num(nan=0.0).sum(-1).mean()  # 0 * -inf: a token that cannot be
        largest = float(gap.max())
        found.append(Difference(name, len(ours), largest, max(0.0, float(kl)) if largest < torch.inf else torch.inf))
    return found
