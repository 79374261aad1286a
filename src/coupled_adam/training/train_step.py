"""One optimizer step over the micro-batches of a rank, without waiting for the device.

On one GPU the step can be a CUDA graph: recorded once, then replayed with one call, so that a small model does not wait
for Python. The results equal those of the plain step, because the same kernels run in the same order.

Letters: B samples, T context.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from coupled_adam.base.errors import UserError
from coupled_adam.training.checkpoint.training_state import make_optimizer_state
from coupled_adam.training.optimizers import EmbeddingOptimizers
from coupled_adam.training.parallel import synchronise_gradients

MicroBatches = Sequence[tuple[Tensor, Tensor]]
# The first pass selects and compiles kernels; after the second, memory no longer grows.
WARM_UP_PASSES = 2


class TrainStep:
    """Forward, backward and update.

    Args:
        module: called with tokens and targets, returns the mean loss; plain, compiled, DDP or FSDP2.
        optimizers: the optimizers of all its parameters.
        precision: context of the forward pass, such as autocast.
        z_loss, mu_loss: passed to the module.
        token_count: passed to the module with mu_loss: the number of rows before the padding.
        cuda_graphs: record the step in the first call. Needs one CUDA device, optimizers built with capturable=True,
            micro-batches of constant shape and number, and all state loaded before the first call.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: EmbeddingOptimizers,
        *,
        precision: Callable[[], AbstractContextManager[Any]],
        z_loss: float = 0.0,
        mu_loss: float = 0.0,
        token_count: int | None = None,
        cuda_graphs: bool = False,
    ) -> None:
        self.module = module
        self.optimizers = optimizers
        self.precision = precision
        self.loss_options: dict[str, Any] = {"z_loss": z_loss}
        if mu_loss:
            self.loss_options |= {"mu_loss": mu_loss, "token_count": token_count}
        self.cuda_graphs = cuda_graphs
        self._recorded: RecordedStep | None = None

    def __call__(
        self, micro_batches: MicroBatches, lr: float, row_exponent: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Take a step.

        Args:
            micro_batches: pairs of tokens and targets, each (B, T), on the device of the model.
            lr: learning rate.
            row_exponent: row exponent of the coupled tables, if it is annealed; None leaves it unchanged.

        Returns:
            The mean loss over the micro-batches, and the gradient norm before clipping; scalars on the device.
        """
        self.optimizers.set_lr(lr)
        if row_exponent is not None:
            self.optimizers.set_row_exponent(row_exponent)
        if not self.cuda_graphs:
            return self._plain(micro_batches)
        if self._recorded is None:
            self._recorded = RecordedStep(self, micro_batches)
        return self._recorded.replay(micro_batches)

    def _plain(self, micro_batches: MicroBatches) -> tuple[Tensor, Tensor]:
        total: Tensor | None = None
        for i, (tokens, targets) in enumerate(micro_batches):
            synchronise_gradients(self.module, i == len(micro_batches) - 1)
            loss = self.accumulate(tokens, targets, 1 / len(micro_batches))
            total = loss if total is None else total + loss
        assert total is not None
        norm = self.optimizers.step()
        self.optimizers.zero_grad()
        return total, norm

    def accumulate(self, tokens: Tensor, targets: Tensor, share: float) -> Tensor:
        """Add the gradients of `share` times a micro-batch's loss; return that part of the loss."""
        with self.precision():
            loss: Tensor = self.module(tokens, targets, **self.loss_options) * share
        loss.backward()
        return loss.detach()


class RecordedStep:
    """A step as CUDA graphs.

    One graph for the whole step; or with several micro-batches, three graphs: the first micro-batch, which allocates
    the gradients, a further micro-batch, which adds to them, and the update.
    """

    def __init__(self, step: TrainStep, micro_batches: MicroBatches) -> None:
        self.count = len(micro_batches)
        self.tokens, self.targets = (tensor.clone() for tensor in micro_batches[0])
        optimizers = step.optimizers
        make_optimizer_state(optimizers.optimizers)

        def first() -> None:
            self.loss = step.accumulate(self.tokens, self.targets, 1 / self.count)

        def further() -> None:
            self.loss += step.accumulate(self.tokens, self.targets, 1 / self.count)

        def update() -> None:
            self.norm = optimizers.step()
            optimizers.zero_grad()

        # Warm up and record on the same stream: autograd ties gradient accumulation to a stream.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), unchanged(optimizers):
            optimizers.zero_grad()
            for _ in range(WARM_UP_PASSES):
                first()
                if self.count > 1:
                    further()
                update()
        torch.cuda.current_stream().wait_stream(stream)

        pool = torch.cuda.graph_pool_handle()

        def record(*parts: Callable[[], None]) -> torch.cuda.CUDAGraph:
            graph = torch.cuda.CUDAGraph()
            # thread_local: another thread may pin the next batch during the capture.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                for part in parts:
                    part()
            return graph

        if self.count == 1:
            self.graphs = [record(first, update)]
        else:
            graphs = [record(first), record(further), record(update)]
            self.graphs = [graphs[0]] + (self.count - 1) * [graphs[1]] + [graphs[2]]

    def replay(self, micro_batches: MicroBatches) -> tuple[Tensor, Tensor]:
        """Take a step with these micro-batches."""
        shapes = {tuple(tokens.shape) for tokens, _ in micro_batches}
        if len(micro_batches) != self.count or shapes != {tuple(self.tokens.shape)}:
            raise UserError(
                f"the step was recorded for {self.count} micro-batches of shape {tuple(self.tokens.shape)}, but got "
                f"{len(micro_batches)} of {sorted(shapes)}; create another TrainStep for them, or set cuda_graphs=False"
            )
        for graph, (tokens, targets) in zip(self.graphs, micro_batches, strict=False):
            self.tokens.copy_(tokens)
            self.targets.copy_(targets)
            graph.replay()
        if self.count > 1:
            self.graphs[-1].replay()
        # Copies, because the next replay overwrites this memory.
        return self.loss.clone(), self.norm.clone()


@contextmanager
def unchanged(optimizers: EmbeddingOptimizers) -> Iterator[None]:
    """Restore parameters and optimizer state at the end of the context."""
    tensors = [p for optimizer in optimizers.optimizers for group in optimizer.param_groups for p in group["params"]]
    for optimizer in optimizers.optimizers:
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
    # On the host: a large model may fill most of the device.
    saved = [tensor.detach().cpu() if tensor.is_cuda else tensor.detach().clone() for tensor in tensors]
    yield
    with torch.no_grad():
        for tensor, value in zip(tensors, saved, strict=True):
            tensor.copy_(value)
