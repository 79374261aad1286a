"""Settings per group, which `param_groups` takes by group name.

A setting that would have no effect is an error that lists the valid names. torch.optim itself accepts any key in a
group and checks no values there.
"""

from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

from torch import Tensor

# Settings of every group. Values are in [0, limit).
LIMITS = {"lr": float("inf"), "betas": 1.0, "eps": float("inf"), "weight_decay": float("inf")}
OF_COUPLED_GROUPS = (
    "scale_exponent",
    "row_exponent",
    "column_exponent",
    "mean_free",
    "vocabulary_size",
    "state_dtype",
    "state_seed",
)


def check_options(
    options: Mapping[str, Mapping[str, Any]] | None, known: Iterable[str], coupled: Mapping[str, bool]
) -> None:
    """Raise an error for an unknown group, or a setting that a group does not have.

    Args:
        options: settings by group name.
        known: all group names.
        coupled: the groups of this model, and whether each is coupled.

    Example:
        >>> check_options({"decay": {"learning_rate": 1}}, ["decay"], {"decay": False})
        Traceback (most recent call last):
        ValueError: options: group 'decay' has no setting 'learning_rate'; expected 'lr', 'betas', 'eps', 'weight_decay'
    """
    if options is None:
        return
    if not isinstance(options, Mapping) or not all(isinstance(given, Mapping) for given in options.values()):
        raise TypeError(f"options is {options!r}; pass a dict of dicts, such as {{'decay': {{'lr': 1e-3}}}}")
    for name, given in options.items():
        if name not in known:
            raise ValueError(f"options: unknown group {name!r}; expected {_listed(known)}")
        if name not in coupled:
            raise ValueError(f"options: the model has no parameters for group {name!r}, only for {_listed(coupled)}")
        for key, value in given.items():
            if key in OF_COUPLED_GROUPS:
                if not coupled[name]:
                    raise ValueError(
                        f"options: {key} has no effect on group {name!r}, which is not coupled; the coupled groups are "
                        f"{_listed(other for other, is_coupled in coupled.items() if is_coupled) or 'none'}"
                    )
            elif key in LIMITS:
                check_value(key, value, f"options of group {name!r}: ")
            else:
                allowed = (*LIMITS, *OF_COUPLED_GROUPS) if coupled[name] else LIMITS
                raise ValueError(f"options: group {name!r} has no setting {key!r}; expected {_listed(allowed)}")


def check_value(key: str, value: object, label: str = "") -> None:
    """Check a setting that every group has. CoupledAdamW checks the others, because it knows the tables.

    Example:
        >>> check_value("betas", (0.9, 1.0))
        Traceback (most recent call last):
        ValueError: Invalid betas value: (0.9, 1.0)
    """
    if key == "betas":
        holds = isinstance(value, tuple | list) and len(value) == 2 and all(_is_valid(key, beta) for beta in value)
    else:
        holds = _is_valid(key, value)
    if not holds:
        raise ValueError(f"{label}Invalid {key} value: {value}")


def _is_valid(key: str, number: object) -> bool:
    if isinstance(number, Tensor):  # reading its value would wait for the device
        return key in ("lr", "betas") and number.numel() == 1
    return isinstance(number, Real) and 0 <= float(number) < LIMITS[key]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
