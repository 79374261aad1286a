"""Hugging Face's Trainer with CoupledAdamW, on a small Llama made here. Needs `pip install 'coupled-adam[hf]'`.

python examples/hf_trainer.py
"""

import argparse
import tempfile

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from coupled_adam import CoupledAdamW
from small import B, H, T, V, batches, mean_ratio, read_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small Llama with Hugging Face's Trainer.")
    parser.add_argument("--steps", type=int, default=100, help="steps to train (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate (default: %(default)s)")
    options = parser.parse_args()

    set_seed(0)
    size = {"vocab_size": V, "hidden_size": H, "intermediate_size": 4 * H, "max_position_embeddings": T + 1}
    model = LlamaForCausalLM(LlamaConfig(**size, num_hidden_layers=2, num_attention_heads=4))
    rows = [row for batch in batches(read_tokens(), options.steps) for row in batch]

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            TrainingArguments(
                output_dir=folder,
                max_steps=options.steps,
                per_device_train_batch_size=B,
                logging_steps=25,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            # The key "model" takes the place of the groups that the Trainer would make. Learning rate and weight decay
            # are those of the dict; schedule and clipping stay the Trainer's.
            optimizer_cls_and_kwargs=(CoupledAdamW, {"model": model, "lr": options.lr, "weight_decay": 0.1}),
        )
        trainer.train()
    print(f"mean-embedding ratio {mean_ratio(model.lm_head.weight.detach()):.3f}")


if __name__ == "__main__":
    main()
