"""Better embeddings with Coupled Adam."""

from typing import TYPE_CHECKING

__all__ = ["BatchedMuon", "CoupledAdamW", "__version__", "convert_state_dict", "param_groups"]

__version__ = "0.1.0"

# The public names are imported when they are first asked for (PEP 562): OpenMP reads its environment once, when torch
# is loaded, and the command line has to set it before; and `coupled-adam --help` need not wait for torch.
if TYPE_CHECKING:
    from coupled_adam.optimizer import BatchedMuon, CoupledAdamW, convert_state_dict, param_groups
else:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from coupled_adam import optimizer

        globals()[name] = getattr(optimizer, name)
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
