"""The demo's two trainings: what they share, and what is measured of them."""

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from coupled_adam.demo import comparison
from coupled_adam.demo.comparison import Outcome, Settings
from coupled_adam.demo.model import SmallGPT
from coupled_adam.demo.text import Corpus

SMALL = Settings(steps=12, vocabulary_size=50, layers=1, width=8, heads=2, context=6, batch=3)


def small_corpus() -> Corpus:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(50, (400,), generator=generator)
    return Corpus([str(number) for number in range(50)], tokens[:300], tokens[300:])


def small_model(settings: Settings = SMALL) -> SmallGPT:
    torch.manual_seed(3)
    return SmallGPT(50, settings.context, settings.width, settings.layers, settings.heads)


def run(settings: Settings) -> tuple[tuple[Outcome, Outcome], list[tuple[str, int, float]]]:
    seen: list[tuple[str, int, float]] = []
    outcomes = comparison.compare(small_corpus(), settings, lambda *step: seen.append(step))
    return outcomes, seen


def test_mean_embedding_ratio_agrees_with_numpy() -> None:
    table = torch.randn(37, 5, generator=torch.Generator().manual_seed(1)) + 0.3
    e = table.numpy().astype(np.float64)
    lengths = np.sqrt((e * e).sum(axis=1))
    expected = math.sqrt(sum(float(e[:, h].sum() / 37) ** 2 for h in range(5))) / lengths.mean()
    assert comparison.mean_embedding_ratio(table) == pytest.approx(expected, rel=1e-12)


def test_mean_embedding_ratio_is_one_for_equal_rows_and_zero_for_opposite_ones() -> None:
    row = torch.tensor([[3.0, 4.0]])
    assert comparison.mean_embedding_ratio(row.repeat(7, 1)) == pytest.approx(1.0)
    assert comparison.mean_embedding_ratio(torch.cat([row, -row])) == 0.0


def test_both_trainings_start_alike_and_only_the_optimizer_differs() -> None:
    (adamw, coupled), seen = run(SMALL)
    assert [adamw.name, coupled.name] == ["AdamW", "CoupledAdamW"]
    assert adamw.records[0] == coupled.records[0]
    assert [(name, step) for name, step, _ in seen] == [
        (name, step) for name in ("AdamW", "CoupledAdamW") for step in range(1, 13)
    ]
    losses = [loss for *_, loss in seen]
    assert losses[0] == losses[12]  # the first batch, before any update
    assert losses[1:12] != losses[13:]


def test_records_are_means_over_the_steps_since_the_one_before() -> None:
    (adamw, _), seen = run(SMALL)
    losses = [loss for name, _, loss in seen if name == "AdamW"]
    assert [record.step for record in adamw.records] == [0, 10, 12]
    assert [record.loss for record in adamw.records] == pytest.approx(
        [losses[0], sum(losses[:10]) / 10, sum(losses[10:]) / 2]
    )
    assert adamw.train_loss == adamw.records[-1].loss


def test_a_seed_repeats_a_run_exactly_and_another_one_does_not() -> None:
    torch.manual_seed(8)
    first, _ = run(SMALL)
    torch.manual_seed(9)
    before = torch.get_rng_state()
    again, _ = run(SMALL)
    other, _ = run(dataclasses.replace(SMALL, seed=1))
    assert again == first
    assert other[0].records[0].ratio != first[0].records[0].ratio, "the initial weights are the same"
    batches = [
        comparison.random_windows(small_corpus().train, dataclasses.replace(SMALL, seed=seed)) for seed in (0, 1)
    ]
    assert not torch.equal(*batches), "the batches are the same"
    assert torch.equal(torch.get_rng_state(), before), "the caller's random numbers were used"


def test_adamw_is_torchs_own_loop_with_clipping() -> None:
    settings = dataclasses.replace(SMALL, max_grad_norm=0.05)  # far below the norms that occur
    windows = comparison.random_windows(small_corpus().train, settings)
    model = small_model()
    reference = copy.deepcopy(model)
    optimizer = comparison.adamw(model, settings)
    comparison.train(model, optimizer, windows, settings, lambda *_: None)

    matrices = [
        p for name, p in reference.named_parameters() if p.ndim == 2 and name not in ("wte.weight", "wpe.weight")
    ]
    others = [p for p in reference.parameters() if all(p is not matrix for matrix in matrices)]
    plain = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    for step, batch in enumerate(windows):
        for group in plain.param_groups:
            group["lr"] = 3e-3 * comparison.learning_rate_factor(step, settings.steps)
        plain.zero_grad()
        logits = reference(batch[:, :-1])
        F.cross_entropy(logits.reshape(-1, 50), batch[:, 1:].reshape(-1)).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        plain.step()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7, msg=name)


def test_coupled_adamw_gets_every_setting_that_adamw_gets() -> None:
    settings = dataclasses.replace(SMALL, learning_rate=0.7, betas=(0.5, 0.6), weight_decay=0.4, max_grad_norm=0.3)
    adamw, coupled = (build(small_model(), settings) for build in (comparison.adamw, comparison.coupled_adamw))
    assert coupled.defaults["max_grad_norm"] == 0.3
    for theirs, ours in zip(adamw.param_groups, coupled.param_groups, strict=True):
        for key in ("name", "lr", "betas", "eps", "weight_decay"):
            assert ours[key] == theirs[key], key
    assert [group["name"] for group in coupled.param_groups if group["coupled"]] == ["output_embeddings"]


@pytest.mark.parametrize("steps", [1, 2, 9, 10, 300])
def test_learning_rate_warms_up_over_a_tenth_and_ends_at_a_tenth(steps: int) -> None:
    factors = [comparison.learning_rate_factor(step, steps) for step in range(steps)]
    peak = -(-steps // 10) - 1
    assert factors[peak] == 1.0
    assert factors[: peak + 1] == pytest.approx([(step + 1) / (peak + 1) for step in range(peak + 1)])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    if steps > 2:
        assert factors[-1] == pytest.approx(0.1)


def test_validation_loss_is_the_mean_over_every_token_of_every_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "VALIDATION_BATCH", 4)  # 16 windows in 4 batches
    tokens = small_corpus().validation
    windows = comparison.consecutive_windows(tokens, SMALL.context)
    assert windows.shape == (16, 7)
    assert windows[:, 1:].flatten().tolist() == tokens[1:97].tolist()
    model = small_model()
    log_p = F.log_softmax(model(windows[:, :-1]).double(), dim=-1).gather(-1, windows[:, 1:, None])
    assert comparison.validation_loss(model, windows[:15]) == pytest.approx(-log_p[:15].mean().item(), rel=1e-6)


def test_state_bytes_are_two_moments_and_a_step_and_coupling_saves_all_but_a_row() -> None:
    (adamw, coupled), _ = run(SMALL)
    tensors = list(small_model().parameters())
    assert adamw.state_bytes == sum(2 * 4 * p.numel() + 4 for p in tensors)
    assert adamw.state_bytes - coupled.state_bytes == 4 * (50 - 1) * 8


def test_model_starts_as_gpt2_and_sees_no_later_token() -> None:
    torch.manual_seed(0)
    model = SmallGPT(512, 8, 32, layers=2, heads=4)
    assert model.lm_head.weight is model.wte.weight
    assert model.wte.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.blocks[0].qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.blocks[1].mlp_out.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert not any(p.any() for name, p in model.named_parameters() if name.endswith("bias"))
    tokens = torch.randint(512, (2, 8))
    changed = tokens.clone()
    changed[:, 5:] = 0
    with torch.no_grad():
        torch.testing.assert_close(model(tokens)[:, :5], model(changed)[:, :5])
