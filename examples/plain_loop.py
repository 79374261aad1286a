"""A training loop with CoupledAdamW, and with AdamW to compare: the loss, and how far the mean embedding has moved.

python examples/plain_loop.py
python examples/plain_loop.py --adamw
"""

import argparse
from statistics import mean

import torch

from coupled_adam import CoupledAdamW, param_groups
from small import Decoder, batches, mean_ratio, read_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model in a plain loop.")
    parser.add_argument("--steps", type=int, default=300, help="steps to train (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate (default: %(default)s)")
    parser.add_argument("--adamw", action="store_true", help="torch.optim.AdamW with the same groups, to compare")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = Decoder()
    if options.adamw:
        # The same groups, none of them coupled: the only difference is the second moment of the head.
        groups = param_groups(model, weight_decay=0.1, couple="none")
        optimizer = torch.optim.AdamW(groups, lr=options.lr)
    else:
        print(param_groups(model, weight_decay=0.1), "\n")  # which tables are coupled, what is decayed
        optimizer = CoupledAdamW(model, lr=options.lr, weight_decay=0.1)

    losses = []
    for step, tokens in enumerate(batches(read_tokens(), options.steps), 1):
        optimizer.zero_grad()
        loss = model(tokens)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        if step % 50 == 0 or step == options.steps:
            ratio = mean_ratio(model.head.weight.detach())
            print(f"step {step:4d}  loss {mean(losses[-50:]):.3f}  mean-embedding ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
