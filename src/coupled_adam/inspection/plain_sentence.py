"""One plain sentence about a table: how far from the origin its embeddings are, and how evenly they spread."""

from coupled_adam.base.text import percent
from coupled_adam.embeddings import EmbeddingMetrics

# For the ratio ||mu|| / mean ||e||. Published models have 0.01 to 0.14 with Coupled Adam and 0.40 to 0.82 with Adam.
CENTRED_BELOW = 0.15
ANISOTROPIC_FROM = 0.4
STRONGLY_FROM = 0.6
# For ISO of a centred table. Published models with Coupled Adam have 0.65 to 0.98.
EVEN_FROM = 0.5


def sentence(metrics: EmbeddingMetrics) -> str:
    """Describe the numbers for someone who has not read the paper."""
    ratio = metrics.mu_norm_ratio
    if ratio is None:
        return "every embedding is zero: nothing has been learned here"
    carries = f"the mean embedding carries {percent(ratio)} of a typical embedding's length"
    if ratio >= STRONGLY_FROM:
        return f"{carries}: strongly anisotropic"
    if ratio >= ANISOTROPIC_FROM:
        return f"{carries}: anisotropic"
    if ratio >= CENTRED_BELOW:
        return f"{carries}: somewhat off-centre"
    if metrics.iso < EVEN_FROM:
        return f"{carries}: centred at the origin, but far longer in some directions than in others"
    return f"{carries}: centred at the origin"
