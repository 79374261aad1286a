"""GPT-2's initialisation, as a pure function of the seed and the parameter names.

Each parameter has its own generator, so its values do not depend on the order of the parameters, the device, or the
number of ranks: every rank draws the whole tensor and keeps its part.

Letters: L layers, V vocabulary rows.
"""

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from coupled_adam.base.errors import UserError
from coupled_adam.embeddings.unigram import Counts, smoothed_log_probabilities
from coupled_adam.models.language_model import LanguageModel
from coupled_adam.models.model_config import ModelConfig
from coupled_adam.optimizer.inventory import plain_name

STANDARD_DEVIATION = 0.02
OUTPUT_BIAS = "lm_head.bias"
# The matrices that write into the residual stream, two per layer: GPT-2 and Llama.
RESIDUAL_PROJECTIONS = ("attn.c_proj.weight", "mlp.c_proj.weight", "self_attn.o_proj.weight", "mlp.down_proj.weight")


def initialise(model: LanguageModel, seed: int, unigram: Counts | None = None) -> None:
    """Initialise all parameters: matrices and tables from a normal distribution, norms with 1, biases with 0.

    The standard deviation is 0.02, and 0.02 / sqrt(2L) for the projections that write into the residual stream. An
    output bias starts at the smoothed log probabilities of the tokens.

    Args:
        model: plain or sharded by `fully_shard`, on any device but meta.
        seed: two models with the same config and seed are equal.
        unigram: token counts of the training text, at most V; required for an output bias.

    Example:
        >>> from coupled_adam.models.model_config import ModelConfig, build_model
        >>> model = build_model(ModelConfig("gpt2", layers=1, heads=1, width=8, context=4, vocabulary_size=1000))
        >>> initialise(model, seed=1)
        >>> round(model.wte.weight.std().item(), 3)
        0.02
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise UserError(f"parameter {name!r} is on the meta device; call model.to_empty(device=...) first")
        if plain_name(name) == OUTPUT_BIAS:
            values = _output_bias(model.config, unigram)
        else:
            values = _values(plain_name(name), parameter.shape, seed, model.config.layers)
        _copy_part(parameter, values)


def _output_bias(config: ModelConfig, unigram: Counts | None) -> Tensor:
    """(V,) float32 on the CPU."""
    if unigram is None:
        raise UserError(
            f"output_bias is {config.output_bias!r}, which needs token counts; pass the counts of the training text as "
            "unigram="
        )
    return torch.from_numpy(smoothed_log_probabilities(unigram, config.vocabulary_size)).float()


def _values(name: str, shape: torch.Size, seed: int, layers: int) -> Tensor:
    """The whole parameter, float32 on the CPU."""
    if name.endswith(".bias"):
        return torch.zeros(shape, device="cpu")
    if len(shape) == 1:
        return torch.ones(shape, device="cpu")
    deviation = STANDARD_DEVIATION
    if name.endswith(RESIDUAL_PROJECTIONS):
        # Each layer adds to the residual stream twice; this keeps its variance independent of the depth.
        deviation /= math.sqrt(2 * layers)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape, device="cpu").normal_(0.0, deviation, generator=generator)


def _copy_part(parameter: nn.Parameter, values: Tensor) -> None:
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            # src_data_rank=None: every rank has the whole tensor, nothing needs to be sent.
            on_device = values.to(parameter.device_mesh.device_type)
            values = distribute_tensor(on_device, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(values)
