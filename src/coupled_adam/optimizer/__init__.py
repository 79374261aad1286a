"""The algorithm: Coupled Adam as a torch optimizer. Knows nothing of models' training, data or files."""

from coupled_adam.optimizer.coupled_adamw import CoupledAdamW
from coupled_adam.optimizer.groups import param_groups
from coupled_adam.optimizer.muon import BatchedMuon
from coupled_adam.optimizer.state_dicts import convert_state_dict

__all__ = ["BatchedMuon", "CoupledAdamW", "convert_state_dict", "param_groups"]
