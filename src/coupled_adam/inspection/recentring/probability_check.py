"""Compare the log-probabilities of two models on random tokens and on text.

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
# Sentences, names, numbers, code and other scripts, which tokenizers treat differently.
SAMPLE = """The lighthouse at the end of the harbour was built in 1887, and for the first forty years a keeper lived \
in it with his family. "You could hear the fog horn as far as the mill," his daughter wrote later. Since 1961 the lamp \
has been switched on and off by a clock.

def area(width: float, height: float) -> float:
    return width * height  # square metres

Die Fähre fährt um 7:45 Uhr; le billet coûte 12,50 €. Москва, 東京 and Αθήνα are capitals. See page 3."""


@dataclass(frozen=True)
class Difference:
    """Difference between the log-probabilities of two models."""

    tokens: str
    """RANDOM or TEXT."""
    positions: int
    """Number of positions where all V log-probabilities were compared."""
    largest: float
    """Largest absolute difference of a log-probability, in nats."""
    mean_kl: float
    """Mean Kullback-Leibler divergence of the new model from the old one, in nats."""


Probes = Mapping[str, Tensor]  # tokens (n, T) by kind


def probes_of(model: FinishedModel) -> tuple[Probes, list[str]]:
    """Tokens for the comparison, and if there is no text, the reason."""
    length = min(model.context, LONGEST)
    generator = torch.Generator().manual_seed(SEED)
    probes = {RANDOM: torch.randint(model.rows, (SEQUENCES, length), generator=generator)}
    if model.tokenizer is None:
        return probes, ["the model has no tokenizer.json: probabilities are compared only on random tokens"]
    try:
        tokens = torch.tensor(model.tokenizer().encode(SAMPLE))
    except (UserError, OSError) as error:
        return probes, [f"the tokenizer cannot be used ({error}): probabilities are compared only on random tokens"]
    if not len(tokens):
        return probes, ["the tokenizer returns no tokens: probabilities are compared only on random tokens"]
    if int(tokens.max()) >= model.head.shape[0]:
        return probes, [
            f"the tokenizer has tokens beyond the {model.head.shape[0]:,} rows of the table, so it belongs to another "
            "model: probabilities are compared only on random tokens"
        ]
    texts = tokens.split(length)[:SEQUENCES]
    return probes | {TEXT: torch.stack([text for text in texts if len(text) == len(texts[0])])}, []


@torch.no_grad()
def log_probabilities(model: FinishedModel, probes: Probes) -> dict[str, Tensor]:
    """Log-probabilities (n * T, V) of every next token, in float64."""
    return {
        name: torch.cat([F.log_softmax(model.logits(row[None])[0].double(), dim=-1) for row in tokens])
        for name, tokens in probes.items()
    }


def differences(before: Mapping[str, Tensor], model: FinishedModel, probes: Probes) -> list[Difference]:
    """Compare the log-probabilities of a model with those `before`.

    A non-finite number in one of them makes the difference infinite.
    """
    found = []
    for name, ours in log_probabilities(model, probes).items():
        theirs = before[name]
        gap = torch.where(ours == theirs, 0.0, (ours - theirs).abs()).nan_to_num(nan=torch.inf)
        kl = (theirs.exp() * (theirs - ours)).nan_to_num(nan=0.0).sum(-1).mean()  # 0 * -inf: an impossible token
        largest = float(gap.max())
        found.append(Difference(name, len(ours), largest, max(0.0, float(kl)) if largest < torch.inf else torch.inf))
    return found
