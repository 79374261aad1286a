"""Muon for the hidden matrices, CoupledAdamW for everything else, one gradient norm for both.

python examples/with_muon.py
"""

import argparse
from statistics import mean

import torch

from coupled_adam import BatchedMuon, CoupledAdamW, check_muon, clip_together, hidden_matrices
from small import Decoder, batches, mean_ratio, read_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model with Muon beside CoupledAdamW.")
    parser.add_argument("--steps", type=int, default=200, help="steps to train (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate of both (default: %(default)s)")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = Decoder()
    matrices = hidden_matrices(model)
    print(matrices, "\n")  # which matrices Muon gets, and why not the others
    # torch.optim.Muon takes the same arguments. With match_rms_adamw the learning rate can be that of AdamW.
    muon = BatchedMuon(matrices, lr=options.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    coupled = CoupledAdamW(model, lr=options.lr, exclude=matrices)
    check_muon(model, muon, coupled)  # no vocabulary table in Muon, no parameter in both or in none
    clip_together(coupled, muon, max_norm=1.0)

    losses = []
    for step, tokens in enumerate(batches(read_tokens(), options.steps), 1):
        model.zero_grad()
        loss = model(tokens)
        loss.backward()
        losses.append(loss.item())
        coupled.step()  # first: it takes the norm of all gradients
        muon.step()
        if step % 50 == 0 or step == options.steps:
            ratio = mean_ratio(model.head.weight.detach())
            print(f"step {step:4d}  loss {mean(losses[-50:]):.3f}  mean-embedding ratio {ratio:.3f}", end="  ")
            print(f"gradient norm {coupled.grad_norm:.2f}")


if __name__ == "__main__":
    main()
