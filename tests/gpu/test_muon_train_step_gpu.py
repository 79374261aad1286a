"""The recorded step with Muon is bitwise equal to the plain one."""

import pytest
import torch
from test_train_step_gpu import AUTOCAST, assert_same, batch, deterministic, lr_of, small_model, split

from coupled_adam.config.run_sections import MuonSection, OptimizerSection, OutputTableSection
from coupled_adam.optimizer import BatchedMuon
from coupled_adam.training.optimizers import build_optimizers
from coupled_adam.training.train_step import TrainStep

pytestmark = pytest.mark.gpu
__all__ = ["deterministic"]  # a fixture


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("embeddings", ["coupled", "adamw"])
def test_a_recorded_step_with_muon_is_bitwise_equal_to_the_plain_one(embeddings: str, parts: int) -> None:
    section = OptimizerSection(
        embeddings=embeddings,
        lr=1e-3,
        max_grad_norm=0.5,
        matrices="muon",
        muon=MuonSection(lr_factor=2.0),
        tables=OutputTableSection(lr_factor=3.0, beta2=0.9),
    )
    plain, recorded = small_model(), small_model()
    plain_optimizers, recorded_optimizers = (build_optimizers(m, section, capturable=True) for m in (plain, recorded))
    assert isinstance(recorded_optimizers.optimizers[-1], BatchedMuon)
    plain_step = TrainStep(plain, plain_optimizers, precision=AUTOCAST)
    recorded_step = TrainStep(recorded, recorded_optimizers, precision=AUTOCAST, cuda_graphs=True)
    for step in range(5):
        micro_batches = split(batch(step), parts)
        expected = plain_step(micro_batches, lr_of(step))
        found = recorded_step(micro_batches, lr_of(step))
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
        assert_same(recorded, recorded_optimizers, plain, plain_optimizers)
