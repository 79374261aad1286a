"""A small GPT-2: learned positions, pre-norm blocks, GELU, one table for input and output.

Letters: V vocabulary rows, H hidden size, B batch, T time, N attention heads.
"""

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INIT_STD = 0.02  # GPT-2's


class Block(nn.Module):
    """Attention and MLP, each added to the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, H) -> (B, T, H)
        q, k, v = self.qkv(self.ln_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, N, T, H/N)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        return cast(Tensor, x + self.mlp_out(F.gelu(self.mlp_in(self.ln_2(x)), approximate="tanh")))


class SmallGPT(nn.Module):
    """A GPT-2 whose output table is its input table `wte`.

    Args:
        vocabulary_size: V.
        context: the longest T.
        width: H.
        layers: number of blocks.
        heads: N, a divisor of H.
    """

    def __init__(self, vocabulary_size: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary_size, width)
        self.wpe = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary_size, bias=False)
        self.lm_head.weight = self.wte.weight
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                # Each block adds to the residual stream twice; GPT-2 keeps its variance independent of the depth.
                on_residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=INIT_STD / (math.sqrt(2 * layers) if on_residual else 1.0))

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, V)
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.lm_head(self.ln_f(x)))

    def loss(self, windows: Tensor) -> Tensor:  # (B, T + 1) -> ()
        """Mean cross-entropy, in nats, of every token of the windows but the first."""
        return F.cross_entropy(self(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
