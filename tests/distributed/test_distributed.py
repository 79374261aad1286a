"""CoupledAdamW on several ranks: real processes that communicate through gloo on the CPU.

One worker runs all scenarios of the folder `scenarios` on 2, 4 and 1 ranks. Each scenario is a test that reads the
outcomes of its ranks.
"""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from scenarios import LAUNCHES, scenarios_on

WORKER = Path(__file__).with_name("worker.py")
SECONDS = 400
# OpenMP threads that spin while waiting would block the cores of the other ranks.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}

pytestmark = pytest.mark.timeout(SECONDS + 30)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run everything; return the folder with the outcomes, one subfolder per number of ranks."""
    folder = tmp_path_factory.mktemp("outcomes")
    environment = os.environ | ENVIRONMENT | {"CHECKPOINTS": str(tmp_path_factory.mktemp("checkpoints"))}
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(
            [sys.executable, str(WORKER), str(folder)], env=environment, stdout=log, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # scenarios that did not run have no outcome
    return folder


@pytest.mark.parametrize(
    ("ranks", "scenario"),
    [pytest.param(ranks, name, id=f"{name}-on-{ranks}") for ranks in LAUNCHES for name in scenarios_on(ranks)],
)
def test_scenario(outcomes: Path, ranks: int, scenario: str) -> None:
    crashes = [file.read_text() for file in sorted((outcomes / str(ranks)).glob(f"{scenario}.crash*"))]
    if crashes:
        warnings.warn("a rank crashed, and the scenario was repeated:\n" + "\n".join(crashes), stacklevel=1)
    failures = []
    for rank in range(ranks):
        file = outcomes / str(ranks) / f"{scenario}.rank{rank}"
        outcome = file.read_text() if file.exists() else "no outcome; killed, or never started"
        if outcome != "ok":
            failures.append(f"rank {rank}: {outcome}")
    if failures:
        failures.sort(key=lambda failure: "exit code" not in failure)  # the others fail because a rank has crashed
        log = (outcomes / "log").read_text()
        pytest.fail("\n".join([*failures, f"End of the log:\n{log[-4000:]}"]), pytrace=False)
