"""Models with the parameters of language models but no forward pass, and the names of their groups.

Letters: V vocabulary rows, H hidden size, T positions.
"""

from torch import nn

from coupled_adam.optimizer.groups import ParamGroups

V, H, T = 100, 16, 12


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H)
        self.fc = nn.Linear(H, width)
        self.proj = nn.Linear(width, H, bias=False)


class GPT(nn.Module):
    """GPT-2's parameters without its forward pass; `width` is the width of the MLP."""

    def __init__(self, *, tied: bool, width: int = 40, vocabulary: int = V) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, H)
        self.wpe = nn.Embedding(T, H)
        self.h = nn.ModuleList(Block(width) for _ in range(2))
        self.ln_f = nn.LayerNorm(H)
        self.lm_head = nn.Linear(H, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight


class Headless(nn.Module):
    def __init__(self, **rows: int) -> None:
        super().__init__()
        for name, count in rows.items():
            setattr(self, name, nn.Embedding(count, H))
        self.fc = nn.Linear(H, 40, bias=False)


class Wrapper(nn.Module):
    """Holds the model under `module`, as DDP does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Parts(nn.Module):
    """Modules under the given names."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def names(groups: ParamGroups) -> dict[str, list[str]]:
    return {group["name"]: [name for name, _ in group["params"]] for group in groups}


def coupled_names(groups: ParamGroups) -> list[str]:
    return [name for group in groups if group.get("coupled") for name, _ in group["params"]]


def found_by(groups: ParamGroups) -> dict[str, tuple[str, str]]:
    return {table.name: (table.role, table.rule) for table in groups.tables}
