"""CoupledAdamW on several ranks: real processes, started by torchrun, that talk through gloo on the CPU.

Three launches, on 2, 4 and 1 ranks, run all scenarios of the folder `scenarios`; each scenario is a test that reads
what its ranks have left behind.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from scenarios import scenarios_on

WORKER = Path(__file__).with_name("worker.py")
LAUNCHES = (2, 4, 1)  # in this order: later launches load what earlier ones have saved
SECONDS_PER_LAUNCH = 150
# OpenMP threads that spin while they wait would keep the other ranks from their cores.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}

pytestmark = pytest.mark.timeout(len(LAUNCHES) * SECONDS_PER_LAUNCH + 30)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Run everything; for each number of ranks, the folder with the outcomes."""
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    folders = {}
    for ranks in LAUNCHES:
        folders[ranks] = tmp_path_factory.mktemp(f"on_{ranks}_ranks")
        launch(ranks, folders[ranks], {"CHECKPOINTS": str(checkpoints)})
    return folders


def launch(ranks: int, folder: Path, environment: dict[str, str]) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(
            [*torchrun, str(WORKER), str(folder)],
            env=os.environ | ENVIRONMENT | environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            process.wait(SECONDS_PER_LAUNCH)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its workers; the scenarios they did not get to have no outcome


@pytest.mark.parametrize(
    ("ranks", "scenario"),
    [pytest.param(ranks, name, id=f"{name}-on-{ranks}") for ranks in LAUNCHES for name in scenarios_on(ranks)],
)
def test_scenario(outcomes: dict[int, Path], ranks: int, scenario: str) -> None:
    failures = []
    for rank in range(ranks):
        file = outcomes[ranks] / f"{scenario}.rank{rank}"
        if not file.exists():
            log = (outcomes[ranks] / "log").read_text()
            failures.append(f"rank {rank}: no outcome; killed, or never started. End of the log:\n{log[-2000:]}")
        elif (outcome := file.read_text()) != "ok":
            failures.append(f"rank {rank}: {outcome}")
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)
