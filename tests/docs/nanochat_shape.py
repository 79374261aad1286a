"""A small model with nanochat's parameters, and stand-ins for its two optimizers with the same interface.

The parameter names, the kinds of groups, the keys of each kind and the order of calls in the training script are those
of nanochat (commit 0e4b3fa). The stand-ins compute SGD with momentum.

Usage: python nanochat_shape.py FOLDER RANK  (of two ranks; FOLDER has the files of the page, and gets the weights)
"""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

Groups = list[dict[str, Any]]
VOCABULARY, PADDED, H = 101, 128, 16
HEAD = {"lr": 4e-3, "betas": (0.8, 0.96), "eps": 1e-10, "weight_decay": 0.01}
STEPS = 4


class NanochatShape(nn.Module):
    """Embedding, two blocks of matrices, scalars per layer, an untied head with padding rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        block = {"c_fc": nn.Linear(H, 2 * H, bias=False), "c_proj": nn.Linear(2 * H, H, bias=False)}
        blocks = [nn.ModuleDict({name: nn.Linear(m.in_features, m.out_features, False) for name, m in block.items()})]
        blocks.append(nn.ModuleDict(block))
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(PADDED, H), "h": nn.ModuleList(blocks)})
        self.lm_head = nn.Linear(H, PADDED, bias=False)
        self.resid_lambdas = nn.Parameter(torch.ones(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.rms_norm(self.transformer["wte"](tokens), (H,))
        for scale, block in zip(self.resid_lambdas, self.transformer["h"], strict=True):
            x = scale * x + block["c_proj"](F.relu(block["c_fc"](x)).square())
        return self.lm_head(x)[..., :VOCABULARY]


class MuonAdamW(torch.optim.Optimizer):
    """Accepts groups with all their settings and no defaults, and reads their `kind` at every step."""

    def __init__(self, param_groups: Groups) -> None:
        super().__init__(param_groups, defaults={})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            if group["kind"] not in ("adamw", "muon"):
                raise ValueError(f"Unknown optimizer kind: {group['kind']}")
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].lerp_(p.grad, 0.1)
                p -= group["lr"] * state["momentum"]


class DistMuonAdamW(MuonAdamW):
    """Averages the gradients of its own parameters over the ranks; no other code does."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        super().step()


def groups_of(model: NanochatShape, kind_of_head: str, **settings: object) -> Groups:
    """The groups of setup_optimizer, by kind, the Muon ones by shape."""
    matrices = list(model.transformer["h"].parameters())
    adamw = {"kind": "adamw", "betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.0}
    muon = {"kind": "muon", "lr": 0.2, "momentum": 0.95, "ns_steps": 5, "beta2": 0.9, "weight_decay": 0.0}
    return [
        {"kind": kind_of_head, "params": list(model.lm_head.parameters()), **HEAD, **settings},
        adamw | {"params": list(model.transformer["wte"].parameters()), "lr": 0.3},
        adamw | {"params": [model.resid_lambdas], "lr": 0.5},
        *(
            muon | {"params": [p for p in matrices if p.shape == shape]}
            for shape in sorted({p.shape for p in matrices})
        ),
    ]


def setup_optimizer(model: NanochatShape, factory: Callable[[Groups], torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Build the optimizers with the page's two changes."""
    from coupled_kind import with_coupled

    optimizer = with_coupled(factory, groups_of(model, "coupled", vocabulary_size=VOCABULARY))
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def batch(step: int, rank: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(10 * step + rank))


def multiplier(step: int) -> float:
    return 1.0 - 0.2 * step


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int], rank: int = 0) -> None:
    """The training script: it writes a schedule into the groups by kind."""
    for step in steps:
        loss_of(model, batch(step, rank)).backward()
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * multiplier(step)
            if group["kind"] == "muon":
                group["momentum"] = 0.85
        optimizer.step()
        model.zero_grad(set_to_none=True)


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    sys.path.insert(0, str(folder))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = NanochatShape()
    train(model, setup_optimizer(model, DistMuonAdamW), range(STEPS), rank)
    torch.save(model.state_dict(), folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
