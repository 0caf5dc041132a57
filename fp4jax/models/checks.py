"""What every model refuses: configurations and inputs that cannot be meant."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp


def check_config(config: Any, **multiples: str) -> None:
    """Raises ValueError if a field of a configuration has a value that no model can have.

    Integers are positive, floats finite and not negative, a ``dtype`` is one of two.

    Args:
      config: a dataclass; its fields' annotated types say what is checked.
      **multiples: fields that must be multiples of other fields, ``field="other field"``.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.type is int and (type(value) is not int or value < 1):
            raise ValueError(f"{field.name} must be a positive integer; got {value!r}")
        if field.type is float and not (isinstance(value, float | int) and 0 <= value < math.inf):
            raise ValueError(f"{field.name} must be a finite number from 0 up; got {value!r}")
        if field.type is bool and type(value) is not bool:
            raise ValueError(f"{field.name} must be True or False; got {value!r}")
    for name, divisor in multiples.items():
        value, unit = getattr(config, name), getattr(config, divisor)
        if value % unit:
            raise ValueError(f"{name} must be a multiple of {divisor}={unit}; got {value}")
    if getattr(config, "dtype", "float32") not in ("float32", "bfloat16"):
        raise ValueError(f"dtype must be 'float32' or 'bfloat16'; got {config.dtype!r}")


def check_choice(name: str, value: object, allowed: Any) -> None:
    """Raises ValueError unless ``value``, of the field ``name``, is among the allowed ones."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


def check_tokens(tokens: jax.Array) -> None:
    """Raises ValueError unless ``tokens`` is a two-dimensional integer array."""
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            "tokens must be an integer array of shape (batch, length); "
            f"got {tokens.dtype} of shape {tokens.shape}"
        )
