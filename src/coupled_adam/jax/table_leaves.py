"""Select the vocabulary tables in a parameter tree, and validate them and the options."""

from collections.abc import Callable
from numbers import Real
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

TABLE, OTHER = "table", "other"
TableChoice: TypeAlias = Callable[[str, Any], bool] | Any  # a predicate of path and leaf, or a tree of booleans


def table_labels(tables: TableChoice, params: optax.Params) -> Any:
    """Label each parameter as table or other, for `optax.partition`.

    Args:
        tables: a predicate of path and leaf, or a tree of booleans that is a prefix of the parameters.
        params: the parameters, or a tree of the same structure.

    Returns:
        A tree of labels, with the structure of the parameters or of the given tree of booleans.

    Example:
        >>> params = {"wte": {"embedding": jnp.ones((5, 2))}, "bias": jnp.ones(5)}
        >>> table_labels(lambda path, leaf: path == "wte/embedding", params)
        {'bias': 'other', 'wte': {'embedding': 'table'}}
    """
    if callable(tables) and jax.tree_util.all_leaves([tables]):  # some trees are callable, such as equinox modules
        chosen = jax.tree_util.tree_map_with_path(lambda path, leaf: tables(path_name(path), leaf), params)
    else:
        chosen = tables
    for path, is_table in jax.tree_util.tree_leaves_with_path(chosen):
        if not isinstance(is_table, bool | np.bool_):
            where = f" for {path_name(path)!r}" if path else ""
            raise ValueError(
                f"Invalid tables value{where}: {is_table!r}. Use a predicate of path and leaf that returns a bool, "
                "such as lambda path, leaf: path.endswith('embedding'), or a tree of booleans with their structure"
            )
    # To find the parameters in a state, optax initializes one with an empty tree.
    if jax.tree.leaves(params) and not any(jax.tree.leaves(chosen)):
        paths = [path_name(path) for path, leaf in jax.tree_util.tree_leaves_with_path(params) if jnp.ndim(leaf) == 2]
        listed = ", ".join(repr(path) for path in paths[:10]) + (", ..." if len(paths) > 10 else "")
        raise ValueError(
            "tables selects no parameters: this would be the same as optax.adamw. Select the vocabulary tables; the "
            f"matrices are {listed or 'none'}"
        )
    return jax.tree.map(lambda is_table: TABLE if is_table else OTHER, chosen)


def path_name(path: Any) -> str:
    """Format the path of a leaf, such as 'wte/embedding'."""
    name: str = jax.tree_util.keystr(path, simple=True, separator="/")
    return name


def check_tables(params: optax.Params, vocabulary_size: int | None, vocabulary_axis: int) -> None:
    """Check that every leaf is a possible vocabulary table."""
    expected = "(H, V)" if vocabulary_axis else "(V, H)"
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name, shape = path_name(path), jnp.shape(leaf)
        if len(shape) != 2:
            raise ValueError(
                f"table {name!r} has shape {shape}, expected {expected}; use coupled_adamw(..., tables=...), which "
                "updates everything that is not a table with optax.adamw"
            )
        if 0 in shape:
            raise ValueError(f"table {name!r} has shape {shape} and no elements; do not select it as a table")
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"table {name!r} has dtype {leaf.dtype}, expected a floating-point dtype; do not select it as a table"
            )
        if isinstance(vocabulary_size, int) and vocabulary_size > shape[vocabulary_axis]:
            raise ValueError(
                f"vocabulary_size is {vocabulary_size}, but table {name!r} of shape {shape} has "
                f"{shape[vocabulary_axis]} rows along axis {vocabulary_axis}; for a table (H, V), use "
                "vocabulary_axis=1; for another vocabulary, use a separate transformation (optax.partition)"
            )


def check_options(
    *,
    row_exponent: Any,
    column_exponent: Any,
    scale_exponent: Any,
    vocabulary_size: Any,
    vocabulary_axis: Any,
) -> None:
    """Validate plain numbers. Values of arrays and schedules are known only when the step runs."""
    for option, value in {"row_exponent": row_exponent, "column_exponent": column_exponent}.items():
        if not (callable(value) or isinstance(value, jax.Array)) and not (is_number(value) and 0 <= value <= 1):
            raise ValueError(f"Invalid {option} value: {value!r}. Use a number in [0, 1] or a schedule")
    if not isinstance(scale_exponent, jax.Array) and not (is_number(scale_exponent) and abs(scale_exponent) <= 64):
        raise ValueError(
            f"Invalid scale_exponent value: {scale_exponent!r}. Use a number from -64 to 64; 0 is the paper's method"
        )
    is_size = isinstance(vocabulary_size, int) and not isinstance(vocabulary_size, bool) and vocabulary_size >= 1
    if not (vocabulary_size is None or isinstance(vocabulary_size, jax.Array) or is_size):
        raise ValueError(f"Invalid vocabulary_size value: {vocabulary_size!r}. Use a positive integer or None")
    if isinstance(vocabulary_axis, jax.Array) or vocabulary_axis not in (0, 1):
        raise ValueError(
            f"Invalid vocabulary_axis value: {vocabulary_axis!r}. Use 0 for tables (V, H), 1 for tables (H, V). With "
            "optax.inject_hyperparams, list it in static_args"
        )


def is_number(value: object) -> bool:
    """Whether a value is a plain number, known before the step is traced."""
    return isinstance(value, Real) and not isinstance(value, bool)
