"""X_i^(i=t), X_i^(i!=t), S and E[g_i^2] of App. second_moment_theory: expectation values over predictions of tokens.

With p the probabilities a model predicts at a position with the target t and the hidden state h:

    X_i^(i=t)  = E[(1 - p_i)^2 | i = t]      X_i^(i!=t) = E[p_i^2 | i != t]      S = E[h^2]
    E[g_i^2]   = E[(delta_it - p_i)^2 h^2]                     of the loss of one token, not of a batch's mean

and the Theorem says E[g_i^2] = S [p~_i X_i^(i=t) + (1 - p~_i) X_i^(i!=t)]. Both sides have H coordinates: their mean is
kept, and C single coordinates.

Letters: V rows of the table, H width, C coordinates, N positions, n positions of a chunk.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from coupled_adam.models.loss import chunk_rows

# Size of the probabilities of one chunk.
CHUNK_BYTES = {"cpu": 2**24, "cuda": 2**28}
COORDINATES = 32
"""C, equidistant among H: enough to test the Theorem, with thousands of tokens each."""


class TokenStatistics:
    """Sums over positions, in float64 on the device, and the expectation values from them.

    Args:
        table: (V, H), the head.
        bias: (V,) of the head, or None.
    """

    def __init__(self, table: Tensor, bias: Tensor | None = None) -> None:
        V, H = table.shape
        C = min(COORDINATES, H)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=table.device)

        self.table = table
        self.bias = bias
        self.coordinates = torch.arange(C, device=table.device) * H // C
        self.positions = 0  # N
        self.target_counts = torch.zeros(V, dtype=torch.int64, device=table.device)
        # Sums over positions: unweighted, weighted by the mean h^2, and weighted by C coordinates of h^2.
        self.true_sums = zeros(2 + C, V)  # of (1 - p_i)^2 where i = t
        self.false_sums = zeros(2 + C, V)  # of p_i^2 where i != t
        self.hidden_square_sum = zeros(H)

    @torch.no_grad()
    def add(self, hidden: Tensor, targets: Tensor) -> None:
        """Add positions.

        Args:
            hidden: (N, H), input of the head.
            targets: (N,) int64.
        """
        N, V = len(hidden), len(self.table)
        rows = chunk_rows(N, 4 * V, CHUNK_BYTES.get(hidden.device.type, CHUNK_BYTES["cuda"]))
        self.positions += N
        self.target_counts += torch.bincount(targets, minlength=V)
        for h, t in zip(hidden.float().split(rows), targets.split(rows), strict=True):
            square = h.square()  # (n, H)
            self.hidden_square_sum += square.sum(0)
            weights = torch.stack([torch.ones_like(square[:, 0]), square.mean(1), *square[:, self.coordinates].T])
            p = torch.softmax(F.linear(h, self.table, self.bias), dim=1)  # (n, V)
            target_p = p.gather(1, t[:, None]).squeeze(1)  # (n,)
            self.true_sums.index_add_(1, t, ((1 - target_p).square() * weights).double())
            # Remove the target before the sum: subtracting it afterwards would leave only rounding if p_t is near 1.
            p.scatter_(1, t[:, None], 0.0)
            self.false_sums += weights @ p.square_()  # (2 + C, V)

    @property
    def hidden_square(self) -> Tensor:
        """S, (H,)."""
        return self.hidden_square_sum / self.positions

    @property
    def x_true(self) -> Tensor:
        """X_i^(i=t), (V,); NaN for tokens that were never the target."""
        return self.true_sums[0] / self.target_counts

    @property
    def x_false(self) -> Tensor:
        """X_i^(i!=t), (V,)."""
        return self.false_sums[0] / (self.positions - self.target_counts)

    @property
    def squared_gradient(self) -> Tensor:
        """The mean over H of E[g_i^2], (V,)."""
        return (self.true_sums[1] + self.false_sums[1]) / self.positions

    @property
    def squared_gradient_predicted(self) -> Tensor:
        """The mean over H of the Theorem's right-hand side, (V,)."""
        return self.hidden_square.mean() * self._factor()

    @property
    def element_squared_gradient(self) -> Tensor:
        """C coordinates of E[g_i^2], (C, V)."""
        return (self.true_sums[2:] + self.false_sums[2:]) / self.positions

    @property
    def element_squared_gradient_predicted(self) -> Tensor:
        """The same coordinates of the Theorem's right-hand side, (C, V)."""
        return self.hidden_square[self.coordinates, None] * self._factor()

    def _factor(self) -> Tensor:
        """p~_i X_i^(i=t) + (1 - p~_i) X_i^(i!=t), (V,); p~_i is the share of these positions whose target is i."""
        p = self.target_counts / self.positions
        # X is undefined where its probability is 0.
        return p * self.x_true.nan_to_num(0.0) + (1 - p) * self.x_false.nan_to_num(0.0)
