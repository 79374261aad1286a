"""CoupledAdamW: torch.optim.AdamW in which the rows of a vocabulary table share one second moment.

Averaging over the vocabulary and the exponential moving average are both linear, so they commute. The coupled second
moment therefore needs H numbers of state instead of V x H, and gives exactly the updates of Algorithm 1.

Legend: V vocabulary rows, H hidden size, t optimizer step.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import AdamW
from torch.optim.optimizer import ParamsT

from coupled_adam.optimizer import checks, state_dicts
from coupled_adam.optimizer.groups import ParamGroups, param_groups
from coupled_adam.optimizer.load_warnings import (
    replaced_settings,
    warn_of_missing_first_moments,
    warn_of_replaced_settings,
)
from coupled_adam.optimizer.step import GradientNorm, GroupTensors, coupled_adamw_step, idle_tables, table_numbers
from coupled_adam.optimizer.table import needs_first_moment
from coupled_adam.optimizer.table_state import prepare_state
from coupled_adam.optimizer.torch_versions import (
    check_graph_capture,
    collect_adamw_group,
    disable_dynamo,
    use_grad_for_differentiable,
)

# Attributes that a copy or a pickle keeps besides torch's `defaults`, `state` and `param_groups`.
COPIED_ATTRIBUTES = ("grad_norm", "grad_factor", "_is_in_zero", "_has_warned_of_idle_tables")
# Options that pickles of 0.1.0 lack, with the paper's values. Groups that are not coupled get these values.
FAMILY_OPTIONS = {
    "row_exponent": 0.0,
    "column_exponent": 1.0,
    "mean_free": False,
    "vocabulary_size": None,
    "state_dtype": None,
    "state_seed": 0,
}


class CoupledAdamW(AdamW):
    r"""AdamW in which all rows of a vocabulary table share one second moment: Coupled Adam.

    Step :math:`t` updates row :math:`e_i` of a coupled table, with V rows and H columns, from its gradient :math:`g_i`:

    .. math::
        \begin{aligned}
            m_i &\leftarrow \beta_1 m_i + (1 - \beta_1) g_i                                          \\
            v   &\leftarrow \beta_2 v + (1 - \beta_2) \tfrac{1}{V} \textstyle\sum_j g_j^2            \\
            e_i &\leftarrow e_i - \eta \lambda e_i                                                   \\
            e_i &\leftarrow e_i - \eta \, \frac{m_i / (1 - \beta_1^t)}
                                              {\sqrt{2^{-n} v / (1 - \beta_2^t)} + \epsilon}
        \end{aligned}

    All other parameters get the updates of torch.optim.AdamW, bitwise. The state of a coupled table is `step`,
    `exp_avg` (V, H) unless :math:`\beta_1` is 0, `exp_avg_sq` (1, H) in float32 and, unless `row_exponent` is 0,
    `row_avg_sq` (V, 1) in float32.

    Coupled Adam is one member of a family of second moments :math:`s (c_h / s)^x (r_i / s)^y`. Here :math:`c_h` and
    :math:`r_i` are the bias-corrected moving averages of the mean squares of column :math:`h` and row :math:`i`, and
    :math:`s` is their common mean; :math:`x` is `column_exponent` and :math:`y` is `row_exponent`. The rows move by
    :math:`-\eta u`, where

    .. math::
        \begin{aligned}
            u_{ih} &= \frac{m_{ih}}{1 - \beta_1^t} \,
                      \frac{s^{y/2}}{(\sqrt{2^{-n} s (c_h / s)^x} + \epsilon) (\sqrt{r_i} + \epsilon)^y}      \\
            u_i    &\leftarrow u_i - \tfrac{1}{V} \textstyle\sum_j u_j \quad\text{if mean\_free}
        \end{aligned}

    Args:
        params: a model, whose groups :func:`coupled_adam.param_groups` builds; or the parameter groups of torch.optim,
            at least one of them marked ``coupled=True``.
        lr: learning rate :math:`\eta`, a number or a one-element tensor.
        betas: decay rates :math:`\beta_1, \beta_2` of the moving averages of the gradient and its square. If
            :math:`\beta_1` is the number 0, a coupled table keeps no first moment, which would be a copy of the
            gradient. A tensor may change at any time, so with a tensor of 0 the moment is kept.
        eps: :math:`\epsilon`, added to the square root of the second moment.
        weight_decay: decoupled weight decay :math:`\lambda`. Given a model, it applies to the group "decay" only.
        couple: tables of a model to couple: "output" (also tied ones), "input", "all", or a list of name patterns.
        options: settings per group of a model, by group name, such as ``{"output_embeddings": {"lr": 3e-3}}``; see
            :func:`coupled_adam.param_groups`.
        exclude: parameters of a model that another optimizer trains; see :func:`coupled_adam.hidden_matrices`.
        scale_exponent: :math:`n`; multiplies the coupled second moment by :math:`2^{-n}`. 0 is the paper's method.
        row_exponent: :math:`y` in [0, 1]. 0 is Coupled Adam; 1 gives each row its own second moment. Like `lr`, the
            exponents can change during training, through their group. With `capturable`, use one-element tensors.
        column_exponent: :math:`x` in [0, 1]. 1 is Coupled Adam; 0 shares one second moment among all columns.
        mean_free: subtract the mean update over the vocabulary from every row. The mean embedding then moves only by
            weight decay and by the rounding of bfloat16 and float16 tables. The probabilities of a softmax head do not
            depend on its mean embedding; the output of an input table does.
        vocabulary_size: number of rows that are not padding, the first of the table. All means are taken over these.
            None means all rows. Tables of another vocabulary need their own group.
        state_dtype: dtype of `exp_avg` of coupled tables: None (default) for the dtype of the parameter,
            torch.bfloat16 for 2 bytes per number with stochastic rounding, or torch.float32. No effect if
            :math:`\beta_1` is the number 0.
        state_seed: seed of the stochastic rounding, whose result does not depend on the number of ranks.
        max_grad_norm: clip all gradients to this global norm inside the step, like torch.nn.utils.clip_grad_norm_
            before it. To include gradients of other optimizers, use :func:`coupled_adam.clip_together`.
        error_if_nonfinite: raise a RuntimeError, before anything is written, if a gradient is infinite or NaN. This
            waits for the device at every step. Without it, a NaN spoils its column for the whole vocabulary, or the
            whole table if `row_exponent` is not 0 or `column_exponent` is not 1.
        foreach, fused, capturable, maximize: as in torch.optim.AdamW.
        amsgrad: refused, because the maximum over time does not commute with the average over the vocabulary.
        differentiable: refused in coupled groups, whose update works in place.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from coupled_adam import CoupledAdamW
        >>> model = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 100, bias=False))
        >>> optimizer = CoupledAdamW(model, lr=1e-3)
        >>> loss = nn.functional.cross_entropy(model(torch.tensor([1, 2, 3])), torch.tensor([2, 3, 4]))
        >>> loss.backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
        >>> optimizer.state[model[1].weight]["exp_avg_sq"].shape
        torch.Size([1, 8])
    """

    grad_norm: Tensor | None = None
    """Norm of all unscaled gradients before clipping, on their device. None until a step with `max_grad_norm` or
    `error_if_nonfinite`."""

    grad_factor: Tensor | None = None
    """Factor by which the last step with `max_grad_norm` multiplied all gradients, including any unscaling it did."""

    other_square_norm: Tensor | None = None
    """Squared norm of other optimizers' gradients over all ranks, a scalar tensor. A step with `max_grad_norm` or
    `error_if_nonfinite` includes it in the global norm. The gradients must have the loss scale of this optimizer's."""

    _is_in_zero = False
    _has_warned_of_idle_tables = False

    def __init__(
        self,
        params: nn.Module | ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        couple: str | Sequence[str] = "output",
        options: Mapping[str, Mapping[str, Any]] | None = None,
        exclude: Iterable[Tensor | tuple[str, Tensor]] | None = None,
        scale_exponent: float = 0.0,
        row_exponent: float | Tensor = 0.0,
        column_exponent: float | Tensor = 1.0,
        mean_free: bool = False,
        vocabulary_size: int | None = None,
        state_dtype: torch.dtype | None = None,
        state_seed: int = 0,
        max_grad_norm: float | None = None,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        maximize: bool = False,
        amsgrad: bool = False,
        differentiable: bool = False,
    ) -> None:
        checks.check_scale_exponent(scale_exponent)
        checks.check_exponent("row_exponent", row_exponent)
        checks.check_exponent("column_exponent", column_exponent)
        checks.check_mean_free(mean_free)
        checks.check_state_dtype(state_dtype)
        checks.check_state_seed(state_seed)
        checks.check_max_grad_norm(max_grad_norm)
        checks.check_amsgrad(amsgrad)
        self._is_in_zero = checks.is_built_by_zero()
        self._check_norm_is_known("max_grad_norm", max_grad_norm)
        self._check_norm_is_known("error_if_nonfinite", error_if_nonfinite)
        # AdamW.__init__ builds the defaults and copies them into each group; add_param_group adds ours before that.
        self._own_defaults = {
            "coupled": False,
            "scale_exponent": float(scale_exponent),
            "row_exponent": row_exponent if isinstance(row_exponent, Tensor) else float(row_exponent),
            "column_exponent": column_exponent if isinstance(column_exponent, Tensor) else float(column_exponent),
            "mean_free": mean_free,
            "vocabulary_size": vocabulary_size,
            "state_dtype": state_dtype,
            "state_seed": state_seed,
            "max_grad_norm": None if max_grad_norm is None else float(max_grad_norm),
            "error_if_nonfinite": bool(error_if_nonfinite),
        }
        checks.check_couple_of_optimizer(couple)
        if isinstance(params, nn.Module):
            groups: ParamsT = param_groups(
                params, weight_decay, couple, options=options, exclude=() if exclude is None else exclude
            )
        else:
            checks.check_couple_unused(couple)
            checks.check_unused_without_model(options=options, exclude=exclude)
            groups = params
            if isinstance(params, ParamGroups):
                checks.check_groups_are_new(params)
                groups = [dict(group) for group in params]  # torch writes into its groups; keep the caller's clean
        super().__init__(
            groups,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            foreach=foreach,
            fused=fused,
            capturable=capturable,
            maximize=maximize,
            differentiable=differentiable,
        )
        checks.check_any_coupled(self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch.optim. ``coupled=True`` marks a group of vocabulary tables."""
        self.defaults.update(self.__dict__.pop("_own_defaults", {}))
        checks.check_options_have_effect(len(self.param_groups), param_group, self.defaults)
        super().add_param_group(param_group)
        if not self.param_groups[-1]["coupled"]:
            self.param_groups[-1].update(FAMILY_OPTIONS)
        try:
            checks.check_group(len(self.param_groups) - 1, self.param_groups[-1], self.defaults)
        except Exception:  # including TypeError, such as from eps="small"
            self.param_groups.pop()
            raise

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return state | {name: self.__dict__[name] for name in COPIED_ATTRIBUTES if name in self.__dict__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for key, value in FAMILY_OPTIONS.items():
            self.defaults.setdefault(key, value)
        for group in self.param_groups:
            for key in ("coupled", "scale_exponent", "max_grad_norm", "error_if_nonfinite", *FAMILY_OPTIONS):
                group.setdefault(key, self.defaults[key])
        # torch sets this in __init__ only, so GradScaler would misjudge a copied, unpickled or loaded optimizer.
        self._step_supports_amp_scaling = all(group["fused"] for group in self.param_groups)

    @property
    def max_grad_norm(self) -> float | None:
        """The global norm to clip to. Set it to change it during training."""
        value: float | None = self.defaults["max_grad_norm"]
        return value

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        checks.check_max_grad_norm(value)
        self._check_norm_is_known("max_grad_norm", value)
        self._set_everywhere("max_grad_norm", None if value is None else float(value))

    @property
    def error_if_nonfinite(self) -> bool:
        """Whether a step raises on non-finite gradients. Set it to change it during training."""
        value: bool = self.defaults["error_if_nonfinite"]
        return value

    @error_if_nonfinite.setter
    def error_if_nonfinite(self, value: bool) -> None:
        self._check_norm_is_known("error_if_nonfinite", value)
        self._set_everywhere("error_if_nonfinite", bool(value))

    def _check_norm_is_known(self, option: str, value: float | bool | None) -> None:
        if self._is_in_zero and value not in (None, False):
            checks.refuse_norm_under_zero(option, value)

    def _set_everywhere(self, option: str, value: float | bool | None) -> None:
        for options in (self.defaults, *self.param_groups):
            options[option] = value

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of CoupledAdamW or torch.optim.AdamW.

        A (V, H) second moment of a coupled table is averaged over its rows, and over its columns for the row moments,
        so an AdamW run continues as if coupled from here on. Missing row moments start at the mean of the column
        moments. A missing first moment starts at 0, with a warning. It is dropped if the group has beta1 = 0 after
        loading. A group keeps `coupled`, `vocabulary_size` and `state_dtype`; a coupled group keeps its weight decay if
        the file is from AdamW. The file sets other options, such as `lr`, the exponents and `max_grad_norm`. A warning
        says if AdamW's file replaces an `lr` or `betas` that only the tables have.

        Args:
            state_dict: result of `state_dict()`. If its groups differ from this optimizer's, see
                :func:`coupled_adam.convert_state_dict`.
        """
        # As hooks, so that the user's pre-hooks see the file unchanged and the post-hooks the final optimizer.
        adapted: dict[str, Any] = {}
        replaced: list[str] = []

        def adapt(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            adapted.update(state_dicts.adapt_state_dict(given, self))
            replaced.extend(replaced_settings(self.param_groups, given["param_groups"], adapted["param_groups"]))
            return adapted

        def keep_precision(_: torch.optim.Optimizer) -> None:
            state_dicts.restore_dtypes(adapted, self)

        before = self.register_load_state_dict_pre_hook(adapt)
        after = self.register_load_state_dict_post_hook(keep_precision, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()
        self.defaults["max_grad_norm"] = self.param_groups[0]["max_grad_norm"]
        if not warn_of_missing_first_moments(self):  # new betas may be the cause
            warn_of_replaced_settings(replaced)

    def _init_group(
        self,
        group: dict[str, Any],
        params_with_grad: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Any],
        exp_avg_sqs: list[Tensor],
        max_exp_avg_sqs: list[Tensor],
        state_steps: list[Tensor],
        row_avg_sqs: list[Tensor | None] | None = None,
    ) -> bool:
        """Collect the tensors of a group; create state at the first gradient. Dynamo requires torch's signature."""
        if group["coupled"]:
            checks.check_gradients(group)
            for p in group["params"]:
                if p.grad is not None:
                    prepare_state(self.state[p], p, group)
            checks.check_state_shapes(group, self.state)
        with_grad = [p for p in group["params"] if p.grad is not None]
        if row_avg_sqs is not None:
            row_avg_sqs += [self.state[p].get("row_avg_sq") if group["coupled"] else None for p in with_grad]
        if not group["coupled"] or needs_first_moment(group):
            return collect_adamw_group(
                self, group, params_with_grad, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps
            )
        params_with_grad += with_grad
        grads += [p.grad for p in with_grad]
        exp_avgs += [None] * len(with_grad)  # torch would look for `exp_avg`
        exp_avg_sqs += [self.state[p]["exp_avg_sq"] for p in with_grad]
        state_steps += [self.state[p]["step"] for p in with_grad]
        return False

    @use_grad_for_differentiable
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step.

        Args:
            closure: reevaluates the model and returns the loss. It is called once, with gradients enabled.

        Returns:
            The result of the closure, or None without a closure.
        """
        check_graph_capture(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        checks.check_agreement(self.param_groups, self.defaults)
        collected = []
        for group, numbers in zip(self.param_groups, table_numbers(self.param_groups), strict=True):
            params: list[Tensor] = []
            grads: list[Tensor] = []
            exp_avgs: list[Any] = []
            exp_avg_sqs: list[Tensor] = []
            max_exp_avg_sqs: list[Tensor] = []
            steps: list[Tensor] = []
            row_avg_sqs: list[Tensor | None] = []
            has_complex = self._init_group(
                group, params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, row_avg_sqs
            )
            tensors = (params, grads, exp_avgs, exp_avg_sqs, steps, row_avg_sqs)
            collected.append(GroupTensors(group, *tensors, numbers, has_complex))
        if not self._has_warned_of_idle_tables and (names := idle_tables(collected)):
            self._warn_of_idle_tables(names)
        gradient_norm = coupled_adamw_step(
            collected,
            max_grad_norm=self.max_grad_norm,
            error_if_nonfinite=self.error_if_nonfinite,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            other_square_norm=self.other_square_norm,
        )
        if gradient_norm is not None:
            self._remember(gradient_norm)
        if any(group["coupled"] and not needs_first_moment(group) for group in self.param_groups):
            self._drop_unneeded_moments()
        return loss

    @disable_dynamo  # in torch 2.11 Dynamo cannot set attributes of an optimizer
    def _remember(self, gradient_norm: GradientNorm) -> None:
        self.grad_norm = gradient_norm.norm
        self.grad_factor = None if self.max_grad_norm is None else gradient_norm.factor

    @disable_dynamo
    def _drop_unneeded_moments(self) -> None:
        """Drop moments from before beta1 became 0. After the step, because a step that raises must change nothing."""
        for group in self.param_groups:
            if group["coupled"] and not needs_first_moment(group):
                for p in group["params"]:
                    self.state.get(p, {}).pop("exp_avg", None)

    @disable_dynamo
    def _warn_of_idle_tables(self, names: list[str]) -> None:
        self._has_warned_of_idle_tables = True
        tables = ", ".join(map(repr, names))
        warnings.warn(
            f"CoupledAdamW: no coupled table ({tables}) has a gradient, but other parameters have. If the model "
            "changed after the optimizer was built (tie_weights, resize_token_embeddings, to_empty, fully_shard), the "
            "optimizer has the old tables and does not couple the new ones: build it after the change. If this step "
            "leaves the tables out on purpose, ignore this warning; it is shown once",
            stacklevel=7,  # the caller of step, past torch's hooks
        )
