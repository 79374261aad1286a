"""Shared by the examples: a text from the standard library as tokens, and a small decoder.

Legend: V vocabulary rows, H hidden size, B batch, T time.
"""

import re
from collections import Counter
from collections.abc import Iterator
from pydoc_data.topics import topics  # chapters of Python's reference, which `help()` shows

import torch
from torch import Tensor, nn

V, H, B, T = 2000, 64, 16, 32


def read_tokens() -> Tensor:
    """Words and signs of the text, numbered by how often they occur; 0 stands for all but the V - 1 most frequent."""
    words = re.findall(r"\w+|[^\w\s]", " ".join(topics.values()))
    frequent = [word for word, _ in Counter(words).most_common(V - 1)]
    numbers = {word: number for number, word in enumerate(frequent, 1)}
    return torch.tensor([numbers.get(word, 0) for word in words])


def batches(tokens: Tensor, steps: int) -> Iterator[Tensor]:
    """Rows of T + 1 tokens, (B, T + 1), from random places."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - T, (B, 1), generator=generator)
        yield tokens[starts + torch.arange(T + 1)]


class Decoder(nn.Module):
    """Two layers of a Transformer, with an embedding and a head that are not tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, H)
        self.position = nn.Embedding(T, H)
        layer = nn.TransformerEncoderLayer(H, nhead=4, dim_feedforward=4 * H, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(H)
        self.head = nn.Linear(H, V, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.1)
        nn.init.normal_(self.head.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean loss of predicting each token of (B, T + 1) from those before it."""
        x = self.embedding(tokens[:, :-1]) + self.position.weight  # (B, T, H)
        x = self.layers(x, mask=nn.Transformer.generate_square_subsequent_mask(T), is_causal=True)
        logits = self.head(self.norm(x))  # (B, T, V)
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def mean_ratio(table: Tensor) -> float:
    """How far the mean embedding is from the origin, over the mean length: 0 is centred, 1 all embeddings alike."""
    return (table.mean(dim=0).norm() / table.norm(dim=1).mean()).item()
