"""The stored runs behind the pages of results: those of a study, and a metric of three seeds."""

from collections.abc import Iterable
from functools import cache

import numpy as np
from page_text import ROOT

from coupled_adam.study.results import Result, merge_results

STORED = ROOT / "docs" / "results"


@cache
def reported(*studies: str) -> tuple[Result, ...]:
    """The runs of stored studies that their report shows: all but trials."""
    return tuple(run for run in merge_results([STORED / study for study in studies]) if not run.is_candidate)


def of_seeds(runs: Iterable[Result], optimizer: str, metric: str = "loss") -> np.ndarray:
    """A metric of an optimizer's runs with seeds 1, 2 and 3; empty if it has none."""
    by_seed = {run.seed: run.metrics[metric] for run in runs if run.optimizer == optimizer}
    return np.array([by_seed[seed] for seed in (1, 2, 3)] if by_seed else [], dtype=np.float64)
