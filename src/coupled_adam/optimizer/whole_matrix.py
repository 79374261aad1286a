"""A matrix that is spread over ranks: gathered to all of them, and spread again.

Letters: m rows, n columns.
"""

from torch import Tensor

from coupled_adam.optimizer.sharding import is_distributed, local_part


def gathered(local: Tensor, param: Tensor) -> Tensor:
    """The whole (m, n) matrix of which every rank has the part that it has of `param`. All ranks call it together.

    Args:
        local: this rank's part, of the shape of its part of `param` and of any dtype. It may be empty.
        param: says how the matrix is spread.
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
    """What this rank has of `param`, of a whole (m, n) matrix that all ranks have alike. No message is sent."""
    if not is_distributed(param):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
    replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return local_part(replicated.redistribute(placements=placements))
