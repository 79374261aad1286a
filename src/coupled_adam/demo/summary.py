"""What came out, in a table and in one sentence. Both say the same numbers, and neither takes sides."""

import math

from coupled_adam.demo.comparison import Outcome


def summary_rows(adamw: Outcome, coupled: Outcome) -> list[tuple[str, str, str]]:
    """Rows of what was measured, its value with AdamW and its value with CoupledAdamW; all are better when lower."""
    averaged = adamw.records[-1].step - adamw.records[-2].step
    return [
        (f"training loss (mean of the last {averaged} steps)", f"{adamw.train_loss:.3f}", f"{coupled.train_loss:.3f}"),
        ("validation loss", f"{adamw.validation_loss:.3f}", f"{coupled.validation_loss:.3f}"),
        ("mean-embedding ratio |mu| / mean |e_i|", f"{adamw.ratio:.3f}", f"{coupled.ratio:.3f}"),
        ("optimizer state (bytes)", f"{adamw.state_bytes:,}", f"{coupled.state_bytes:,}"),
    ]


def verdict(adamw: Outcome, coupled: Outcome) -> str:
    """One sentence on how CoupledAdamW did against AdamW, by the digits the table shows."""
    diverged = [outcome.name for outcome in (adamw, coupled) if not math.isfinite(outcome.validation_loss)]
    if diverged:
        return f"No verdict: the validation loss with {' and with '.join(diverged)} is not finite."
    ratio = _against("mean-embedding ratio", coupled.ratio, adamw.ratio)
    loss = _against("validation loss", coupled.validation_loss, adamw.validation_loss)
    saved = 100 * (1 - coupled.state_bytes / adamw.state_bytes)
    state = f"{abs(saved):.0f} % {'less' if saved >= 0 else 'more'} optimizer state"
    return f"Against AdamW, CoupledAdamW ended with {ratio}, {loss} and {state}."


def _against(what: str, coupled: float, adamw: float) -> str:
    ours, theirs = f"{coupled:.3f}", f"{adamw:.3f}"
    if ours == theirs:
        return f"the same {what} ({ours})"
    comparison, judgement = ("lower", "better") if coupled < adamw else ("higher", "worse")
    return f"a {comparison} {what} ({judgement}: {ours} against {theirs})"
