"""The sections of a run config: every key with its type, default and meaning.

The text under a key is shown to users, as a comment in a run's config.toml and on the reference page.
"""

from typing import Literal

from pydantic import Field

from coupled_adam.base.text import setting
from coupled_adam.config.field_types import (
    Count,
    Decay,
    NotNegative,
    Number,
    Positive,
    Share,
    Steps,
    Text,
    Tokens,
    WholeNumber,
)
from coupled_adam.config.schema import Section

TABLE_WORDS = {"lr_factor": "learning rate times"}  # the other keys of a table say what they are


class ModelSection(Section):
    """Shape of the model."""

    architecture: Literal["gpt2", "llama"] = "gpt2"
    """gpt2: learned positions, GELU, LayerNorm. llama: rotary positions, SwiGLU, LayerNorm."""
    layers: Count
    """Number of blocks."""
    heads: Count
    """Attention heads per block; must divide the width."""
    width: Count
    """Hidden size H."""
    context: Count = 1024
    """Tokens per sample, T."""
    vocabulary_size: Count | Literal["auto"] = "auto"
    """Rows V of the embedding table. auto: the tokenizer's size, rounded up to a multiple of 64."""
    tied: bool = True
    """Whether input and output embeddings share one table."""
    bias: bool = False
    """gpt2 only: biases in the linear layers and norms."""
    output_bias: Literal["none", "unigram", "learned"] = "none"
    """Bias on the logits. unigram: fixed at the log frequency of each token in the training text, with one added to
    each count. learned: starts there and is trained without weight decay."""
    logit_cap: Positive | None = None
    """Soft cap c of the logits, c * tanh(logit / c); Gemma 2 uses 30. none: no cap."""
    residual_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the sums between the blocks and their gradients. bfloat16: half the bytes; only with precision bf16."""


class DataSection(Section):
    """Training data."""

    folder: Text
    """Folder of token files, written by `coupled-adam data prepare` or nanoGPT."""
    source: Text | None = None
    """Text for a missing folder: python-docs, openwebtext, slimpajama, or text:FILES. none: the folder must exist."""
    tokenizer: Text = "gpt2"
    """Tokenizer for preparing the text: gpt2, bpe:4096 (4096 tokens, trained on the text), or a tokenizer.json file."""
    order: Literal["random", "epochs"] = "random"
    """random: windows at random positions. epochs: every window once per epoch, in a new order."""


class MuonSection(Section):
    """Muon, used if `optimizer.matrices` is "muon". Its learning rate follows the schedule."""

    lr_factor: Positive = 1.0
    """Muon's learning rate is this factor times lr."""
    momentum: Decay = 0.95
    """Nesterov momentum."""
    weight_decay: NotNegative | None = None
    """Weight decay of the matrices. none: optimizer.weight_decay."""
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """Factor on the learning rate of a matrix. match_rms_adamw: 0.2 sqrt(max(rows, columns)), which suits AdamW's lr
    and weight decay. original: sqrt(max(1, rows / columns)), which needs a larger lr_factor."""


class TableSection(Section):
    """Adam's hyperparameters for one vocabulary table, if they differ from those of the other weights."""

    lr_factor: Positive = 1.0
    """The table's learning rate is this factor times lr."""
    beta1: Decay | None = None
    """Decay of the first moment. none: optimizer.beta1."""
    beta2: Decay | None = None
    """Decay of the second moment. none: optimizer.beta2."""
    eps: Positive | None = None
    """Added to the root of the second moment. none: optimizer.eps."""


class OutputTableSection(TableSection):
    """Adam's hyperparameters for the output or tied table, if they differ from those of the other weights."""


class InputTableSection(TableSection):
    """Adam's hyperparameters for the input table of an untied model."""


class OptimizerSection(Section):
    """Optimizers of the embeddings, of the blocks' matrices, and of everything else (AdamW)."""

    embeddings: Literal["adamw", "coupled", "sgd"] = "coupled"
    """Optimizer of the embeddings: adamw (standard), coupled (Coupled Adam), or sgd."""
    matrices: Literal["adamw", "muon"] = "adamw"
    """Optimizer of the blocks' matrices: adamw or muon."""
    lr: Positive
    """Peak learning rate."""
    couple: Literal["output", "input", "all"] = "output"
    """Tables that `embeddings` and `centre` apply to, in an untied model; the other table uses AdamW. A tied table
    counts as output."""
    scale_exponent: Number = 0.0
    """coupled only: n; the second moment is multiplied by 2^-n. 0: Coupled Adam."""
    row_exponent: Share = 0.0
    """coupled only: how closely the second moment follows the mean square of a token's row. 0: Coupled Adam. 1: fully
    (Adafactor's second moment). In between: partially coupled."""
    column_exponent: Share = 1.0
    """coupled only: the same for the mean square of a column. 0: not at all. 1: fully."""
    mean_free: bool = False
    """coupled only: subtract the mean over the vocabulary from every update, so the mean embedding never moves."""
    row_exponent_start: Share | None = None
    """coupled only: row_exponent at the first step; it changes linearly over `anneal`. none: constant row_exponent."""
    anneal: Steps | None = None
    """coupled only: length of the change of row_exponent: steps, or a share such as "10%"."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """coupled only: dtype of the tables' first moments. bfloat16: half the bytes, with stochastic rounding."""
    sgd_factor: Positive | None = None
    """sgd only, required: the embeddings' learning rate is this factor times lr."""
    sgd_momentum: Decay = 0.9
    """sgd only: momentum."""
    centre: bool = False
    """Subtract the mean embedding after each step. Not with row_exponent, column_exponent or mean_free."""
    beta1: Decay = 0.9
    """AdamW: decay of the first moment."""
    beta2: Decay = 0.95
    """AdamW: decay of the second moment."""
    eps: Positive = 1e-8
    """AdamW: added to the root of the second moment."""
    weight_decay: NotNegative = 0.1
    """AdamW: weight decay of linear layers. Embeddings, norms and biases are not decayed."""
    max_grad_norm: NotNegative = 1.0
    """Clip the gradients to this global norm. 0: no clipping."""
    z_loss: NotNegative = 0.0
    """Weight of the mean squared logsumexp of the logits in the loss. 0: off."""
    mu_loss: NotNegative = 0.0
    """Weight of the squared length of the mean output embedding in the loss. 0: off."""
    tables: OutputTableSection = Field(default_factory=OutputTableSection)
    input_table: InputTableSection = Field(default_factory=InputTableSection)
    muon: MuonSection = Field(default_factory=MuonSection)

    def table_facts(self, *, tied: bool) -> list[str]:
        """Describe the tables whose settings differ from those of the other weights."""
        facts = []
        for name, table in (("tied" if tied else "output", self.tables), ("input", self.input_table)):
            own = {TABLE_WORDS.get(key, key): value for key, value in table.model_dump(exclude_defaults=True).items()}
            if own:
                facts.append(f"{name} table: {', '.join(f'{word} {setting(value)}' for word, value in own.items())}")
        return facts

    def betas_of(self, table: TableSection) -> tuple[float, float]:
        """Adam's decays for a vocabulary table."""
        return (
            self.beta1 if table.beta1 is None else table.beta1,
            self.beta2 if table.beta2 is None else table.beta2,
        )

    def eps_of(self, table: TableSection) -> float:
        """Adam's epsilon for a vocabulary table."""
        return self.eps if table.eps is None else table.eps


class ScheduleSection(Section):
    """Learning rate schedule."""

    kind: Literal["cosine", "constant", "wsd"] = "cosine"
    """After the warm-up: cosine, constant, or wsd (constant, then linear decay)."""
    warmup: Steps = 0
    """Linear warm-up from zero: steps, or a share such as "1%"."""
    final_fraction: Share = 0.1
    """cosine and wsd only: final learning rate as a fraction of lr."""
    decay: Steps = "20%"
    """wsd only: length of the linear decay at the end: steps, or a share."""


class TrainingSection(Section):
    """Training length, batch size, device and parallelism."""

    tokens: Tokens
    """Data size D in tokens, such as "5B" or "300k". It determines the number of steps."""
    batch_size: Count
    """Samples per step, over all ranks."""
    micro_batch_size: Count | None = None
    """Maximum number of samples per rank and forward pass; gradients are accumulated. none: all samples of the rank."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA if available."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """bf16: autocast, weights stay float32. auto: bf16 on CUDA, float32 on CPU."""
    compile: bool | Literal["auto"] = "auto"
    """torch.compile. auto: on CUDA."""
    cuda_graphs: bool | Literal["auto"] = "auto"
    """Replay a step as CUDA graphs, faster for small models. auto: on one GPU."""
    deterministic: bool = False
    """CUDA: use only deterministic algorithms. Slower, but a resumed run is bit-exact."""
    parallel: Literal["auto", "none", "ddp", "fsdp2"] = "auto"
    """With several torchrun processes: ddp (each holds the whole model) or fsdp2 (each holds a shard). auto: ddp."""
    threads: Count | None = None
    """CPU threads per process. none: torch's default."""


class CheckpointSection(Section):
    """When to save checkpoints. A run always saves one at the end and when it is stopped."""

    every: Count | None = None
    """Save every N steps. none: not by steps."""
    minutes: Positive | None = 30.0
    """Save every N minutes. none: not by time."""
    keep: Count = 2
    """Number of latest checkpoints to keep."""
    milestones: WholeNumber = 0
    """Number of checkpoints that are never deleted: 10 keeps one after each tenth of the tokens. 0: none."""


class LogSection(Section):
    """What to measure and where to log it. metrics.jsonl is always written."""

    every: Count = 10
    """Log the loss every N steps."""
    monitor_every: Count = 100
    """Log the length of the mean embedding (mu_norm, mu_norm_ratio) every N steps."""
    measure_every: Count | None = None
    """Log all embedding measures every N steps. none: at the end."""
    val_every: Count | None = None
    """Log the validation loss every N steps. none: at the end."""
    val_batches: Count = 20
    """Number of batches for the validation loss."""
    tensorboard: bool = False
    """Also write TensorBoard files to the run folder."""
    wandb: Text | None = None
    """Also log to this Weights & Biases project."""
    wordsim: Text | None = None
    """Folder of word-similarity benchmarks, or "download". none: no word similarity."""
