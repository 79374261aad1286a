"""Optimizers built from the transformation: for tables only, and for a whole model with optax.adamw for the rest.

Legend: V vocabulary rows, H hidden size.
"""

from typing import Any

import optax

from coupled_adam.jax.coupled_transform import Exponent, scale_by_coupled_adam
from coupled_adam.jax.table_leaves import OTHER, TABLE, TableChoice, is_number, table_labels


def coupled_adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    mu_dtype: Any = None,
    weight_decay: float = 0.0,
    *,
    row_exponent: Exponent = 0.0,
    column_exponent: Exponent = 1.0,
    mean_free: bool = False,
    scale_exponent: float = 0.0,
    vocabulary_size: int | None = None,
    vocabulary_axis: int = 0,
) -> optax.GradientTransformation:
    """Optimize vocabulary tables with Coupled Adam, or another member of its family.

    Every leaf must be a table. For a whole model, use `coupled_adamw`, or this optimizer in `optax.partition`.

    Args:
        learning_rate: a number or a schedule.
        b1, b2, eps, mu_dtype: as in optax.adamw.
        weight_decay: decoupled weight decay; the paper uses none for tables. `update` then needs params.
        row_exponent, column_exponent, mean_free, scale_exponent, vocabulary_size, vocabulary_axis: as in
            `scale_by_coupled_adam`.

    Returns:
        The optimizer.

    Example:
        >>> import jax.numpy as jnp
        >>> table = jnp.zeros((2, 1))
        >>> optimizer = coupled_adam(0.1)
        >>> updates, state = optimizer.update(jnp.array([[1.0], [-1.0]]), optimizer.init(table))
        >>> [round(float(number), 6) for number in optax.apply_updates(table, updates).flatten()]
        [-0.1, 0.1]
    """
    is_decayed = not is_number(weight_decay) or weight_decay != 0
    return optax.chain(
        scale_by_coupled_adam(
            b1,
            b2,
            eps,
            row_exponent=row_exponent,
            column_exponent=column_exponent,
            mean_free=mean_free,
            scale_exponent=scale_exponent,
            vocabulary_size=vocabulary_size,
            vocabulary_axis=vocabulary_axis,
            mu_dtype=mu_dtype,
        ),
        # Both have the same empty state, so a later run can enable weight decay.
        optax.add_decayed_weights(weight_decay) if is_decayed else optax.identity(),
        optax.scale_by_learning_rate(learning_rate),
    )


def coupled_adamw(
    learning_rate: optax.ScalarOrSchedule,
    tables: TableChoice,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    mu_dtype: Any = None,
    weight_decay: float = 1e-4,
    mask: Any = None,
    *,
    row_exponent: Exponent = 0.0,
    column_exponent: Exponent = 1.0,
    mean_free: bool = False,
    scale_exponent: float = 0.0,
    vocabulary_size: int | None = None,
    vocabulary_axis: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Optimize a model: vocabulary tables with `coupled_adam`, everything else with `optax.adamw`.

    Args:
        learning_rate: a number or a schedule.
        tables: selects the vocabulary tables: a predicate of path and leaf, where the path is a string such as
            "wte/embedding"; or a tree of booleans with the structure of the parameters, or a prefix of it.
        b1, b2, eps, mu_dtype: as in optax.adamw, for all parameters.
        weight_decay: decoupled weight decay of the other parameters, as in optax.adamw. Tables are not decayed.
        mask: which of the other parameters to decay, as in optax.adamw; None means all.
        row_exponent, column_exponent, mean_free, scale_exponent, vocabulary_size, vocabulary_axis: options of the
            tables, as in `scale_by_coupled_adam`.

    Returns:
        The optimizer. Its state has that of `coupled_adam` under "table" and that of `optax.adamw` under "other".

    Example:
        >>> import jax.numpy as jnp
        >>> params = {"embedding": jnp.ones((5, 2)), "bias": jnp.ones(5)}
        >>> optimizer = coupled_adamw(1e-3, tables=lambda path, leaf: path == "embedding")
        >>> optimizer.init(params).inner_states["table"].inner_state[0].column_nu["embedding"].shape
        (1, 2)
    """
    of_tables = coupled_adam(
        learning_rate,
        b1,
        b2,
        eps,
        mu_dtype,
        row_exponent=row_exponent,
        column_exponent=column_exponent,
        mean_free=mean_free,
        scale_exponent=scale_exponent,
        vocabulary_size=vocabulary_size,
        vocabulary_axis=vocabulary_axis,
    )
    of_others = optax.adamw(learning_rate, b1, b2, eps, mu_dtype=mu_dtype, weight_decay=weight_decay, mask=mask)
    return optax.partition({TABLE: of_tables, OTHER: of_others}, lambda params: table_labels(tables, params))
