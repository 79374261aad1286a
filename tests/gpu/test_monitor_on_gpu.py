"""The light measures of the embeddings on a real GPU: as on the CPU, without synchronisation, with little memory."""

import pytest
import torch

from coupled_adam.training import embedding_monitor
from coupled_adam.training.embedding_monitor import light_measures

pytestmark = pytest.mark.gpu
V, H = 50_304, 768


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_light_measures_on_a_gpu_equal_those_on_the_cpu_and_never_synchronise(dtype: torch.dtype) -> None:
    table = (torch.randn(V, H, generator=torch.Generator().manual_seed(0)) + 0.1).to(dtype)
    on_gpu = table.cuda()
    light_measures({"output": on_gpu}, V - 47)  # loads the kernels
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = light_measures({"output": on_gpu}, V - 47)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (
        torch.cuda.max_memory_allocated() - before <= 3 * embedding_monitor.BLOCK_BYTES + 2**20
    )  # three blocks, and the sums
    for name, value in light_measures({"output": table}, V - 47).items():
        assert results[name].device.type == "cuda"
        assert results[name].item() == pytest.approx(value.item(), rel=1e-9)
