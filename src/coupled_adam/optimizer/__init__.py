"""Coupled Adam as a torch optimizer. Independent of training loops, data and files."""

from coupled_adam.optimizer.coupled_adamw import CoupledAdamW
from coupled_adam.optimizer.groups import param_groups
from coupled_adam.optimizer.joint_clipping import clip_together
from coupled_adam.optimizer.muon import BatchedMuon
from coupled_adam.optimizer.muon_parameters import check_muon, hidden_matrices
from coupled_adam.optimizer.state_dicts import convert_state_dict

__all__ = [
    "BatchedMuon",
    "CoupledAdamW",
    "check_muon",
    "clip_together",
    "convert_state_dict",
    "hidden_matrices",
    "param_groups",
]
