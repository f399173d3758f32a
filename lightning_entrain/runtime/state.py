"""What a rank holds during one step; empty again at its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from lightning_entrain.data.batch import PlannedBatch
from lightning_entrain.runtime.weight_store import WeightWork
from lightning_entrain.schedule.graph import Edge, StepGraph
from lightning_entrain.schedule.lower import Program

Piece = tuple[int, int, int]
"""(stage, microbatch, target): what has an autograd graph of its own. On LLM stages the target is
the microbatch; an encoder microbatch has one piece per LLM microbatch its samples belong to."""


@dataclass
class StepSums:
    """What a rank's last stage adds up over a step; zero elsewhere.

    Attributes:
        loss: Sum of the cross entropies over label tokens, float64 scalar.
        scalars: Sums of the model's scalar hooks, by name.
    """

    loss: Tensor
    scalars: dict[str, Tensor]


@dataclass
class StepState:
    """One step of one rank.

    Attributes:
        program: The verified schedule.
        graph: Its data flow.
        segments: Samples of each segment (k, j).
        batch: The global batch.
        replica: The replica this rank belongs to.
        train: Whether graphs are kept.
        sums: Loss and scalars so far.
        inputs: Leaf tensors that stages were entered with.
        outputs: Tensors that backward starts from.
        features: Leaf features per LLM microbatch, by the encoder microbatch they come from.
        weights: Weight work left by I for W.
        local: Tensors handed over inside the rank.
        outgoing: Tensors waiting for their send action.
    """

    program: Program
    graph: StepGraph
    segments: Mapping[tuple[int, int], tuple[int, ...]]
    batch: PlannedBatch
    replica: int
    train: bool
    sums: StepSums
    inputs: dict[Piece, Tensor] = field(default_factory=dict)
    outputs: dict[Piece, Tensor] = field(default_factory=dict)
    features: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    weights: dict[Piece, list[WeightWork]] = field(default_factory=dict)
    local: dict[Edge, Tensor] = field(default_factory=dict)
    outgoing: dict[Edge, Tensor] = field(default_factory=dict)

    def goes_backward(self, stage: int) -> bool:
        """Whether this step computes gradients on a stage; none before the first stage."""
        return self.train and stage >= 0 and self.graph.needs_backward(stage)

    def leftovers(self) -> str:
        """What a step should have used up, in words; empty if nothing."""
        found = []
        for name in ("inputs", "outputs", "features", "weights", "local", "outgoing"):
            if held := getattr(self, name):
                found.append(f"{name} of {', '.join(map(str, list(held)[:4]))}")
        return "; ".join(found)
