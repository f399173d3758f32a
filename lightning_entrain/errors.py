"""Errors that users meet. Each states the value, the limit it broke and the remedy."""

from __future__ import annotations


class EntrainError(Exception):
    """Base of all errors raised for the user's sake.

    Args:
        value: What was found, with the offending value in it.
        limit: The rule it breaks.
        remedy: What the user can do about it.
    """

    def __init__(self, value: str, *, limit: str = "", remedy: str = "") -> None:
        self.value = value
        self.limit = limit
        self.remedy = remedy
        parts = [value.rstrip(".")]
        if limit:
            parts.append(f"Limit: {limit.rstrip('.')}")
        if remedy:
            parts.append(f"Remedy: {remedy.rstrip('.')}")
        super().__init__(". ".join(parts) + ".")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.value, self.limit, self.remedy)


def _rebuild(cls: type[EntrainError], value: str, limit: str, remedy: str) -> EntrainError:
    return cls(value, limit=limit, remedy=remedy)


class ConfigError(EntrainError, ValueError):
    """An option or argument has a value that cannot be used."""


class InfeasiblePlanError(ConfigError):
    """No parallel plan satisfies the constraints."""


class AssignmentError(EntrainError, ValueError):
    """Samples cannot be assigned to microbatches under the given rules."""


class ScheduleError(EntrainError, RuntimeError):
    """A schedule failed verification and was not run."""


class SampleError(EntrainError, ValueError):
    """A training sample is broken: unreadable, empty or too large."""


class DataError(EntrainError, OSError):
    """A dataset or its cache is missing, empty, damaged or cannot be written."""


class RuntimeMismatchError(EntrainError, RuntimeError):
    """Ranks disagree, or a message is not the one the schedule announced."""


class CheckpointError(EntrainError, RuntimeError):
    """A checkpoint cannot be written, or does not fit the model."""


class RankFailedError(EntrainError, RuntimeError):
    """Another rank failed first; the message holds its error."""
