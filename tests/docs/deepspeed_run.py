"""Train tiny.py with DeepSpeed at one stage, on the ranks that torchrun starts, and write the result.

Usage: torchrun --nproc-per-node 2 deepspeed_run.py STAGE  (in a folder with the files of the pages)
"""

import json
import re
import sys
from pathlib import Path


def main() -> None:
    import deepspeed
    import torch
    import torch.distributed as dist
    from page_reference import assert_coupled, assert_same_weights, fresh_model, tokens_of, train_by_algorithm_1
    from tiny import loss_of

    from coupled_adam import CoupledAdamW

    stage = int(sys.argv[1])
    deepspeed.init_distributed("gloo")
    rank = dist.get_rank()
    model = fresh_model(tied=False)
    optimizer = CoupledAdamW(model, lr=1e-3)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    try:
        for tokens in tokens_of(3, seed=rank):
            engine.backward(loss_of(engine, tokens))
            engine.step()
    except ValueError as error:
        said = re.findall(r"head\.weight|DeepSpeed ZeRO|fully_shard|stage 0", str(error))
        shapes = re.findall(r"shape \((.*?)\)", str(error))
        outcome = {"said": said, "dimensions": len([n for n in shapes[0].split(",") if n.strip()])}
    else:
        expected = fresh_model(tied=False)
        both = [torch.cat(pair) for pair in zip(tokens_of(3, seed=0), tokens_of(3, seed=1), strict=True)]
        train_by_algorithm_1(expected, both, table="head.weight")
        assert_same_weights(model, expected)
        assert_coupled(optimizer, model.head.weight, steps=3)
        outcome = {"trained": True}
    Path(f"outcome.rank{rank}").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
