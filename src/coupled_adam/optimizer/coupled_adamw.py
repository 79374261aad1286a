"""CoupledAdamW: torch.optim.AdamW in which the rows of a vocabulary table share one second moment.

Averaging over the vocabulary and the exponential moving average are both linear, so they commute: the coupled
second moment needs H numbers of state, not V x H, and gives the updates of Algorithm 1 exactly. Groups without
`coupled=True` are updated by torch's own functions.

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
from coupled_adam.optimizer.sharding import row_moment_like, second_moment_like
from coupled_adam.optimizer.step import GradientNorm, GroupTensors, coupled_adamw_step, idle_tables, table_numbers
from coupled_adam.optimizer.table import needs_row_moments
from coupled_adam.optimizer.torch_versions import (
    check_graph_capture,
    collect_adamw_group,
    disable_dynamo,
    scalar_dtype,
    use_grad_for_differentiable,
)

# What a copy or a pickle keeps beside torch's own `defaults`, `state` and `param_groups`.
COPIED_ATTRIBUTES = ("grad_norm", "grad_factor", "_is_in_zero", "_has_warned_of_idle_tables")
# Options that a pickle of 0.1.0 lacks, with the values of the paper's method. Groups that are not coupled have these.
FAMILY_OPTIONS = {
    "row_exponent": 0.0,
    "column_exponent": 1.0,
    "mean_free": False,
    "vocabulary_size": None,
    "state_dtype": None,
    "state_seed": 0,
}


class CoupledAdamW(AdamW):
    r"""AdamW with the second moment of vocabulary tables averaged over the vocabulary.

    For every row :math:`e_i` of a coupled table, with :math:`V` rows and step :math:`t`:

    .. math::
        \begin{aligned}
            m_i &\leftarrow \beta_1 m_i + (1 - \beta_1) g_i                                          \\
            v   &\leftarrow \beta_2 v + (1 - \beta_2) \tfrac{1}{V} \textstyle\sum_j g_j^2            \\
            e_i &\leftarrow e_i - \eta \lambda e_i                                                   \\
            e_i &\leftarrow e_i - \eta \, \frac{m_i / (1 - \beta_1^t)}
                                              {\sqrt{2^{-n} v / (1 - \beta_2^t)} + \epsilon}
        \end{aligned}

    All other parameters are updated by torch's AdamW, bitwise. State of a coupled table: `step`, `exp_avg` (V, H)
    in the parameter's dtype or in `state_dtype`, `exp_avg_sq` (1, H) in float32.

    This is one point of a family. With the moving averages :math:`c_h` and :math:`r_i` of the mean squares of column
    :math:`h` and row :math:`i`, bias-corrected, and their common mean :math:`s`, the second moment is
    :math:`s (c_h / s)^x (r_i / s)^y` with the column exponent :math:`x` and the row exponent :math:`y`:

    .. math::
        \begin{aligned}
            u_{ih} &= \frac{m_{ih}}{1 - \beta_1^t} \,
                      \frac{s^{y/2}}{(\sqrt{2^{-n} s (c_h / s)^x} + \epsilon) (\sqrt{r_i} + \epsilon)^y}      \\
            u_i    &\leftarrow u_i - \tfrac{1}{V} \textstyle\sum_j u_j \quad\text{if mean\_free}
        \end{aligned}

    With a row exponent other than 0 the state has `row_avg_sq` (V, 1) in float32 too.

    Args:
        params: a model, whose groups are then built by :func:`coupled_adam.param_groups`; or what torch.optim takes,
            with at least one group marked ``coupled=True``.
        lr: learning rate :math:`\eta`, a number or a one-element tensor.
        betas: :math:`\beta_1, \beta_2`.
        eps: :math:`\epsilon`, added to the square root of the second moment.
        weight_decay: decoupled weight decay :math:`\lambda`. Given a model, it is applied to matrices other than
            vocabulary tables, heads and position tables.
        couple: which tables of a model to couple: "output" (default; a tied table counts as output), "input",
            "all", or a list of name patterns.
        options: settings of single groups of a model, by their name, such as ``{"output_embeddings": {"lr": 3e-3}}``;
            see :func:`coupled_adam.param_groups`.
        exclude: parameters of a model that another optimizer has; see :func:`coupled_adam.hidden_matrices`.
        scale_exponent: :math:`n`, multiplies the coupled second moment by :math:`2^{-n}`; 0 is the paper's method.
        row_exponent: :math:`y` in [0, 1]: 0 is Coupled Adam, 1 gives each row its own second moment. May be changed
            during training through its group, as `lr` is; a one-element tensor under `capturable`.
        column_exponent: :math:`x` in [0, 1]: 1 is Coupled Adam, 0 gives all columns the same. May be changed as well.
        mean_free: subtract the mean update over the vocabulary from every row, so that the mean embedding stays where
            it is, except for weight decay and the rounding of tables in bfloat16 or float16. A softmax head gives the
            same probabilities with and without its mean; an input table does not.
        vocabulary_size: rows of a coupled table that are not padding; all means are taken over the first that many.
            None for all rows. Tables of another vocabulary need a group of their own.
        state_dtype: of `exp_avg` of coupled tables. None (default) for that of the parameter; torch.bfloat16 to keep it
            in 2 bytes, rounded at random so that the rounding is right on average; torch.float32. Groups that are not
            coupled keep their state as torch.optim.AdamW does.
        state_seed: of that random rounding. The bits depend on it, the table, the step and the element, not on ranks.
        max_grad_norm: clip the global norm of all gradients inside the step, as torch.nn.utils.clip_grad_norm_
            before it would; the norm before clipping is then in :attr:`grad_norm`. Gradients of other optimizers
            count for it through :attr:`other_square_norm`; see :func:`coupled_adam.clip_together`.
        error_if_nonfinite: raise a RuntimeError, before anything is written, when a gradient is infinite or NaN.
            Waits for the device at every step. Without it, one NaN in a column of a coupled gradient spoils that
            column for the whole vocabulary; with a row exponent, or a column exponent other than 1, the whole table.
        foreach, fused, capturable, maximize: as in torch.optim.AdamW.
        amsgrad: refused; the maximum does not commute with the average over the vocabulary.

    Example:
        >>> model = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 100, bias=False))
        >>> optimizer = CoupledAdamW(model, lr=1e-3)
        >>> model(torch.tensor([1, 2, 3])).logsumexp(-1).sum().backward()
        >>> optimizer.step()
        >>> tuple(optimizer.state[model[1].weight]["exp_avg_sq"].shape)
        (1, 8)
    """

    grad_norm: Tensor | None = None
    """Norm of all unscaled gradients before clipping, on their device; None before a step with clipping or with
    `error_if_nonfinite` was taken."""

    grad_factor: Tensor | None = None
    """What the last step with `max_grad_norm` multiplied all gradients with, on their device; under GradScaler with
    `fused=True` this unscales them too."""

    other_square_norm: Tensor | None = None
    """Squared norm of gradients that other optimizers have, a scalar tensor; read at each step with `max_grad_norm` or
    `error_if_nonfinite`, where it counts for the global norm. Of sharded gradients it is the sum over all ranks. The
    gradients must be scaled as those of this optimizer are."""

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
        # Optimizer.__init__ copies the defaults into each group, but builds them itself: add_param_group adds ours.
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
                groups = [dict(group) for group in params]  # torch writes into them; the list can be used again
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
        """Add a group, as in torch.optim; ``coupled=True`` marks one whose tensors are vocabulary tables."""
        self.defaults.update(self.__dict__.pop("_own_defaults", {}))
        checks.check_options_have_effect(len(self.param_groups), param_group, self.defaults)
        super().add_param_group(param_group)
        if not self.param_groups[-1]["coupled"]:
            self.param_groups[-1].update(FAMILY_OPTIONS)
        try:
            checks.check_group(len(self.param_groups) - 1, self.param_groups[-1], self.defaults)
        except Exception:  # also a TypeError, such as of eps="small"
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
        # torch sets this in __init__ only, so that GradScaler misjudges a copied, unpickled or loaded optimizer.
        self._step_supports_amp_scaling = all(group["fused"] for group in self.param_groups)

    @property
    def max_grad_norm(self) -> float | None:
        """The global norm to clip to; set it here to change it during training."""
        value: float | None = self.defaults["max_grad_norm"]
        return value

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        checks.check_max_grad_norm(value)
        self._check_norm_is_known("max_grad_norm", value)
        self._set_everywhere("max_grad_norm", None if value is None else float(value))

    @property
    def error_if_nonfinite(self) -> bool:
        """Whether a step raises on gradients that are not finite; set it here to change it during training."""
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
        """Load a state dict of CoupledAdamW or of torch.optim.AdamW.

        A (V, H) second moment of a coupled table is averaged over its rows, and over its columns where row moments are
        kept, which continues an AdamW run exactly as if it had been coupled from here on. Row moments that the file
        lacks start at the mean of the column moments. Whether a group is coupled, its `vocabulary_size` and its
        `state_dtype` are decided by this optimizer, never by the file. `scale_exponent`, `row_exponent`,
        `column_exponent`, `mean_free` and `max_grad_norm` are taken from the file, as `lr` is, where it has them and
        they are not None. A coupled group keeps its own weight decay when the file was written by torch.optim.AdamW.

        Args:
            state_dict: what `state_dict()` returned. If its groups are not those of this optimizer, see
                :func:`coupled_adam.convert_state_dict`.
        """
        # As hooks, so that hooks of the user see the file as it is and the optimizer as it will be.
        adapted: dict[str, Any] = {}

        def adapt(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            adapted.update(state_dicts.adapt_state_dict(given, self))
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

    def _init_group(
        self,
        group: dict[str, Any],
        params_with_grad: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        max_exp_avg_sqs: list[Tensor],
        state_steps: list[Tensor],
        row_avg_sqs: list[Tensor | None] | None = None,
    ) -> bool:
        """Collect the tensors of a group, creating their state at their first gradient.

        Name and order are torch's, whose Dynamo calls this method and takes over what it has appended to the lists.
        """
        if group["coupled"]:
            checks.check_gradients(group)
            for p in group["params"]:
                if p.grad is not None and not self.state[p]:
                    on_device = group["capturable"] or group["fused"]
                    self.state[p] = {
                        "step": torch.zeros(
                            (),
                            dtype=scalar_dtype(is_fused=group["fused"]),
                            device=p.device if on_device else "cpu",
                        ),
                        "exp_avg": torch.zeros_like(
                            p, memory_format=torch.preserve_format, dtype=group["state_dtype"]
                        ),  # (V, H)
                        "exp_avg_sq": second_moment_like(p),  # (1, H) float32
                    }
                if p.grad is not None and needs_row_moments(group) and "row_avg_sq" not in self.state[p]:
                    exp_avg_sq = self.state[p]["exp_avg_sq"]
                    self.state[p]["row_avg_sq"] = row_moment_like(p, exp_avg_sq)  # (V, 1) float32
                if p.grad is not None and group["state_dtype"] not in (None, self.state[p]["exp_avg"].dtype):
                    # The option was changed during training.
                    self.state[p]["exp_avg"] = self.state[p]["exp_avg"].to(group["state_dtype"])
            checks.check_state_shapes(group, self.state)
        if row_avg_sqs is not None:
            with_grad = [p for p in group["params"] if p.grad is not None]
            row_avg_sqs += [self.state[p].get("row_avg_sq") if group["coupled"] else None for p in with_grad]
        return collect_adamw_group(
            self, group, params_with_grad, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps
        )

    @use_grad_for_differentiable
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step.

        Args:
            closure: reevaluates the model and returns the loss, called once with gradients enabled.

        Returns:
            What the closure returned, else None.
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
            exp_avgs: list[Tensor] = []
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
        return loss

    @disable_dynamo  # Dynamo of torch 2.11 cannot set attributes of an optimizer
    def _remember(self, gradient_norm: GradientNorm) -> None:
        self.grad_norm = gradient_norm.norm
        self.grad_factor = None if self.max_grad_norm is None else gradient_norm.factor

    @disable_dynamo
    def _warn_of_idle_tables(self, names: list[str]) -> None:
        self._has_warned_of_idle_tables = True
        tables = ", ".join(map(repr, names))
        warnings.warn(
            f"CoupledAdamW: no coupled table ({tables}) has a gradient, but other parameters have. If the model was "
            "changed after the optimizer was built (tie_weights, resize_token_embeddings, to_empty, fully_shard), the "
            "optimizer holds the old tables and the new ones are not coupled: build the optimizer after the change. "
            "If the tables are left out of this step on purpose, ignore this warning; it is shown once",
            stacklevel=7,  # the caller of step, past torch's hooks
        )
