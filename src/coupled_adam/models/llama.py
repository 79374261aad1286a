"""A Llama-style decoder with LayerNorm: rotary positions (RoPE, half-split), SwiGLU, no biases.

Letters: V vocabulary rows, H width, B batch, T time, N attention heads, D = H/N.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coupled_adam.models.fused import Linear, add_norm, widened
from coupled_adam.models.language_model import LanguageModel
from coupled_adam.models.model_config import ModelConfig

NORM_EPS = 1e-5
ROPE_BASE = 10_000.0


def rotary_angles(length: int, head_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position * base^(-2i/D), each (T, D/2) float32.

    Computed in every forward pass: a buffer would be cast, sharded and saved.
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device=device) / head_size
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), 1.0 / ROPE_BASE**exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i + D/2}) of x (B, N, T, D) by the angles (T, D/2), in at least float32."""
    first, second = x.to(torch.promote_types(x.dtype, cosine.dtype)).chunk(2, dim=-1)
    turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    return turned.to(x.dtype)


class LlamaAttention(nn.Module):
    """Causal self-attention with rotated queries and keys."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q_proj = Linear(config.width, config.width, bias=False)
        self.k_proj = Linear(config.width, config.width, bias=False)
        self.v_proj = Linear(config.width, config.width, bias=False)
        self.o_proj = Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, H) -> (B, T, H)
        q, k, v = (
            projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, N, T, D)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        cosine, sine = rotary_angles(x.shape[1], q.shape[-1], x.device)
        q, k = rotate(q, cosine, sine), rotate(k, cosine, sine)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return cast(Tensor, self.o_proj(attended.transpose(1, 2).flatten(2)))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.width, config.mlp_width, bias=False)
        self.up_proj = Linear(config.width, config.mlp_width, bias=False)
        self.down_proj = Linear(config.mlp_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, H) -> (B, T, H)
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class LlamaBlock(nn.Module):
    """Attention and MLP, each added to the residual stream; the next block adds the MLP's output, as in `gpt2`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.width, eps=NORM_EPS, bias=False)
        self.self_attn = LlamaAttention(config)
        self.post_attention_layernorm = nn.LayerNorm(config.width, eps=NORM_EPS, bias=False)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:  # all (B, T, H)
        x, y = add_norm(x, branch, self.input_layernorm)
        x, y = add_norm(x, self.self_attn(y), self.post_attention_layernorm)
        return x, self.mlp(y)


class Llama(LanguageModel):
    """A Llama-style model of the given shape.

    Example:
        >>> config = ModelConfig("llama", layers=2, heads=2, width=8, context=16, vocabulary_size=32)
        >>> Llama(config)(torch.zeros(3, 16, dtype=torch.int64)).shape
        torch.Size([3, 16, 32])
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocabulary_size, config.width)
        self.blocks = nn.ModuleList(LlamaBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, eps=NORM_EPS, bias=False)
        self._add_head(self.embed_tokens, "embed_tokens")

    def hidden_states(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, H)
        x = self._residual(self.embed_tokens(tokens))
        branch = None
        for block in self.blocks:
            x, branch = block(x, branch)
        assert branch is not None  # there is at least one block
        return cast(Tensor, self.norm(widened(x, self.norm) + branch))
