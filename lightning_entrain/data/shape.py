"""How a global batch is cut into microbatches."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_entrain.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """How a global batch is cut.

    Attributes:
        global_batch_size: Samples per optimizer step, over all replicas.
        num_microbatches: Microbatches per replica (K); None derives it from the next.
        micro_batch_size: Samples per microbatch; None where the number of microbatches is given.
    """

    global_batch_size: int
    num_microbatches: int | None = None
    micro_batch_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "num_microbatches", "micro_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(
                    f"{name} is {value}", limit="at least 1", remedy=f"set {name} to 1 or more"
                )
        if (self.num_microbatches is None) == (self.micro_batch_size is None):
            raise ConfigError(
                f"num_microbatches is {self.num_microbatches} and micro_batch_size is "
                f"{self.micro_batch_size}",
                limit="exactly one of the two is given, the other follows",
                remedy="set the other to null",
            )

    def check_replicas(self, num_replicas: int) -> None:
        """Check that the replicas can share a global batch evenly.

        Raises:
            ConfigError: If they cannot.
        """
        step = num_replicas * (self.micro_batch_size or 1)
        if self.global_batch_size % step:
            what = f"{num_replicas} replicas"
            if self.micro_batch_size is not None:
                what += f" x micro_batch_size {self.micro_batch_size} = {step}"
            lower = self.global_batch_size // step * step
            either = f"{lower} or {lower + step}" if lower else f"{step}"
            raise ConfigError(
                f"global_batch_size is {self.global_batch_size}",
                limit=f"divisible by {what}",
                remedy=f"set global_batch_size to {either}, or change the number of replicas",
            )

    def microbatches(self, num_samples: int, num_replicas: int) -> int:
        """Microbatches per replica for a batch of that many samples, maybe an incomplete one."""
        if self.num_microbatches is not None:
            return self.num_microbatches
        assert self.micro_batch_size is not None
        return max(1, -(-num_samples // (num_replicas * self.micro_batch_size)))
