"""The record of which sample is computed where (paper, section 5)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_entrain.assign.bounds import AssignmentBounds, load_bound
from lightning_entrain.assign.measures import Imbalance, imbalance
from lightning_entrain.assign.numbers import loads_of
from lightning_entrain.errors import AssignmentError

Microbatches = tuple[tuple[int, ...], ...]
"""Global-batch indices per microbatch, in execution order."""


@dataclass(frozen=True, kw_only=True)
class ReplicaAssignment:
    """One replica's minibatch as encoder and LLM microbatches.

    Attributes:
        encoder: Per encoder microbatch k the samples it encodes. Entries may be empty.
        llm: As many LLM microbatches; entry j holds samples encoded in j or j-1 (lag 0 or 1), and
            text-only samples, which appear in no encoder microbatch.
        groups: Per encoder microbatch its sub-microbatches, each a tuple of samples
            (``dip`` only).
    """

    encoder: Microbatches
    llm: Microbatches
    groups: tuple[Microbatches, ...] | None = None

    @property
    def num_microbatches(self) -> int:
        """Length of both lists, K_r."""
        return len(self.llm)

    def segments(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """Samples of encoder microbatch k that belong to LLM microbatch j, keyed (k, j).

        Samples keep the encoder microbatch's order. Empty segments are absent.
        """
        destination = {index: j for j, entry in enumerate(self.llm) for index in entry}
        found: dict[tuple[int, int], list[int]] = {}
        for k, entry in enumerate(self.encoder):
            for index in entry:
                found.setdefault((k, destination[index]), []).append(index)
        return {key: tuple(found[key]) for key in sorted(found)}

    @property
    def max_lag(self) -> int:
        """Largest distance from a sample's encoder microbatch to its LLM microbatch."""
        return max((j - k for k, j in self.segments()), default=0)


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Which sample of a global batch is in which replica and microbatch.

    Attributes:
        replicas: One entry per data-parallel replica.
        policy: Name of the policy that made it.
        encoder_cost: Per sample of the global batch, where known. Not compared, not serialised.
        llm_cost: Likewise.
    """

    replicas: tuple[ReplicaAssignment, ...]
    policy: str
    encoder_cost: Sequence[float] | None = field(default=None, compare=False, repr=False)
    llm_cost: Sequence[float] | None = field(default=None, compare=False, repr=False)

    def with_costs(self, encoder_cost: Sequence[float], llm_cost: Sequence[float]) -> Assignment:
        """The same assignment measured with these costs, one per sample of the global batch."""
        return replace(
            self,
            encoder_cost=tuple(float(cost) for cost in encoder_cost),
            llm_cost=tuple(float(cost) for cost in llm_cost),
        )

    def encoder_loads(self, replica: int) -> NDArray[np.float64]:
        """Summed encoder cost of each of a replica's encoder microbatches, ``[K_r]``."""
        return self._loads("encoder", replica)

    def llm_loads(self, replica: int) -> NDArray[np.float64]:
        """Summed LLM cost of each of a replica's LLM microbatches, ``[K_r]``."""
        return self._loads("llm", replica)

    def imbalance(self, module: str, replica: int | None = None) -> Imbalance:
        """Spread of one module's loads over a replica's microbatches, or over all of them.

        Args:
            module: ``encoder`` or ``llm``.
            replica: None for the microbatches of all replicas together.
        """
        chosen = range(len(self.replicas)) if replica is None else (replica,)
        return imbalance([load for r in chosen for load in self._loads(module, r).tolist()])

    def replica_imbalance(self, module: str) -> Imbalance:
        """Spread of one module's total load across replicas."""
        return imbalance([self._total(module, r) for r in range(len(self.replicas))])

    @cached_property
    def bounds(self) -> AssignmentBounds:
        """Lower bounds for the same samples per replica, and the distance to them."""
        per_module = {}
        for module in ("encoder", "llm"):
            cost = self._cost(module)
            per_replica = tuple(
                load_bound(
                    [cost[i] for entry in replica.llm for i in entry],
                    self._loads(module, r).tolist(),
                )
                for r, replica in enumerate(self.replicas)
            )
            totals = [self._total(module, r) for r in range(len(self.replicas))]
            per_module[module] = (per_replica, load_bound(cost, totals))
        return AssignmentBounds(
            encoder=per_module["encoder"][0],
            llm=per_module["llm"][0],
            encoder_replicas=per_module["encoder"][1],
            llm_replicas=per_module["llm"][1],
        )

    def _cost(self, module: str) -> Sequence[float]:
        cost = {"encoder": self.encoder_cost, "llm": self.llm_cost}.get(module)
        if cost is None:
            raise AssignmentError(
                f"The assignment holds no {module} costs",
                limit="loads and bounds of 'encoder' and 'llm' need the samples' costs",
                remedy="use assign_samples or with_costs(encoder_cost, llm_cost)",
            )
        return cost

    def _loads(self, module: str, replica: int) -> NDArray[np.float64]:
        return np.array(loads_of(self._cost(module), getattr(self.replicas[replica], module)))

    def _total(self, module: str, replica: int) -> float:
        own = [i for entry in self.replicas[replica].llm for i in entry]
        return loads_of(self._cost(module), [own])[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and strings, ready for JSON. Costs are left out."""
        return {
            "policy": self.policy,
            "replicas": [_replica_to_dict(replica) for replica in self.replicas],
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Assignment:
        """Inverse of :meth:`to_dict`."""
        replicas = tuple(
            ReplicaAssignment(
                encoder=tuple(tuple(entry) for entry in replica["encoder"]),
                llm=tuple(tuple(entry) for entry in replica["llm"]),
                groups=_groups_from(replica.get("groups")),
            )
            for replica in record["replicas"]
        )
        return cls(replicas=replicas, policy=record["policy"])

    def digest(self) -> str:
        """Hex digest of the replicas' lists; equal on every rank or the step must not run.

        The order of samples within a microbatch and of microbatches counts; the policy's name and
        the costs do not.
        """
        text = json.dumps(self.to_dict()["replicas"], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def validate(self, num_samples: int, *, text_only: frozenset[int] = frozenset()) -> None:
        """Check the rules of an assignment.

        Args:
            num_samples: Samples in the global batch; each must be placed exactly once.
            text_only: Indices without vision work; they appear in the LLM lists alone.

        Raises:
            AssignmentError: If a rule is broken.
        """
        llm = [i for r in self.replicas for entry in r.llm for i in entry]
        encoder = [i for r in self.replicas for entry in r.encoder for i in entry]
        if sorted(llm) != list(range(num_samples)):
            raise AssignmentError(
                f"The LLM microbatches hold {len(llm)} entries for {num_samples} samples",
                limit="every sample of the global batch appears exactly once",
            )
        if sorted(encoder) != [i for i in range(num_samples) if i not in text_only]:
            raise AssignmentError(
                f"The encoder microbatches hold {len(encoder)} entries for "
                f"{num_samples - len(text_only)} samples with images",
                limit="every sample with an image appears exactly once",
            )
        for r, replica in enumerate(self.replicas):
            _validate_replica(r, replica)


def _replica_to_dict(replica: ReplicaAssignment) -> dict[str, Any]:
    record: dict[str, Any] = {
        "encoder": [list(entry) for entry in replica.encoder],
        "llm": [list(entry) for entry in replica.llm],
    }
    if replica.groups is not None:
        record["groups"] = [[list(group) for group in entry] for entry in replica.groups]
    return record


def _groups_from(record: Any) -> tuple[Microbatches, ...] | None:
    if record is None:
        return None
    return tuple(tuple(tuple(group) for group in entry) for entry in record)


def _validate_replica(r: int, replica: ReplicaAssignment) -> None:
    if len(replica.encoder) != len(replica.llm):
        raise AssignmentError(
            f"Replica {r} has {len(replica.encoder)} encoder microbatches "
            f"and {len(replica.llm)} LLM microbatches",
            limit="both lists have equal length",
        )
    own = {i for entry in replica.llm for i in entry}
    for k, entry in enumerate(replica.encoder):
        missing = [i for i in entry if i not in own]
        if missing:
            raise AssignmentError(
                f"Replica {r} encodes sample {missing[0]} in microbatch {k} but never decodes it",
                limit="a sample stays within one replica",
            )
    for k, j in replica.segments():
        if not 0 <= j - k <= 1:
            raise AssignmentError(
                f"Replica {r} encodes in microbatch {k} what it decodes in microbatch {j}",
                limit="a sample is decoded in its own microbatch or the next",
            )
