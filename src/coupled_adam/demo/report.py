"""The report: one HTML file without scripts and without anything to load, for a desk or a phone, light or dark."""

import platform
from collections.abc import Mapping
from datetime import datetime
from html import escape

import torch

from coupled_adam import __version__
from coupled_adam.demo.chart import line_chart
from coupled_adam.demo.comparison import Outcome, Settings
from coupled_adam.demo.summary import summary_rows, verdict
from coupled_adam.demo.text import Corpus

STYLE = """
:root { --text: #1c2024; --faint: #5b6470; --line: #d9dde2; --page: #fff; --adamw: #c2410c; --coupled: #0b62b0; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e8eaed; --faint: #a0a8b2; --line: #383d44; --page: #16181b; --adamw: #f59e5b; --coupled: #6cb6ff; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 60rem; background: var(--page); color: var(--text);
       font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .75rem; }
h2 { font-size: 1.15rem; margin: 0 0 .5rem; }
h3 { font-size: 1rem; margin: 0 0 .25rem; }
section { margin-top: 2rem; }
.verdict { font-size: 1.1rem; margin: 0; text-wrap: pretty; }
.note, figcaption { color: var(--faint); font-size: .9rem; }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .45rem .5rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th:first-child { text-align: left; padding-left: 0; font-weight: normal; }
thead th { font-weight: 600; }
.facts th { width: 11rem; color: var(--faint); }
.facts td { text-align: left; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); gap: 1.5rem; }
figure { margin: 0; }
figcaption { margin-top: .4rem; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--faint); font-size: 13px; }
svg polyline { fill: none; stroke-width: 2.5; stroke-linejoin: round; }
svg .grid { stroke: var(--line); }
svg .adamw { stroke: var(--adamw); stroke-dasharray: 7 4; }
svg .coupled { stroke: var(--coupled); }
.key { display: inline-block; width: 1.6rem; margin: 0 .4rem 0 0; vertical-align: middle; border-top: 3px solid; }
.key.adamw { border-top-style: dashed; color: var(--adamw); }
.key.coupled { color: var(--coupled); }
.legend span + span.name { margin-right: 1.25rem; }
@media (max-width: 30rem) { .facts th { width: 7.5rem; } th, td { padding-inline: .3rem; } }
"""


def report_facts(corpus: Corpus, settings: Settings, command: str, seconds: float) -> dict[str, str]:
    """How the report was made: all it takes to make it again."""
    return {
        "text": f"documentation of Python {platform.python_version()}'s standard library, split into words: "
        f"{len(corpus.train):,} tokens to train on, {len(corpus.validation):,} to validate on",
        "model": f"GPT-2 style, tied embeddings, {settings.layers} layers, {settings.width} wide, "
        f"{settings.heads} heads, context {settings.context}, vocabulary {len(corpus.vocabulary):,}",
        "training": f"{settings.steps} steps of {settings.batch} x {settings.context} tokens, seed {settings.seed}",
        "learning rate": f"{settings.learning_rate:g}, warm-up over the first tenth, cosine to a tenth",
        "optimizers": f"betas {settings.betas[0]:g} and {settings.betas[1]:g}, "
        f"weight decay {settings.weight_decay:g} (not on the embeddings), gradient norm at most "
        f"{settings.max_grad_norm:g}",
        "versions": f"coupled-adam {__version__}, torch {torch.__version__}",
        "machine": f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        "date": datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
        "took": f"{seconds:.0f} s",
        "command": command,
    }


def render_report(adamw: Outcome, coupled: Outcome, facts: Mapping[str, str]) -> str:
    """The page as HTML text.

    Args:
        adamw: the training with AdamW.
        coupled: the training with CoupledAdamW.
        facts: how it was made (settings, date, versions, command), shown in this order.
    """
    title = "The same model, trained with AdamW and with CoupledAdamW"
    ratios = {
        "adamw": [(float(record.step), record.ratio) for record in adamw.records],
        "coupled": [(float(record.step), record.ratio) for record in coupled.records],
    }
    losses = {
        "adamw": [(float(record.step), record.loss) for record in adamw.records],
        "coupled": [(float(record.step), record.loss) for record in coupled.records],
    }
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p class="verdict">{escape(verdict(adamw, coupled))}</p>
<section>
{_outcome_table(adamw, coupled)}
<p class="note">Both start from the same weights and see the same batches. It is one small run each:
another seed moves the losses by up to about 0.1, so a small difference in loss decides nothing.</p>
</section>
<section>
<h2>Over the training</h2>
<p class="legend"><span class="key adamw"></span><span class="name">{escape(adamw.name)}</span>
<span class="key coupled"></span><span class="name">{escape(coupled.name)}</span></p>
<div class="charts">
<figure>
<h3>Mean-embedding ratio</h3>
{line_chart("Mean-embedding ratio over training steps", ratios, y_start=0.0)}
<figcaption>Length of the mean embedding over the mean length of the embeddings; 0 means centred at the
origin.</figcaption>
</figure>
<figure>
<h3>Training loss</h3>
{line_chart("Training loss over training steps", losses)}
<figcaption>Nats per token, each point a mean over the steps since the one before.</figcaption>
</figure>
</div>
</section>
<section>
<h2>How it was made</h2>
{_fact_table(facts)}
</section>
</body>
</html>
"""


def _outcome_table(adamw: Outcome, coupled: Outcome) -> str:
    head = "<td></td>" + "".join(f'<th scope="col">{escape(name)}</th>' for name in (adamw.name, coupled.name))
    rows = [
        f'<tr><th scope="row">{escape(what)}</th><td>{escape(first)}</td><td>{escape(second)}</td></tr>'
        for what, first, second in summary_rows(adamw, coupled)
    ]
    return "\n".join(["<table>", f"<thead><tr>{head}</tr></thead>", "<tbody>", *rows, "</tbody>", "</table>"])


def _fact_table(facts: Mapping[str, str]) -> str:
    rows = [f'<tr><th scope="row">{escape(k)}</th><td>{escape(v)}</td></tr>' for k, v in facts.items()]
    return "\n".join(['<table class="facts">', "<tbody>", *rows, "</tbody>", "</table>"])
