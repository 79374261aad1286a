"""The tiles of the family's kernels fit the GPU on which they run."""

import pytest
import torch

pytest.importorskip("triton")
from coupled_adam.optimizer import family_tiling
from coupled_adam.optimizer.family_triton import FIRST_MOMENT, FIRST_PASS, SQUARE_SUMS

WIDTHS = [0, 1, 70, 256, 768, 1000, 2560, 4096, 5000, 8192]
# Number of multiprocessors, and bytes of shared memory available to tiles: T4, RTX 4090, A100, H200.
GPUS = [(40, 32_768), (128, 68_608), (108, 134_144), (132, 199_680)]


@pytest.mark.parametrize("limits", GPUS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_tiles_fit_into_registers_and_shared_memory(
    width: int, dtype: torch.dtype, limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(family_tiling, "_limits", lambda device: limits)
    multiprocessors, shared_memory = limits
    grad = torch.empty(50_304, width, dtype=dtype, device="meta")
    for tiling, tensors in ((FIRST_PASS, [grad, grad]), (SQUARE_SUMS, [grad]), (FIRST_MOMENT, [grad, grad])):
        warps, programs, (block_v, block_h, stages) = family_tiling.tile_for(tiling, *tensors)
        for number in (warps, block_v, block_h):
            assert number > 0
            assert number & (number - 1) == 0, "Triton takes powers of two only"
        assert block_h >= min(width, tiling.columns)
        assert warps <= 16
        # A multiprocessor has 65536 registers for all threads; sums need some of them.
        assert block_v * block_h * len(tensors) <= 40_000
        assert block_v * block_h * len(tensors) * dtype.itemsize * (stages - 1) <= shared_memory
        assert 1 <= programs <= 16 * multiprocessors


def test_a_table_of_few_rows_has_no_idle_programs() -> None:
    grad = torch.empty(3, 768)
    _, programs, (block_v, _, _) = family_tiling.tile_for(FIRST_PASS, grad, grad)
    assert programs == -(-3 // block_v)


@pytest.mark.parametrize(("n", "power"), [(1, 1), (2, 2), (3, 4), (768, 1024), (8192, 8192)])
def test_next_power_of_2(n: int, power: int) -> None:
    assert family_tiling.next_power_of_2(n) == power
