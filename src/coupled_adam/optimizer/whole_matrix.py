"""Gather a sharded matrix to all its ranks, and shard it again.

Legend: m rows, n columns.
"""

from torch import Tensor

from coupled_adam.optimizer.sharding import is_distributed, local_part


def gathered(local: Tensor, param: Tensor) -> Tensor:
    """Gather the whole (m, n) matrix from parts that are sharded like `param`. All ranks must call it.

    Args:
        local: this rank's part, with the shape of its part of `param` and any dtype. It may be empty.
        param: the parameter, which determines the sharding.
    """
    if not is_distributed(param):
        return local
    from torch.distributed.tensor import DTensor

    spread = DTensor.from_local(
        local,
        param.device_mesh,  # type: ignore[attr-defined]
        param.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=param.shape,
        stride=(param.shape[1], 1),
    )
    whole: Tensor = spread.full_tensor()
    return whole


def part_on_this_rank(whole: Tensor, param: Tensor) -> Tensor:
    """Return this rank's part of a whole (m, n) matrix, sharded like `param`. All ranks have the matrix; none sends."""
    if not is_distributed(param):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
    replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return local_part(replicated.redistribute(placements=placements))
