"""The section on DeepSpeed, if it is installed: stage 0 trains by Algorithm 1, ZeRO is refused at the first step.

tests/optimizer/test_flattened_tables.py tests ZeRO's changes to the groups without DeepSpeed.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed"),
    pytest.mark.timeout(400),  # the first run compiles DeepSpeed's communication
]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.usefixtures("framework_files")
def test_stage_0_trains_and_zero_is_refused_with_the_reason(stage: int) -> None:
    script = Path(__file__).with_name("deepspeed_run.py")
    path = os.pathsep.join([str(Path.cwd()), str(script.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(script), str(stage)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=350,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(2):
        outcome = json.loads(Path(f"outcome.rank{rank}").read_text())
        if stage == 0:
            assert outcome == {"trained": True}
        else:
            assert {"head.weight", "DeepSpeed ZeRO", "fully_shard", "stage 0"} == set(outcome["said"])
            assert outcome["dimensions"] == 1
