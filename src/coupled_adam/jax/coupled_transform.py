"""One optax transformation for the whole family of second moments.

Averages over the vocabulary and over steps commute. A table therefore needs H numbers of second moment instead of
V x H, and V more with a row exponent. The equations are those of docs/mathematics.md, computed at least in float32.

Legend: V vocabulary rows, H hidden size, t optimizer step, x column exponent, y row exponent, n scale exponent; c, r, s
moving averages of the mean squares of columns, rows and the table, divided by 1 - b2^t.
"""

import math
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from coupled_adam.jax.table_leaves import check_options, check_tables, is_number

Exponent: TypeAlias = float | jax.Array | optax.Schedule


class ScaleByCoupledAdamState(NamedTuple):
    """State of `scale_by_coupled_adam`. The shapes are for a table (V, H).

    With `vocabulary_axis=1` a table is (H, V), and so are its moments: (H, V), (H, 1) and (1, V).
    """

    count: jax.Array  # t, () int32
    mu: optax.Updates | None  # first moment, (V, H) in the dtype of the table or mu_dtype; None if b1 is the number 0
    column_nu: optax.Updates  # mean squares of the columns, (1, H) float32; float64 for float64 tables
    row_nu: optax.Updates | None  # mean squares of the rows, (V, 1) float32; None if the row exponent is the number 0


def scale_by_coupled_adam(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    row_exponent: Exponent = 0.0,
    column_exponent: Exponent = 1.0,
    mean_free: bool = False,
    scale_exponent: float = 0.0,
    vocabulary_size: int | None = None,
    vocabulary_axis: int = 0,
    mu_dtype: Any = None,
) -> optax.GradientTransformation:
    r"""Rescale the gradients of vocabulary tables by Coupled Adam, or another member of its family.

    The update :math:`u` of row :math:`i` and column :math:`h` is

    .. math::
        \begin{aligned}
            u_{ih} &= \frac{m_{ih}}{1 - \beta_1^t} \,
                      \frac{s^{y/2}}{(\sqrt{2^{-n} s (c_h / s)^x} + \epsilon) (\sqrt{r_i} + \epsilon)^y}      \\
            u_i    &\leftarrow u_i - \tfrac{1}{V} \textstyle\sum_j u_j \quad\text{if mean\_free}
        \end{aligned}

    where :math:`m` is the first moment, :math:`c_h` and :math:`r_i` are the bias-corrected moving averages of the mean
    squares of column :math:`h` and row :math:`i`, and :math:`s` is their common mean.

    Args:
        b1: decay rate :math:`\beta_1` of the first moment. With the number 0, the state has no first moment, which
            would be a copy of the gradient.
        b2: decay rate :math:`\beta_2` of the second moments.
        eps: :math:`\epsilon`, added to the square roots.
        row_exponent: :math:`y` in [0, 1], or a schedule. 0 is Coupled Adam; 1 gives each row its own second moment. A
            schedule is called with the number of steps taken, like a learning-rate schedule.
        column_exponent: :math:`x` in [0, 1], or a schedule. 1 is Coupled Adam; 0 shares one second moment among all
            columns.
        mean_free: subtract the mean update over the vocabulary, so that the mean embedding never moves.
        scale_exponent: :math:`n`; multiplies the second moment by :math:`2^{-n}`. 0 is the paper's method.
        vocabulary_size: number of rows that are not padding, the first of the table. All means are taken over these.
            None means all rows.
        vocabulary_axis: 0 for tables (V, H), 1 for tables (H, V), such as the kernel of a dense output layer.
        mu_dtype: dtype of the first moment; None means that of the table.

    Returns:
        A transformation of trees whose leaves are all tables. As in optax.adam, updates have the wider dtype of
        gradient and first moment: with mu_dtype=float32, a narrower table is rounded only when they are added to it.
        With b1=0 they have the same dtype, for which `update` needs params unless mu_dtype is given. Without params,
        the missing first moment counts as having the dtype of the gradient.

    Example:
        >>> params = {"embedding": jnp.ones((5, 2))}
        >>> state = scale_by_coupled_adam(row_exponent=0.25).init(params)
        >>> state.mu["embedding"].shape, state.column_nu["embedding"].shape, state.row_nu["embedding"].shape
        ((5, 2), (1, 2), (5, 1))
    """
    check_options(
        row_exponent=row_exponent,
        column_exponent=column_exponent,
        scale_exponent=scale_exponent,
        vocabulary_size=vocabulary_size,
        vocabulary_axis=vocabulary_axis,
    )
    keeps_rows = not is_number(row_exponent) or row_exponent != 0
    keeps_mu = not is_number(b1) or b1 != 0
    over_vocabulary, over_width = vocabulary_axis, 1 - vocabulary_axis

    def init(params: optax.Params) -> ScaleByCoupledAdamState:
        check_tables(params, vocabulary_size, vocabulary_axis)
        mu = jax.tree.map(lambda table: jnp.zeros_like(table, dtype=mu_dtype), params)

        def zeros(axis: int) -> optax.Updates:
            # Sums of the zeros in mu inherit the sharding of its rows or columns; new zeros would be on one device.
            # With b1=0, mu is made only for this, and freed when init returns.
            return jax.tree.map(lambda table, m: m.sum(axis, dtype=_wide(table), keepdims=True), params, mu)

        column_nu, row_nu = zeros(over_vocabulary), zeros(over_width) if keeps_rows else None
        return ScaleByCoupledAdamState(jnp.zeros([], jnp.int32), mu if keeps_mu else None, column_nu, row_nu)

    def update(
        updates: optax.Updates, state: ScaleByCoupledAdamState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScaleByCoupledAdamState]:
        if keeps_rows and state.row_nu is None:
            raise ValueError(
                f"row_exponent is {row_exponent!r}, but the state was created with row_exponent=0 and has no row "
                "moments. Call init again, or start the run with a schedule, which has row moments from the start"
            )
        if keeps_mu and state.mu is None:
            raise ValueError(f"b1 is {b1!r}, but the state was created with b1=0 and has no mu. Call init again")
        y, x = (value(state.count) if callable(value) else value for value in (row_exponent, column_exponent))
        t = optax.safe_increment(state.count)
        g = jax.tree.map(lambda grad: grad.astype(_wide(grad)), updates)

        mu = g
        if state.mu is not None:
            mu = jax.tree.map(lambda g, m: b1 * m.astype(g.dtype) + (1 - b1) * g, g, state.mu)
        column_nu = jax.tree.map(
            lambda g, c: b2 * c + (1 - b2) * _mean(g**2, over_vocabulary, vocabulary_size), g, state.column_nu
        )
        row_nu = state.row_nu
        if row_nu is not None:
            row_nu = jax.tree.map(lambda g, r: b2 * r + (1 - b2) * _mean(g**2, over_width), g, row_nu)

        def update_of(m: jax.Array, c: jax.Array, r: jax.Array | None = None) -> jax.Array:
            m_hat = m / _bias_correction(b1, t)
            c_hat = c / _bias_correction(b2, t)
            r_hat = None if r is None else r / _bias_correction(b2, t)
            u = m_hat * family_factor(c_hat, r_hat, eps=eps, n=scale_exponent, x=x, y=y)
            return u - _mean(u, over_vocabulary, vocabulary_size) if mean_free else u

        moments = (mu, column_nu) if row_nu is None else (mu, column_nu, row_nu)
        new_updates = jax.tree.map(
            lambda grad, old_mu, u: u.astype(jnp.promote_types(grad.dtype, old_mu.dtype)),
            updates,
            _as_mu(updates if params is None else params, mu_dtype) if state.mu is None else state.mu,
            jax.tree.map(update_of, *moments),
        )
        # Scans and checkpoints need a state whose dtypes do not depend on gradients and options.
        new_state = ScaleByCoupledAdamState(t, None if state.mu is None else mu, column_nu, row_nu)
        return new_updates, jax.tree.map(lambda new, old: new.astype(old.dtype), new_state, state)

    return optax.GradientTransformation(init, update)


def family_factor(
    c: jax.Array,
    r: jax.Array | None,
    *,
    eps: float,
    n: float = 0.0,
    x: float | jax.Array = 1.0,
    y: float | jax.Array = 0.0,
) -> jax.Array:
    """Compute the factor 1 / ((sqrt(2^-n s (c_h / s)^x) + eps) ((sqrt(r_i) + eps) / sqrt(s))^y) of the first moment.

    Args:
        c: bias-corrected mean squares of the columns, (1, H).
        r: bias-corrected mean squares of the rows, (V, 1); None if the row exponent is 0.
        eps: epsilon.
        n: scale exponent.
        x: column exponent.
        y: row exponent.

    Returns:
        The factor, (V, H), or (1, H) without r. 0 before the first gradient, and if a square overflowed float32.

    Example:
        >>> family_factor(jnp.array([[1.0, 4.0]]), None, eps=0.0)
        Array([[1. , 0.5]], dtype=float32)
    """
    s = c.mean()
    moves = s != 0
    if r is None and is_number(x) and x == 1:
        v = c
    else:
        # An infinite square stops only its column above, but here everything that depends on s.
        moves &= ~jnp.isposinf(s)
        s = jnp.where(moves, s, 1.0)
        v = s * (c / s) ** x
    factor = jnp.where(moves, 1 / (jnp.sqrt(2.0**-n * v) + eps), 0.0)
    if r is None:
        return factor
    rows = ((jnp.sqrt(r) + eps) / jnp.sqrt(s)) ** -y
    return factor * jnp.where(jnp.isinf(rows), 0.0, rows)  # infinite if eps = 0 and the row never had a gradient


def _mean(values: jax.Array, axis: int, size: int | None = None) -> jax.Array:
    """Mean over the first `size` elements of an axis, keeping the axis."""
    if size is None:
        return values.mean(axis, keepdims=True)
    # A mask, because a slice of a sharded axis would move rows between devices.
    is_real = jax.lax.broadcasted_iota(jnp.int32, values.shape, axis) < size
    return values.sum(axis, keepdims=True, where=is_real) / size


def _bias_correction(decay: float | jax.Array, count: jax.Array) -> jax.Array:
    """Return 1 - decay^t with expm1. Computed directly, it would lose four digits in float32 at t = 1."""
    if isinstance(decay, jax.Array):
        return -jnp.expm1(count * jnp.log(decay))
    return -jnp.expm1(count * (math.log(decay) if decay > 0 else -math.inf))


def _as_mu(tables: optax.Params, mu_dtype: Any) -> optax.Updates:
    """Shapes and dtypes of the first moment that a state with b1 = 0 does not have."""
    return jax.tree.map(lambda e: jax.ShapeDtypeStruct(e.shape, e.dtype if mu_dtype is None else mu_dtype), tables)


def _wide(array: jax.Array) -> Any:
    """Dtype of second moments and updates: float32, or float64 for float64."""
    return jnp.promote_types(array.dtype, jnp.float32)
