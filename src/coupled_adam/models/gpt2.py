"""GPT-2: learned positions, pre-LayerNorm, GELU; biases are optional.

Letters: V vocabulary rows, H width, B batch, T time, N attention heads.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coupled_adam.models.fused import Linear, add_norm, gelu, widened
from coupled_adam.models.language_model import LanguageModel
from coupled_adam.models.model_config import ModelConfig

NORM_EPS = 1e-5


class GPT2Attention(nn.Module):
    """Causal self-attention, one matrix for queries, keys and values."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.c_attn = Linear(config.width, 3 * config.width, bias=config.bias)
        self.c_proj = Linear(config.width, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, H) -> (B, T, H)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, N, T, H/N)
            for part in self.c_attn(x).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return cast(Tensor, self.c_proj(attended.transpose(1, 2).flatten(2)))


class MLP(nn.Module):
    """Two matrices with an exact GELU between them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.c_fc = Linear(config.width, config.mlp_width, bias=config.bias)
        self.c_proj = Linear(config.mlp_width, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, H) -> (B, T, H)
        return cast(Tensor, self.c_proj(gelu(self.c_fc(x))))


class GPT2Block(nn.Module):
    """Attention and MLP, each added to the residual stream.

    The block returns the MLP's output separately: the next block adds it when it normalises the sum, which saves a pass
    over memory.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width, eps=NORM_EPS, bias=config.bias)
        self.attn = GPT2Attention(config)
        self.ln_2 = nn.LayerNorm(config.width, eps=NORM_EPS, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:  # all (B, T, H)
        x, y = add_norm(x, branch, self.ln_1)
        x, y = add_norm(x, self.attn(y), self.ln_2)
        return x, self.mlp(y)


class GPT2(LanguageModel):
    """A GPT-2 of the given shape.

    Example:
        >>> config = ModelConfig("gpt2", layers=2, heads=2, width=8, context=16, vocabulary_size=32)
        >>> GPT2(config)(torch.zeros(3, 16, dtype=torch.int64)).shape
        torch.Size([3, 16, 32])
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.wte = nn.Embedding(config.vocabulary_size, config.width)
        self.wpe = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(GPT2Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width, eps=NORM_EPS, bias=config.bias)
        self._add_head(self.wte, "wte")

    def hidden_states(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, H)
        x = self._residual(self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device)))
        branch = None
        for block in self.blocks:
            x, branch = block(x, branch)
        assert branch is not None  # there is at least one block
        return cast(Tensor, self.ln_f(widened(x, self.ln_f) + branch))
