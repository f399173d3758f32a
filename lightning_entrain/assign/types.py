"""The record of which sample is computed where (paper, section 5)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
        groups: Optional sub-microbatches (DIP-style only).
    """

    encoder: Microbatches
    llm: Microbatches
    groups: tuple[Any, ...] | None = None

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
    """

    replicas: tuple[ReplicaAssignment, ...]
    policy: str

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and strings, ready for JSON."""
        return {
            "policy": self.policy,
            "replicas": [
                {
                    "encoder": [list(entry) for entry in replica.encoder],
                    "llm": [list(entry) for entry in replica.llm],
                }
                for replica in self.replicas
            ],
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Assignment:
        """Inverse of :meth:`to_dict`."""
        replicas = tuple(
            ReplicaAssignment(
                encoder=tuple(tuple(entry) for entry in replica["encoder"]),
                llm=tuple(tuple(entry) for entry in replica["llm"]),
            )
            for replica in record["replicas"]
        )
        return cls(replicas=replicas, policy=record["policy"])

    def digest(self) -> str:
        """Hex digest of the content; equal on every rank or the step must not run."""
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


def _validate_replica(r: int, replica: ReplicaAssignment) -> None:
    if len(replica.encoder) != len(replica.llm):
        raise AssignmentError(
            f"Replica {r} has {len(replica.encoder)} encoder and {len(replica.llm)} LLM microbatches",
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
