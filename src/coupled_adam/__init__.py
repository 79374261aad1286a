"""Better embeddings with Coupled Adam."""

from coupled_adam.optimizer import CoupledAdamW, convert_state_dict, param_groups

__all__ = ["CoupledAdamW", "__version__", "convert_state_dict", "param_groups"]

__version__ = "0.1.0.dev0"
