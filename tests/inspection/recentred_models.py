"""Small Hugging Face models with a mean far from the origin, for the tests of recentring.

Legend: V vocabulary rows, H hidden size.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from coupled_adam.inspection.recentring.probability_check import SAMPLE

V, H = 320, 32
TOKENS = 300
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0}
GPT2 = {
    "vocab_size": V,
    "n_positions": 48,
    "n_embd": H,
    "n_layer": 2,
    "n_head": 2,
    **SPECIAL,
}
LLAMA = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    **SPECIAL,
}


def off_centre(model: Any, seed: int = 0) -> Any:
    """Give the model random weights everywhere, and a mean in both tables."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
        for table in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
            table.add_(torch.randn(H, generator=generator))
    return model.eval()


def gpt2(**changes: Any) -> Any:
    return off_centre(transformers.GPT2LMHeadModel(transformers.GPT2Config(**(GPT2 | changes))))


def llama(**changes: Any) -> Any:
    return off_centre(transformers.LlamaForCausalLM(transformers.LlamaConfig(**(LLAMA | changes))))


def save(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE of TOKENS tokens: the last V - TOKENS rows of the tables are padding."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([SAMPLE] * 3, trainer)
    assert tokenizer.get_vocab_size() == TOKENS
    tokenizer.save(str(folder / "tokenizer.json"))


def log_probabilities(folder: Path) -> Tensor:
    """Log-probabilities of a folder opened by transformers, on the given tokens, in float64."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    tokens = torch.randint(TOKENS, (3, 40), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return model(tokens).logits.log_softmax(-1)


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def change_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config_of(folder) | changes))
