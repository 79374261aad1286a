"""Base class of both architectures: the head on top of the hidden states, and its loss.

Letters: V vocabulary rows, H width, B batch, T time.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coupled_adam.base.errors import UserError
from coupled_adam.models.loss import chunk_rows, linear_cross_entropy
from coupled_adam.models.model_config import ModelConfig

# Bytes of one chunk of logits; their softmax takes the same again. On the CPU, a chunk should fit in the cache.
LOGIT_BYTES = {"cpu": 2**24, "cuda": 2**28}


def soft_capped(logits: Tensor, cap: float | None) -> Tensor:
    """Compute c * tanh(logits / c) in at least float32; return the logits unchanged if there is no cap.

    Example:
        >>> import torch
        >>> soft_capped(torch.tensor([0.0, 1000.0]), 30.0)
        tensor([ 0., 30.])
    """
    if cap is None:
        return logits
    return cap * torch.tanh(logits.to(torch.promote_types(logits.dtype, torch.float32)) / cap)


def mean_embedding_square(weight: Tensor, token_count: int | None = None) -> Tensor:
    """Squared length of the mean embedding of a table, in at least float32: the mu-loss term.

    Args:
        weight: (V, H).
        token_count: number of rows before the padding; None for no padding.

    Example:
        >>> import torch
        >>> mean_embedding_square(torch.tensor([[3.0, 0.0], [1.0, 2.0], [9.0, 9.0]]), 2)
        tensor(5.)
    """
    mean = weight[:token_count].mean(dim=0, dtype=torch.promote_types(weight.dtype, torch.float32))  # (H,)
    return mean.square().sum()


class LanguageModel(nn.Module):
    """A decoder with a table of input embeddings and a head of the same shape, tied or not.

    A subclass registers its modules, ends its `__init__` with `_add_head`, and implements `hidden_states`.
    """

    blocks: nn.ModuleList
    """The layers; each is sharded and compiled separately."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    def _add_head(self, input_table: nn.Embedding, name: str) -> None:
        has_bias = self.config.output_bias != "none"
        self.lm_head = nn.Linear(self.config.width, self.config.vocabulary_size, bias=has_bias)
        if has_bias:
            # A parameter in both cases, so that it is sharded, saved and loaded like the others.
            self.lm_head.bias.requires_grad_(self.config.output_bias == "learned")
        self.input_table_name = f"{name}.weight"
        self.output_table_name = "lm_head.weight"
        if self.config.tied:
            self.lm_head.weight = input_table.weight
            self.output_table_name = self.input_table_name

    # Named as in transformers: `param_groups` calls these to find the tables, rather than guessing from shapes.
    def get_input_embeddings(self) -> nn.Module:
        """The input embedding."""
        return self.get_submodule(self.input_table_name.removesuffix(".weight"))

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        return self.lm_head

    def _residual(self, x: Tensor) -> Tensor:
        """The residual stream (B, T, H) as the blocks pass it on: narrow only under autocast, if the config says so.

        The sum after the last block is passed on to no block, and is not rounded.
        """
        narrow = self.config.residual_dtype == "bfloat16" and torch.is_autocast_enabled(x.device.type)
        return x.to(torch.bfloat16) if narrow else x

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """Compute the input of the head, (B, T, H), from tokens (B, T)."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits (..., V) of hidden states (..., H), soft-capped if the config says so.

        As in `linear_cross_entropy`, only the matrix product uses autocast's dtype: in bfloat16, a log probability of
        -10 could be off by 0.03.
        """
        bias = self.lm_head.bias
        logits: Tensor = self.lm_head(hidden) if bias is None else F.linear(hidden, self.lm_head.weight) + bias
        return soft_capped(logits, self.config.logit_cap)

    def logit_chunks(self, tokens: Tensor) -> Iterator[Tensor]:
        """Yield the logits of all positions of tokens (B, T) in order, in chunks (n, V), to limit memory."""
        hidden = self.hidden_states(tokens).flatten(0, 1)  # (B * T, H)
        budget = LOGIT_BYTES.get(hidden.device.type, LOGIT_BYTES["cpu"])
        rows = chunk_rows(len(hidden), 4 * self.config.vocabulary_size, budget)
        yield from map(self.logits, hidden.split(rows))

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        z_loss: float = 0.0,
        mu_loss: float = 0.0,
        token_count: int | None = None,
        reduction: str = "mean",
    ) -> Tensor:
        """Return the loss, or the logits if there are no targets.

        Args:
            tokens: (B, T) int64.
            targets: (B, T) int64, the token that follows each; -100 is ignored.
            z_loss: weight of the mean squared logsumexp of the logits, added to the loss.
            mu_loss: weight of the squared length of the mean output embedding, added to the mean loss.
            token_count: number of rows before the padding, for `mu_loss`; None for no padding.
            reduction: "mean" over the targets, or "none".

        Returns:
            Logits (B, T, V); or the mean loss, float32; or with reduction="none" the losses (B, T), float32,
            0 where the target is -100.
        """
        if tokens.ndim != 2 or tokens.shape[1] > self.config.context:
            raise UserError(
                f"tokens have shape {tuple(tokens.shape)}, expected (B, T) with T of at most {self.config.context}; "
                "truncate them, or build the model with a longer context"
            )
        hidden = self.hidden_states(tokens)
        if targets is None:
            return self.logits(hidden)
        # Computed here rather than in the trainer, because FSDP2 gathers the table only during this call.
        loss = linear_cross_entropy(
            hidden.flatten(0, 1),
            self.lm_head.weight,
            targets.flatten(),
            bias=self.lm_head.bias,
            z_loss=z_loss,
            logit_cap=self.config.logit_cap,
            reduction=reduction,
        )
        if mu_loss:
            loss = loss + mu_loss * mean_embedding_square(self.lm_head.weight, token_count)
        return loss.view_as(targets) if reduction == "none" else loss
