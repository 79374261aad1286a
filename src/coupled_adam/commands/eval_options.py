"""Options that `coupled-adam eval` and its sub-commands share."""

from pathlib import Path
from typing import Annotated, Literal

import typer

Tasks = Annotated[
    str | None,
    typer.Option(
        metavar="A,B", help="lm-eval tasks; `paper`: the paper's seven; `none`: only the loss.  [default: paper]"
    ),
]
Limit = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Evaluate only the first N documents of each task.")
]
TaskData = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder of local files for the paper's tasks, used without a network."),
]
Checkpoint = Annotated[
    int | None, typer.Option(metavar="STEP", min=0, help="Checkpoint of a run.  [default: the newest complete one]")
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"] | None, typer.Option(help="Device to use.  [default: as the run was trained]")
]
Precision = Annotated[
    Literal["float32", "bf16"] | None,
    typer.Option(help="Precision of the weights.  [default: as the run was trained; other models: bf16 on CUDA]"),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(metavar="SPEC", help="A tokenizer.json or `gpt2`, used if the run's corpus is missing."),
]
NoLoss = Annotated[bool, typer.Option("--no-loss", help="Skip the test loss.")]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="File to write the results to.  [default: downstream.json in the model's folder]"
    ),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Repeat finished evaluations.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
