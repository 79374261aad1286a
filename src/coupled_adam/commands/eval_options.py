"""Options that `coupled-adam eval` and its sub-commands share."""

from pathlib import Path
from typing import Annotated, Literal

import typer

Tasks = Annotated[
    str | None,
    typer.Option(metavar="A,B", help="Tasks of lm-eval; `paper`: its seven; `none`: the loss alone.  [default: paper]"),
]
Limit = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Only the first N documents of each task, for a try.")
]
TaskData = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder of local files, for the paper's tasks without a network.")
]
Checkpoint = Annotated[
    int | None, typer.Option(metavar="STEP", min=0, help="Of a run.  [default: the newest whole one]")
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"] | None, typer.Option(help="Where to compute.  [default: as the run was trained]")
]
Precision = Annotated[
    Literal["float32", "bf16"] | None,
    typer.Option(help="Of the weights.  [default: as the run was trained; of other models bf16 on CUDA]"),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(metavar="SPEC", help="A tokenizer.json or `gpt2`, where the corpus of the run is not here."),
]
NoLoss = Annotated[bool, typer.Option("--no-loss", help="Leave out the test loss.")]
Out = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="File of the results.  [default: downstream.json in the model's folder]"),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Repeat what was evaluated already.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
