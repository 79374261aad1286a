"""First moments in bfloat16: updates follow the literal algorithm, and the state survives files and copies."""

import copy
import io
import pickle
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import coupled, gradients, oracle, relative_error, run, table
from test_torch_features import peak_bytes
from torch import Tensor, nn

from coupled_adam import CoupledAdamW, convert_state_dict, param_groups
from coupled_adam.optimizer.reference import reference_init, reference_step
from coupled_adam.optimizer.reference_rounding import rounded_table

BFLOAT16: dict[str, Any] = {"state_dtype": torch.bfloat16, "state_seed": 3}
MEMBERS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1, "maximize": True, "scale_exponent": 2.0},
    {"row_exponent": 0.25},
    {"column_exponent": 0.5, "mean_free": True},
    {"row_exponent": 0.25, "mean_free": True, "vocabulary_size": 20},
]
SHAPE = (23, 9)


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().view(torch.int16)


def moment_of(optimizer: torch.optim.Optimizer, param: Tensor) -> Tensor:
    moment: Tensor = optimizer.state[param]["exp_avg"]
    return moment


def clipped(grads: list[Tensor], limit: float) -> list[Tensor]:
    return [grad * min(1.0, limit / (float(grad.norm()) + 1e-6)) for grad in grads]


def saved_and_loaded(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Save and load through a file, with weights_only=True."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def assert_same_state(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    for mine, theirs in zip(one.state.values(), other.state.values(), strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert value.dtype == theirs[key].dtype, key
            assert torch.equal(value, theirs[key]), key


class TestUpdates:
    @pytest.mark.parametrize("limit", [None, 0.5], ids=["", "clipped"])
    @pytest.mark.parametrize("options", MEMBERS, ids=str)
    def test_every_path_follows_the_literal_algorithm(
        self, path: ModuleType, options: dict[str, Any], limit: float | None
    ) -> None:
        param, grads = table(SHAPE), gradients(SHAPE, 4)
        expected = oracle(param, grads if limit is None else clipped(grads, limit), state_seed=3, **options)
        optimizer = coupled(param, **BFLOAT16, **options, max_grad_norm=limit)
        run(optimizer, param, grads)
        moment = moment_of(optimizer, param)
        assert moment.dtype == torch.bfloat16
        # A moment that differs in the last bit of float32 is rounded the other way once in 2^16 times.
        assert int((moment.double() != expected.first_moment).sum()) <= 1
        assert relative_error(param, expected.embeddings) < (1e-6 if limit is None else 1e-5)

    @pytest.mark.parametrize(
        ("dtype", "options"), [(torch.bfloat16, MEMBERS[0]), (torch.float16, MEMBERS[0]), (torch.bfloat16, MEMBERS[-1])]
    )
    def test_tables_in_half_precision_follow_it_too(
        self, path: ModuleType, options: dict[str, Any], dtype: torch.dtype
    ) -> None:
        param, grads = table(SHAPE, dtype), gradients(SHAPE, 3, dtype)
        expected = oracle(param, grads, state_seed=3, **options)
        optimizer = coupled(param, **BFLOAT16, **options)
        run(optimizer, param, grads)
        assert torch.equal(moment_of(optimizer, param).double(), expected.first_moment)
        assert relative_error(param, expected.embeddings) < 2e-2

    @given(
        V=st.integers(1, 40),
        H=st.integers(1, 40),
        steps=st.integers(1, 3),
        seed=st.integers(0, 2**64 - 1),
        scale=st.sampled_from([1e-42, 1e-30, 1.0, 1e30]),
    )
    @settings(max_examples=25)
    def test_moments_of_any_shape_seed_and_size_match_the_literal_rounding(
        self, V: int, H: int, steps: int, seed: int, scale: float
    ) -> None:
        param = nn.Parameter(torch.zeros(V, H))
        # With beta1 = 0.5 and a previous moment of 0, the moment is bitwise equal to half the gradient.
        optimizer = coupled(param, betas=(0.5, 0.9), state_dtype=torch.bfloat16, state_seed=seed)
        for step in range(1, steps + 1):
            grad = torch.randn(V, H, generator=torch.Generator().manual_seed(V * H + step)) * scale
            if step > 1:
                moment_of(optimizer, param).zero_()
            run(optimizer, param, [2 * grad])
            expected = rounded_table(grad, seed=seed, table=0, step=step)
            assert torch.equal(moment_of(optimizer, param).double(), expected)

    @pytest.mark.parametrize("options", [{}, {"row_exponent": 0.25}], ids=str)
    def test_an_update_uses_the_moment_before_it_is_rounded(self, path: ModuleType, options: dict[str, Any]) -> None:
        params = [table(SHAPE), table(SHAPE)]
        grads = gradients(SHAPE, 1)
        for param, state in zip(params, ({}, BFLOAT16), strict=True):
            run(coupled(param, **options, **state), param, grads)
        assert torch.equal(*params)

    def test_mean_free_updates_add_up_to_zero(self, path: ModuleType) -> None:
        param = table(SHAPE)
        before = param.detach().double().mean(dim=0)
        run(coupled(param, row_exponent=0.25, mean_free=True, **BFLOAT16), param, gradients(SHAPE, 5))
        assert float((param.detach().double().mean(dim=0) - before).abs().max()) < 1e-7

    def test_elements_beyond_index_2_to_the_32_have_the_bits_of_the_literal_hash(
        self, path: ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # The shard of a rank that starts in the middle of a row, a few elements before index 2^32.
        from coupled_adam.optimizer import reference_rounding, step

        first = 2**32 - 40
        real = step.Rounding
        monkeypatch.setattr(step, "Rounding", lambda key, **_: real(key, first, is_large=True))
        param, grad = table(SHAPE), gradients(SHAPE, 1)[0]
        optimizer = coupled(param, betas=(0.5, 0.9), **BFLOAT16)
        run(optimizer, param, [2 * grad])
        key = reference_rounding.table_key(3, 0)
        expected = [
            reference_rounding.rounded_number(x, reference_rounding.random_bits(key, 1, first + i))
            for i, x in enumerate(grad.flatten().tolist())
        ]
        assert moment_of(optimizer, param).flatten().tolist() == expected

    def test_moments_reach_a_gradient_that_rounding_to_nearest_never_reaches(self) -> None:
        means = {}
        for state_dtype in (None, torch.bfloat16):
            param = nn.Parameter(torch.zeros(20, 20, dtype=torch.bfloat16))
            optimizer = coupled(param, betas=(0.99, 0.99), lr=0.0, state_dtype=state_dtype)
            run(optimizer, param, [torch.ones(20, 20, dtype=torch.bfloat16)] * 300)
            means[state_dtype] = float(moment_of(optimizer, param).float().mean())
        expected = 1 - 0.99**300
        assert means[None] < expected - 0.1  # one percent of the remaining distance is less than half a bfloat16 step
        assert abs(means[torch.bfloat16] - expected) < 0.005

    def test_different_tables_and_steps_have_different_bits(self) -> None:
        params = [nn.Parameter(torch.zeros(64, 64)) for _ in range(3)]
        groups = [{"params": params[:2], "coupled": True}, {"params": params[2:], "coupled": True}]
        optimizer = CoupledAdamW(groups, betas=(0.5, 0.9), **BFLOAT16)
        seen = []
        for step in (1, 2):
            for param in params:
                param.grad = torch.full((64, 64), 2 * (1 + 2.0**-8))
                if step == 2:
                    moment_of(optimizer, param).zero_()
            if step == 2:
                params[0].grad = None  # the others keep their numbers
            optimizer.step()
            seen += [moment_of(optimizer, param).clone() for param in params[step - 1 :]]
        for i, one in enumerate(seen):
            for other in seen[:i]:
                assert abs(float((one == other).float().mean()) - 0.5) < 0.05
        expected = rounded_table(torch.full((64, 64), 1 + 2.0**-8), seed=3, table=1, step=2)
        assert torch.equal(moment_of(optimizer, params[1]).double(), expected)

    def test_the_compiled_step_has_the_same_bits(self) -> None:
        params = [table(SHAPE), table(SHAPE)]
        optimizers = [coupled(param, **BFLOAT16, **MEMBERS[-1], betas=(0.5, 0.9)) for param in params]
        torch._dynamo.reset()
        steps = [torch.compile(optimizers[0].step, backend="aot_eager"), optimizers[1].step]
        for grad in gradients(SHAPE, 3):
            for param, step in zip(params, steps, strict=True):
                param.grad = grad.clone()
                step()
            assert torch.equal(*(bits(moment_of(o, p)) for o, p in zip(optimizers, params, strict=True)))

    @pytest.mark.parametrize("flags", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
    def test_flags_of_torch_change_nothing(self, flags: dict[str, Any]) -> None:
        params = [table(SHAPE), table(SHAPE)]
        optimizers = [coupled(params[0], **BFLOAT16), coupled(params[1], **BFLOAT16, **flags)]
        for optimizer, param in zip(optimizers, params, strict=True):
            run(optimizer, param, gradients(SHAPE, 3))
        assert torch.equal(*params)
        assert torch.equal(*(bits(moment_of(o, p)) for o, p in zip(optimizers, params, strict=True)))

    @pytest.mark.parametrize("options", MEMBERS, ids=str)
    def test_a_skipped_step_does_not_change_moments_and_step_count(
        self, path: ModuleType, options: dict[str, Any]
    ) -> None:
        param = table(SHAPE)
        optimizer = coupled(param, fused=True, **BFLOAT16, **options)
        run(optimizer, param, gradients(SHAPE, 1))
        before = copy.deepcopy(optimizer.state[param])
        optimizer.found_inf = torch.tensor(1.0)
        run(optimizer, param, gradients(SHAPE, 1))
        assert all(torch.equal(value, before[key]) for key, value in optimizer.state[param].items())

    @pytest.mark.parametrize("options", [{}, {"row_exponent": 0.25, "mean_free": True}], ids=str)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_temporaries_stay_within_their_limits(self, dtype: torch.dtype, options: dict[str, Any]) -> None:
        shape = (2048, 768)
        param = nn.Parameter(torch.zeros(shape, dtype=dtype))
        optimizer = coupled(param, **BFLOAT16, **options)
        run(optimizer, param, [torch.ones(shape, dtype=dtype)])
        limit = min(param.numel() * param.itemsize / 4, 6 * 2**20)
        few = 64 * shape[1] + (40 * shape[0] if "row_exponent" in options else 0)  # numbers per column and per row
        assert peak_bytes(optimizer.step) <= limit + few


class TestState:
    def test_default_is_the_dtype_of_the_parameter(self) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            param = table(SHAPE, dtype)
            optimizer = coupled(param)
            run(optimizer, param, gradients(SHAPE, 1, dtype))
            assert moment_of(optimizer, param).dtype == dtype
            assert optimizer.param_groups[0]["state_dtype"] is None

    def test_float32_state_of_a_bfloat16_table_is_not_rounded(self, path: ModuleType) -> None:
        param, grads = table(SHAPE, torch.bfloat16), gradients(SHAPE, 3, torch.bfloat16)
        expected = oracle(param, grads)
        optimizer = coupled(param, state_dtype=torch.float32)
        run(optimizer, param, grads)
        assert moment_of(optimizer, param).dtype == torch.float32
        assert relative_error(moment_of(optimizer, param), expected.first_moment) < 1e-6

    def test_float32_state_of_a_float32_table_changes_nothing(self, path: ModuleType) -> None:
        params = [table(SHAPE), table(SHAPE)]
        for param, state_dtype in zip(params, (None, torch.float32), strict=True):
            run(coupled(param, state_dtype=state_dtype), param, gradients(SHAPE, 3))
        assert torch.equal(*params)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("options", [{}, {"row_exponent": 0.25, "mean_free": True}], ids=str)
    def test_a_resumed_run_is_bitwise_equal_to_an_uninterrupted_one(
        self, options: dict[str, Any], dtype: torch.dtype
    ) -> None:
        whole, grads = table(SHAPE, dtype), gradients(SHAPE, 6, dtype)
        whole_optimizer = coupled(whole, **BFLOAT16, **options)
        run(whole_optimizer, whole, grads[:3])
        param = nn.Parameter(whole.detach().clone())
        # The seed is that of the file.
        optimizer = coupled(param, state_dtype=torch.bfloat16, **options)
        optimizer.load_state_dict(saved_and_loaded(whole_optimizer.state_dict()))
        assert optimizer.param_groups[0]["state_seed"] == 3
        assert_same_state(optimizer, whole_optimizer)
        for each, one in ((optimizer, param), (whole_optimizer, whole)):
            run(each, one, grads[3:])
        assert torch.equal(param, whole)
        assert_same_state(optimizer, whole_optimizer)

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
    def test_a_copy_continues_identically(self, copied: Any) -> None:
        param, grads = table(SHAPE), gradients(SHAPE, 4)
        optimizer = coupled(param, **BFLOAT16)
        run(optimizer, param, grads[:2])
        other = copied(optimizer)
        for each in (optimizer, other):
            run(each, each.param_groups[0]["params"][0], grads[2:])
        assert_same_state(optimizer, other)

    def test_a_float32_file_is_rounded_to_nearest_and_the_optimizer_keeps_its_seed(self) -> None:
        param, grads = table(SHAPE), gradients(SHAPE, 3)
        before = coupled(param)
        run(before, param, grads)
        optimizer = coupled(param, **BFLOAT16)
        optimizer.load_state_dict(saved_and_loaded(before.state_dict()))
        assert torch.equal(moment_of(optimizer, param), moment_of(before, param).bfloat16())
        assert (optimizer.param_groups[0]["state_dtype"], optimizer.param_groups[0]["state_seed"]) == (
            torch.bfloat16,
            3,
        )

    @pytest.mark.parametrize("state_dtype", [None, torch.float32])
    def test_a_bfloat16_file_continues_in_float32(self, state_dtype: torch.dtype | None) -> None:
        param, grads = table(SHAPE), gradients(SHAPE, 3)
        before = coupled(param, **BFLOAT16)
        run(before, param, grads)
        optimizer = coupled(param, state_dtype=state_dtype)
        optimizer.load_state_dict(saved_and_loaded(before.state_dict()))
        assert moment_of(optimizer, param).dtype == torch.float32
        assert torch.equal(moment_of(optimizer, param), moment_of(before, param).float())
        assert optimizer.param_groups[0]["state_dtype"] == state_dtype
        run(optimizer, param, grads)

    def test_a_file_without_the_option_is_loaded(self) -> None:
        param = table(SHAPE)
        before = coupled(param)
        run(before, param, gradients(SHAPE, 1))
        old = before.state_dict()
        for group in old["param_groups"]:
            del group["state_dtype"], group["state_seed"]
        for options in ({}, BFLOAT16):
            optimizer = coupled(param, **options)
            optimizer.load_state_dict(copy.deepcopy(old))
            assert optimizer.param_groups[0]["state_dtype"] == options.get("state_dtype")
            run(optimizer, param, gradients(SHAPE, 1))

    def test_an_old_pickle_has_the_default(self) -> None:
        optimizer = coupled(table(SHAPE))
        state = optimizer.__getstate__()
        for options in (state["defaults"], *state["param_groups"]):
            del options["state_dtype"], options["state_seed"]
        old = CoupledAdamW.__new__(CoupledAdamW)
        old.__setstate__(state)
        assert old.param_groups[0]["state_dtype"] is None
        run(old, old.param_groups[0]["params"][0], gradients(SHAPE, 1))

    def test_files_of_adamw_are_loaded_and_written(self) -> None:
        model = nn.Sequential(nn.Embedding(20, 6), nn.Linear(6, 20, bias=False))
        model(torch.arange(5)).logsumexp(-1).sum().backward()
        adamw = torch.optim.AdamW(param_groups(model, couple="none"))
        adamw.step()
        optimizer = CoupledAdamW(model, **BFLOAT16)
        optimizer.load_state_dict(convert_state_dict(adamw.state_dict(), optimizer))
        head = model[1].weight
        assert torch.equal(moment_of(optimizer, head), moment_of(adamw, head).bfloat16())
        optimizer.step()
        converted = convert_state_dict(saved_and_loaded(optimizer.state_dict()), adamw)
        assert {state["exp_avg"].dtype for state in converted["state"].values()} == {torch.float32}
        adamw.load_state_dict(converted)
        assert torch.equal(moment_of(adamw, head), moment_of(optimizer, head).float())
        adamw.step()

    def test_the_option_can_be_changed_during_training(self) -> None:
        param, grads = table(SHAPE), gradients(SHAPE, 3)
        optimizer = coupled(param)
        run(optimizer, param, grads)
        expected = reference_init(param)._replace(
            first_moment=moment_of(optimizer, param).bfloat16().double(),
            second_moment=optimizer.state[param]["exp_avg_sq"].double().expand(SHAPE),
            step=3,
        )
        optimizer.param_groups[0].update(BFLOAT16)
        run(optimizer, param, grads[:1])
        expected = reference_step(expected, grads[0], state_seed=3)
        assert torch.equal(moment_of(optimizer, param).double(), expected.first_moment)
        assert relative_error(param, expected.embeddings) < 1e-6


class TestOptions:
    def test_it_applies_only_to_coupled_tables(self) -> None:
        table_, other = table(SHAPE), nn.Parameter(torch.randn(4, 4))
        groups = [{"params": [table_], "coupled": True}, {"params": [other]}]
        optimizer = CoupledAdamW(groups, **BFLOAT16)
        table_.grad, other.grad = torch.ones(SHAPE), torch.ones(4, 4)
        optimizer.step()
        assert moment_of(optimizer, table_).dtype == torch.bfloat16
        assert moment_of(optimizer, other).dtype == torch.float32
        assert [group["state_dtype"] for group in optimizer.param_groups] == [torch.bfloat16, None]

    def test_it_can_be_set_for_one_group_of_a_model(self) -> None:
        model = nn.Sequential(nn.Embedding(20, 6), nn.Linear(6, 20, bias=False))
        model(torch.arange(5)).logsumexp(-1).sum().backward()
        options = {"output_embeddings": {"state_dtype": torch.bfloat16, "state_seed": 5}}
        optimizer = CoupledAdamW(model, couple="all", options=options)
        optimizer.step()
        assert moment_of(optimizer, model[1].weight).dtype == torch.bfloat16
        assert moment_of(optimizer, model[0].weight).dtype == torch.float32

    @pytest.mark.parametrize("value", [torch.float16, torch.float64, "bfloat16", 16])
    def test_other_dtypes_are_refused(self, value: object) -> None:
        with pytest.raises(ValueError, match="state_dtype"):
            coupled(table(SHAPE), state_dtype=value)
        with pytest.raises(ValueError, match="state_dtype"):
            CoupledAdamW([{"params": [table(SHAPE)], "coupled": True, "state_dtype": value}])

    @pytest.mark.parametrize("value", [-1, 2**64, 1.5, True, None])
    def test_seeds_must_fit_into_64_bits(self, value: object) -> None:
        with pytest.raises(ValueError, match="state_seed"):
            coupled(table(SHAPE), state_seed=value)

    @pytest.mark.parametrize("option", BFLOAT16)
    def test_it_is_refused_for_a_group_that_is_not_coupled(self, option: str) -> None:
        groups = [
            {"params": [table(SHAPE)], "coupled": True},
            {"params": [nn.Parameter(torch.ones(2))], option: BFLOAT16[option]},
        ]
        with pytest.raises(ValueError, match=option):
            CoupledAdamW(groups)

    def test_a_float64_table_is_refused_by_name(self) -> None:
        groups = [{"params": [("head.weight", table(SHAPE, torch.float64))], "coupled": True}]
        with pytest.raises(ValueError, match=r"head\.weight"):
            CoupledAdamW(groups, state_dtype=torch.bfloat16)
