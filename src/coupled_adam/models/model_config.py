"""The shape of a model, and its size and cost, computed without building it.

Letters: V vocabulary rows, H width, L layers, T context.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from coupled_adam.base.errors import UserError

if TYPE_CHECKING:
    from coupled_adam.models.language_model import LanguageModel

ARCHITECTURES = ("gpt2", "llama")
OUTPUT_BIASES = ("none", "unigram", "learned")
RESIDUAL_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a language model.

    Args:
        architecture: "gpt2" (learned positions, GELU) or "llama" (RoPE, SwiGLU).
        layers: L.
        heads: attention heads, a divisor of the width.
        width: H.
        context: T, the longest sequence.
        vocabulary_size: V, rows of the table; at least the tokens of the tokenizer.
        tied: one table for input and output.
        bias: biases in linear layers and LayerNorms; GPT-2 only.
        output_bias: bias of the logits: "none", "unigram" (fixed at the log unigram probabilities of the training text)
            or "learned" (starts there).
        logit_cap: c of the soft cap c * tanh(logit / c); None for no cap.
        residual_dtype: dtype of the sums between the blocks, and of their gradients, under bf16 autocast: "float32" or
            "bfloat16". Without autocast they have the dtype of the weights.

    Example:
        >>> ModelConfig("gpt2", layers=12, heads=12, width=768).head_size
        64
    """

    architecture: str
    layers: int
    heads: int
    width: int
    context: int = 1024
    vocabulary_size: int = 50304
    tied: bool = True
    bias: bool = False
    output_bias: str = "none"
    logit_cap: float | None = None
    residual_dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            expected = " or ".join(repr(name) for name in ARCHITECTURES)
            raise UserError(f"Invalid architecture: {self.architecture!r}; expected {expected}")
        if self.output_bias not in OUTPUT_BIASES:
            expected = ", ".join(repr(name) for name in OUTPUT_BIASES)
            raise UserError(f"Invalid output_bias: {self.output_bias!r}; expected one of {expected}")
        if self.residual_dtype not in RESIDUAL_DTYPES:
            expected = " or ".join(repr(name) for name in RESIDUAL_DTYPES)
            raise UserError(f"Invalid residual_dtype: {self.residual_dtype!r}; expected {expected}")
        if self.logit_cap is not None and not self.logit_cap > 0:
            raise UserError(f"Invalid logit_cap: {self.logit_cap!r}; expected a number above 0, or None")
        for name in ("layers", "heads", "width", "context", "vocabulary_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UserError(f"Invalid {name}: {value!r}; expected a whole number of at least 1")
        if self.width % self.heads:
            raise UserError(f"Invalid heads: {self.heads} does not divide the width {self.width}; choose a divisor")
        if self.architecture == "llama" and self.head_size % 2:
            raise UserError(
                f"Invalid heads: {self.heads} with width {self.head_size} each, but RoPE needs an even width; "
                "choose heads so that width / heads is even"
            )
        if self.architecture == "llama" and self.bias:
            raise UserError("Invalid bias: True; the Llama-style model has no biases, set bias = false")

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.width // self.heads

    @property
    def mlp_width(self) -> int:
        """Hidden width of the MLP: 4H, or for SwiGLU's three matrices 8H/3 rounded up to a multiple of 256."""
        if self.architecture == "gpt2":
            return 4 * self.width
        return -(-8 * self.width // (3 * 256)) * 256


def build_model(config: ModelConfig) -> "LanguageModel":
    """Build a model without initialising its parameters (see `initial.initialise`).

    Args:
        config: the shape of the model.

    Returns:
        The model, on the current default device; under `with torch.device("meta")` nothing is allocated.

    Example:
        >>> model = build_model(ModelConfig("llama", layers=1, heads=2, width=8, context=16, vocabulary_size=32))
        >>> model.output_table_name
        'embed_tokens.weight'
    """
    # Imported here because a config must load without torch, and the models import this module.
    from coupled_adam.models.gpt2 import GPT2
    from coupled_adam.models.llama import Llama

    return GPT2(config) if config.architecture == "gpt2" else Llama(config)


def matrices_of_a_block(config: ModelConfig) -> list[tuple[int, int]]:
    """Shapes (rows, columns) of the matrices of one block, in layer order.

    Example:
        >>> matrices_of_a_block(ModelConfig("gpt2", layers=1, heads=1, width=8))
        [(24, 8), (8, 8), (32, 8), (8, 32)]
    """
    H, M = config.width, config.mlp_width
    if config.architecture == "gpt2":
        return [(3 * H, H), (H, H), (M, H), (H, M)]
    return [(H, H), (H, H), (H, H), (H, H), (M, H), (M, H), (H, M)]


def parameter_count(config: ModelConfig) -> int:
    """Number of trained parameters N; a tied table counts once.

    Example:
        >>> parameter_count(ModelConfig("gpt2", layers=12, heads=12, width=768))
        124373760
    """
    H, table = config.width, config.vocabulary_size * config.width
    norm = 2 * H if config.bias else H
    matrices = sum(rows * columns for rows, columns in matrices_of_a_block(config))
    biases = 5 * H + config.mlp_width if config.bias else 0  # GPT-2 alone has any
    blocks = config.layers * (matrices + biases + 2 * norm)
    head_bias = config.vocabulary_size if config.output_bias == "learned" else 0
    return table * (1 if config.tied else 2) + _position_parameters(config) + blocks + norm + head_bias


def flops_per_token(config: ModelConfig) -> int:
    """Floating-point operations of one training step per token, as counted by PaLM: 6N + 12LHT.

    N excludes lookup tables: positions, and the input table of an untied model.

    Example:
        >>> flops_per_token(ModelConfig("gpt2", layers=12, heads=12, width=768)) / 1e6
        854.770176
    """
    looked_up = _position_parameters(config) + (0 if config.tied else config.vocabulary_size * config.width)
    attention = 12 * config.layers * config.width * config.context
    return 6 * (parameter_count(config) - looked_up) + attention


def _position_parameters(config: ModelConfig) -> int:
    return config.context * config.width if config.architecture == "gpt2" else 0
