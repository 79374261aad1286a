"""The measures as they are shown: their names, which direction is better, and one plain sentence about a table.

The definitions themselves are in `coupled_adam.embeddings`.
"""

from dataclasses import dataclass

from coupled_adam.embeddings import EmbeddingMetrics

# Of the ratio ||mu|| / mean ||e||. The published models have 0.01 to 0.14 with Coupled Adam and 0.40 to 0.82 with Adam.
CENTRED_BELOW = 0.15
ANISOTROPIC_FROM = 0.4
STRONGLY_FROM = 0.6
# Of ISO, for a table that is centred. The published models with Coupled Adam have 0.65 to 0.98.
EVEN_FROM = 0.5


@dataclass(frozen=True)
class Measure:
    """One row of the table."""

    field: str
    """Its name in EmbeddingMetrics."""
    label: str
    better: str
    """↑ more is better, ↓ less is better, empty: neither."""
    meaning: str


MEASURES = (
    Measure("iso", "ISO", "↑", "isotropy: 1 when no direction stands out, near 0 when one does"),
    Measure("iso_both_signs", "ISO, both signs", "↑", "the same, looking along each direction both ways: stricter"),
    Measure("mu_norm", "length of the mean", "↓", "of the mean embedding, ||mu||"),
    Measure("mean_norm", "mean length", "", "of an embedding"),
    Measure("mu_norm_ratio", "mean-embedding ratio", "↓", "of these two: 0 when centred, 1 when all are one vector"),
    Measure("mean_cosine", "mean cosine", "↓", "of two different tokens: 0 when they point everywhere"),
    Measure("iso_score", "IsoScore", "↑", "how evenly the variance spreads over all directions, from 0 to 1"),
    Measure("kappa", "kappa (%)", "↑", "smallest over largest singular value"),
    Measure("rho_log", "rho, log p (%)", "↑", "correlation of length and log frequency, as in the published tables"),
    Measure("rho", "rho, p (%)", "↑", "correlation of length and frequency"),
    Measure("r_cos", "r_cos (%)", "↑", "correlation of cosine and human word similarity, 4 benchmarks"),
    Measure("r_cos_5", "r_cos_5 (%)", "↑", "the same over 5 benchmarks, as the authors' code takes it"),
    Measure("spearman", "Spearman (%)", "↑", "as r_cos, correlation of ranks"),
)


def shown(value: float) -> str:
    """A number with four digits.

    Example:
        >>> shown(0.123456), shown(-54.0), shown(1e-12)
        ('0.1235', '-54', '1e-12')
    """
    return f"{value:.4g}"


def sentence(metrics: EmbeddingMetrics) -> str:
    """What the numbers say, for someone who has not read the paper."""
    ratio = metrics.mu_norm_ratio
    if ratio is None:
        return "every embedding is zero: nothing has been learned here"
    carries = f"the mean embedding carries {100 * ratio:.0f}% of a typical embedding's length"
    if ratio >= STRONGLY_FROM:
        return f"{carries}: strongly anisotropic"
    if ratio >= ANISOTROPIC_FROM:
        return f"{carries}: anisotropic"
    if ratio >= CENTRED_BELOW:
        return f"{carries}: somewhat off-centre"
    if metrics.iso < EVEN_FROM:
        return f"{carries}: centred at the origin, but far longer in some directions than in others"
    return f"{carries}: centred at the origin"
