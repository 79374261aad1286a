"""The theory of a run uses a table's own Adam settings, if it has any."""

import torch

from coupled_adam.config.run_config import load_config
from coupled_adam.theory.checkpoint_measures import TableUpdates


def test_updates_of_a_table_use_its_own_betas_and_eps() -> None:
    settings = ["model.tied=false", "optimizer.tables.beta1=0.5", "optimizer.input_table.eps=1e-3"]
    optimizer = load_config("tiny", settings).optimizer
    mean = torch.zeros(4)
    output = TableUpdates(optimizer, optimizer.tables, mean, None).state
    assert (output.beta1, output.beta2, output.eps) == (0.5, optimizer.beta2, optimizer.eps)
    input = TableUpdates(optimizer, optimizer.input_table, mean, None).state
    assert (input.beta1, input.beta2, input.eps) == (optimizer.beta1, optimizer.beta2, 1e-3)
