"""Train a small model with axolotl's trainer and the plugin of the page, and compare with Algorithm 1.

Usage: python axolotl_run.py  (in a folder with the files of the page; the last output line is the result as JSON)
"""

import json


def main() -> None:
    import torch
    from axolotl.core.trainers.base import AxolotlTrainer
    from axolotl.core.training_args import AxolotlTrainingArguments
    from axolotl.integrations.base import PluginManager
    from axolotl.utils.dict import DictDefault
    from coupled_axolotl import CoupledAdamWPlugin
    from datasets import Dataset
    from framework_checks import assert_trainer_equals_algorithm_1, fresh_llama

    calls = []
    create_optimizer = CoupledAdamWPlugin.create_optimizer
    CoupledAdamWPlugin.create_optimizer = lambda *given: (calls.append(1), create_optimizer(*given))[1]

    size = {"vocab_size": 101, "hidden_size": 16, "intermediate_size": 32}
    size |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    model = fresh_llama(size)
    tokens = torch.randint(0, 101, (8, 9))
    cfg = DictDefault({"learning_rate": 1e-3, "weight_decay": 0.1})
    plugins = PluginManager.get_instance()
    plugins.cfg = cfg
    plugins.register("coupled_axolotl.CoupledAdamWPlugin")
    arguments = AxolotlTrainingArguments(
        output_dir="out",
        max_steps=3,
        per_device_train_batch_size=8,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    data = Dataset.from_dict({"input_ids": tokens.tolist(), "labels": tokens.tolist()})
    trainer = AxolotlTrainer(model=model, args=arguments, train_dataset=data)
    plugins.post_trainer_create(cfg, trainer)  # as axolotl.train.setup_model_and_trainer does
    trainer.train()
    names = {"size": size, "tokens": tokens, "model": model, "trainer": trainer}
    assert_trainer_equals_algorithm_1(names, max_norm=1.0)
    optimizer = type(trainer.optimizer.optimizer).__name__
    print(json.dumps({"optimizer": optimizer, "create_optimizer was called": bool(calls)}))


if __name__ == "__main__":
    main()
