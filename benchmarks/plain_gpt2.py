"""GPT-2 in torch's own operations, which `train` compares ours with."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coupled_adam.models.language_model import LanguageModel


class PlainGPT2(nn.Module):
    """The same GPT-2, in torch's own operations only: all logits, then F.cross_entropy."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        if model.config.architecture != "gpt2":
            raise SystemExit("the plain loop knows GPT-2 only; choose --peers ours")
        self.model = model
        self.heads = model.config.heads

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        model: Any = self.model
        x = model.wte(tokens) + model.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in model.blocks:
            x = x + self.attention(block.attn, block.ln_1(x))
            hidden = F.gelu(F.linear(block.ln_2(x), block.mlp.c_fc.weight))
            x = x + F.linear(hidden, block.mlp.c_proj.weight)
        logits = F.linear(model.ln_f(x), model.lm_head.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def attention(self, module: Any, x: Tensor) -> Tensor:
        parts = F.linear(x, module.c_attn.weight).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(attended.transpose(1, 2).flatten(2), module.c_proj.weight)
