"""One option of a structured config: its range and meaning, and the check of a value."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Any

from lightning_entrain.errors import ConfigError


def option(
    default: Any,
    meaning: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """A field of a config, with what `validate` and the reference need.

    Args:
        default: Value where the user gives none; a list or a dictionary is copied.
        meaning: One sentence for people, with the unit.
        minimum: Least value allowed.
        above: Value that must be exceeded.
        maximum: Greatest value allowed.
        choices: The only values allowed.
    """
    metadata = {
        "meaning": meaning,
        "minimum": minimum,
        "above": above,
        "maximum": maximum,
        "choices": choices,
    }
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def check_range(name: str, value: Any, metadata: dict[str, Any]) -> None:
    """Check one value.

    Args:
        name: The option's dotted name.
        value: What it is set to; None is always allowed.
        metadata: As :func:`option` keeps it.

    Raises:
        ConfigError: If the value is out of range.
    """
    if value is None:
        return
    choices = metadata.get("choices")
    limit = describe_range(metadata)
    remedy = f"set {name} within that"
    if choices and value not in choices:
        raise ConfigError(f"{name} is {value!r}", limit=limit, remedy=f"set {name}={choices[0]}")
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return
    low, above, high = metadata.get("minimum"), metadata.get("above"), metadata.get("maximum")
    if math.isinf(value):
        raise ConfigError(f"{name} is {value}", limit="a finite number", remedy=f"lower {name}")
    # Written so that NaN, which compares false with everything, is out of range.
    if low is not None and not value >= low:
        raise ConfigError(f"{name} is {value}", limit=limit, remedy=remedy)
    if above is not None and not value > above:
        raise ConfigError(f"{name} is {value}", limit=limit, remedy=remedy)
    if high is not None and not value <= high:
        raise ConfigError(f"{name} is {value}", limit=limit, remedy=remedy)


def describe_range(metadata: dict[str, Any]) -> str:
    """The range of an option in words; empty where it has none."""
    if metadata.get("choices"):
        return "one of " + ", ".join(metadata["choices"])
    parts = []
    if metadata.get("minimum") is not None:
        parts.append(f"at least {metadata['minimum']}")
    if metadata.get("above") is not None:
        parts.append(f"above {metadata['above']}")
    if metadata.get("maximum") is not None:
        parts.append(f"at most {metadata['maximum']}")
    return ", ".join(parts)
