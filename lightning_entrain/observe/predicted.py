"""What the cost model says of a step that ran: the same schedule in predicted time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_entrain.assign.types import Assignment
from lightning_entrain.observe.idle import durations_of
from lightning_entrain.observe.step_trace import StepTrace
from lightning_entrain.schedule.predict import replica_step
from lightning_entrain.schedule.simulate import simulate
from lightning_entrain.schedule.timeline import Timeline
from lightning_entrain.workload.sizes import SampleSize

THIRDS = (1 / 3, 1 / 3, 1 / 3)
"""Parts of F, I and W in the work of a stage that is trained as a whole."""


def predicted_timelines(
    trace: StepTrace,
    assignment: Assignment,
    sizes: Sequence[SampleSize],
    stage_shares: Sequence[float],
    stage_factors: Sequence[tuple[float, float, float]] | None = None,
) -> tuple[Timeline, ...]:
    """Simulated timeline per replica, in the cost model's milliseconds.

    Args:
        trace: The step that ran.
        assignment: Of its batch, with costs of forward and backward in milliseconds.
        sizes: Of its batch.
        stage_shares: Part of its module's work that each stage does.
        stage_factors: Parts of a stage's work that F, I and W do; thirds if None.
    """
    factors = stage_factors or [THIRDS] * len(stage_shares)
    found = []
    for index, replica in enumerate(trace.replicas):
        placement = replica.schedule.placement
        rows, costs = replica_step(
            assignment, index, placement, stage_shares, sizes=sizes, stage_factors=factors
        )
        found.append(simulate(replica.schedule, costs, rows).timeline)
    return tuple(found)


@dataclass
class StageTimes:
    """Measured and predicted milliseconds per stage, summed over steps and replicas.

    Attributes:
        measured_ms: By stage.
        predicted_ms: By stage.
        error_ms: Sum over actions of |measured - scale x predicted|.
    """

    measured_ms: list[float]
    predicted_ms: list[float]
    error_ms: float = 0.0

    @classmethod
    def of(cls, trace: StepTrace, predicted: Sequence[Timeline]) -> StageTimes:
        """Compare the actions of one step."""
        num_stages = trace.replicas[0].schedule.placement.num_stages
        found = cls([0.0] * num_stages, [0.0] * num_stages)
        pairs: list[tuple[float, float]] = []
        for replica, timeline in zip(trace.replicas, predicted, strict=True):
            took = durations_of(replica)
            for row in timeline.rows:
                measured = took.get((row.rank, row.action), 0.0)
                found.measured_ms[row.action.stage] += measured
                found.predicted_ms[row.action.stage] += row.duration_ms
                pairs.append((measured, row.duration_ms))
        scale = found.scale
        found.error_ms = sum(abs(measured - scale * expected) for measured, expected in pairs)
        return found

    def add(self, other: StageTimes) -> StageTimes:
        """Both together."""
        return StageTimes(
            [a + b for a, b in zip(self.measured_ms, other.measured_ms, strict=True)],
            [a + b for a, b in zip(self.predicted_ms, other.predicted_ms, strict=True)],
            self.error_ms + other.error_ms,
        )

    @property
    def scale(self) -> float:
        """Measured over predicted time of the whole model; 1 where nothing was predicted."""
        predicted = sum(self.predicted_ms)
        return sum(self.measured_ms) / predicted if predicted else 1.0

    @property
    def relative_error(self) -> float:
        """Mean distance of an action from its prediction, once both have the same total."""
        measured = sum(self.measured_ms)
        return self.error_ms / measured if measured else 0.0

    def drift(self, stages: range) -> float:
        """How much longer some stages took than predicted, relative to the whole model."""
        predicted = self.scale * sum(self.predicted_ms[s] for s in stages)
        return sum(self.measured_ms[s] for s in stages) / predicted - 1 if predicted else 0.0

    def stage_factors(self) -> list[float]:
        """Measured over predicted milliseconds of each stage."""
        return [
            measured / predicted if predicted else self.scale
            for measured, predicted in zip(self.measured_ms, self.predicted_ms, strict=True)
        ]
