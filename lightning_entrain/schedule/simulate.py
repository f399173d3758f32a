"""Exact event times of a schedule from any cost model: pure, and fast enough to search with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_entrain.errors import ScheduleError
from lightning_entrain.schedule.timeline import Timeline, TimelineRow
from lightning_entrain.schedule.types import ActionKind, Placement, RowCounts, Schedule, Segment

Floats = NDArray[np.float64]
_CODES = {ActionKind.F: 0, ActionKind.B: 1, ActionKind.I: 2, ActionKind.W: 3}


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Predicted cost of every (stage, microbatch) of one replica's step.

    Attributes:
        forward_ms: F, ``[stages, microbatches]``.
        input_ms: I, the gradient of a stage's input, ``[stages, microbatches]``. B takes I + W.
        weight_ms: W, the gradient of its weights, ``[stages, microbatches]``.
        activation_bytes: What a microbatch holds from F to W (or B), any unit; default 1 each.
        segment_shares: Part of encoder microbatch k's work that segment (k, j) makes, for
            backward by segment; default by patches, else by merged vision tokens.
        overhead_ms: Added to every action.
    """

    forward_ms: Floats
    input_ms: Floats
    weight_ms: Floats
    activation_bytes: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    segment_shares: Mapping[Segment, float] = field(default_factory=dict)
    overhead_ms: float = 0.0

    def __post_init__(self) -> None:
        if not self.activation_bytes.size:
            object.__setattr__(self, "activation_bytes", np.ones(self.forward_ms.shape))
        tables = self.forward_ms, self.input_ms, self.weight_ms, self.activation_bytes
        if len({table.shape for table in tables}) > 1 or self.forward_ms.ndim != 2:
            raise ScheduleError(
                f"Cost tables of shapes {[table.shape for table in tables]}",
                limit="all [stages, microbatches]",
            )
        if any(not (np.isfinite(table).all() and (table >= 0).all()) for table in tables):
            raise ScheduleError("A cost is negative or not finite", limit="costs of at least 0")

    @classmethod
    def from_loads(
        cls,
        placement: Placement,
        encoder_loads: Sequence[float],
        llm_loads: Sequence[float],
        stage_shares: Sequence[float],
        *,
        input_factor: float = 1.0,
        weight_factor: float = 1.0,
        stage_factors: Sequence[tuple[float, float, float]] | None = None,
        segment_shares: Mapping[Segment, float] | None = None,
        overhead_ms: float = 0.0,
    ) -> StepCosts:
        """Costs in proportion to a module's load per microbatch.

        Args:
            placement: Which stages belong to which module.
            encoder_loads: Forward time of the whole encoder per microbatch.
            llm_loads: Likewise of the LLM.
            stage_shares: Part of its module's work that each stage does.
            input_factor: Time of I over that of F.
            weight_factor: Time of W over that of F.
            stage_factors: Per stage the times of F, I and W over its part of the load; instead of
                the two factors, where the load is not forward time alone.
            segment_shares: Part of encoder microbatch k's work in each segment.
            overhead_ms: Added to every action.

        Activation bytes are counted in mean microbatches of the stage's rank, and taken to be in
        proportion to forward time among the stages of a rank.
        """
        modules = np.array([encoder_loads, llm_loads], dtype=np.float64)
        which = np.arange(placement.num_stages) >= placement.num_encoder_stages
        loads = modules[which.astype(int)]
        work = loads * np.asarray(stage_shares, dtype=np.float64)[:, None]
        if stage_factors is None:
            stage_factors = [(1.0, input_factor, weight_factor)] * placement.num_stages
        factors = np.asarray(stage_factors, dtype=np.float64).T[:, :, None]
        forward = work * factors[0]
        # fsum: numpy's order of summation depends on the machine, and all ranks must agree.
        means = [math.fsum(own) / max(len(own), 1) for own in forward.tolist()]
        ranks = placement.stage_to_rank
        on_rank = [
            math.fsum(m for m, other in zip(means, ranks, strict=True) if other == rank)
            for rank in ranks
        ]
        whole = np.array([total or 1.0 for total in on_rank])[:, None]
        return cls(
            forward_ms=forward,
            input_ms=work * factors[1],
            weight_ms=work * factors[2],
            activation_bytes=forward / whole,
            segment_shares=segment_shares or {},
            overhead_ms=overhead_ms,
        )

    @property
    def num_stages(self) -> int:
        """Stages of both modules."""
        return self.forward_ms.shape[0]

    def work_ms(self) -> Floats:
        """All F, I and W of each stage without overhead, ``[stages]``."""
        total: Floats = (self.forward_ms + self.input_ms + self.weight_ms).sum(axis=1)
        return total


@dataclass(frozen=True, kw_only=True)
class Link:
    """Transfers between ranks: each takes latency + bytes / bandwidth, one after the other.

    Attributes:
        boundary_columns: Columns of the tensor between stage s and s+1.
        bytes_per_value: Bytes of one value of it.
        bytes_per_ms: Bandwidth of each direction between two ranks.
        latency_ms: Time before the first byte arrives.
    """

    boundary_columns: tuple[int, ...]
    bytes_per_value: int
    bytes_per_ms: float
    latency_ms: float = 0.0

    def transfer_ms(self, num_rows: int, boundary: int) -> float:
        """Time of one message; nothing for no rows."""
        if not num_rows:
            return 0.0
        num_bytes = num_rows * self.boundary_columns[boundary] * self.bytes_per_value
        return self.latency_ms + num_bytes / self.bytes_per_ms


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What :func:`simulate` found.

    Attributes:
        schedule: What ran.
        iteration_ms: End of the last action.
        busy_ms: Compute time per rank.
        peak_live: Per stage the largest number of microbatches with F begun and W (or B) not
            ended.
        peak_bytes: Per rank the largest sum of live activations, in the unit of the costs.
    """

    schedule: Schedule
    iteration_ms: float
    busy_ms: tuple[float, ...]
    peak_live: tuple[int, ...]
    peak_bytes: tuple[float, ...]
    _start: Floats
    _end: Floats

    @property
    def bottleneck_ms(self) -> float:
        """Work of the busiest rank."""
        return max(self.busy_ms, default=0.0)

    @property
    def bubble_ratio(self) -> float:
        """Share of all ranks' time in which they do not compute."""
        total = self.iteration_ms * len(self.busy_ms)
        return 1.0 - sum(self.busy_ms) / total if total else 0.0

    @cached_property
    def timeline(self) -> Timeline:
        """Start and end of every action."""
        rows: list[TimelineRow] = []
        times = zip(self._start.tolist(), self._end.tolist(), strict=True)
        for rank, own in enumerate(self.schedule.ranks):
            rows += [TimelineRow(rank, action, *next(times)) for action in own]
        return Timeline(rows=tuple(rows), num_ranks=len(self.schedule.ranks))


def simulate(
    schedule: Schedule, costs: StepCosts, rows: RowCounts, *, link: Link | None = None
) -> Simulation:
    """Run a schedule of compute actions in predicted time.

    Every action starts as soon as the one before it on its rank has ended and its inputs have
    arrived. Transfers overlap with compute.

    Args:
        schedule: Compute actions, not lowered.
        costs: Durations and bytes.
        rows: Rows per microbatch and segment.
        link: Transfer times; None for none.

    Raises:
        ScheduleError: If the lists wait for each other, or the costs do not fit the schedule.
    """
    from lightning_entrain.schedule import replay

    shape = schedule.placement.num_stages, rows.num_microbatches
    if costs.forward_ms.shape != shape:
        raise ScheduleError(f"Costs of shape {costs.forward_ms.shape}", limit=f"{shape}")
    offsets, stage, kind, microbatch, target = encode(schedule)
    share = _shares(rows, costs, stage, microbatch, target, schedule.placement)
    tables = np.stack(
        [
            costs.forward_ms,
            costs.input_ms + costs.weight_ms,
            costs.input_ms,
            costs.weight_ms,
        ]
    )
    duration = tables[kind, stage, microbatch] * share + costs.overhead_ms
    has_segment = _segment_table(rows)
    forward_ms, backward_ms = _transfer_tables(schedule.placement, rows, has_segment, link)
    start, end = np.zeros(len(stage)), np.zeros(len(stage))
    rank_of = np.array(schedule.placement.stage_to_rank, dtype=np.int64)
    num_done = replay.replay(
        offsets,
        stage,
        kind,
        microbatch,
        target,
        duration,
        schedule.placement.num_encoder_stages,
        rank_of,
        has_segment,
        forward_ms,
        backward_ms,
        start,
        end,
    )
    if num_done < len(stage):
        raise ScheduleError(
            f"Schedule {schedule.name} stops after {num_done} of {len(stage)} actions",
            limit="ranks never wait for each other in a circle",
        )
    peak_live = np.zeros(shape[0], dtype=np.int64)
    peak_bytes = np.zeros(len(schedule.ranks))
    replay.peaks(
        offsets,
        stage,
        kind,
        microbatch,
        target,
        share,
        costs.activation_bytes,
        shape[0] if schedule.forward_only else schedule.placement.first_backward,
        peak_live,
        peak_bytes,
    )
    bounds = itertools.pairwise(offsets.tolist())
    return Simulation(
        schedule=schedule,
        iteration_ms=float(end.max()) if len(end) else 0.0,
        busy_ms=tuple(float(duration[low:high].sum()) for low, high in bounds),
        peak_live=tuple(peak_live.tolist()),
        peak_bytes=tuple(peak_bytes.tolist()),
        _start=start,
        _end=end,
    )


def encode(schedule: Schedule) -> tuple[NDArray[np.int64], ...]:
    """Rank offsets, and per action its stage, kind, microbatch and target (-1: whole)."""
    flat = [action for own in schedule.ranks for action in own]
    try:
        codes = [
            (a.stage, _CODES[a.kind], a.microbatch, -1 if a.target is None else a.target)
            for a in flat
        ]
    except KeyError as error:
        raise ScheduleError(
            f"The schedule holds transfers ({error.args[0].value})",
            remedy="simulate a schedule before it is lowered",
        ) from error
    table = np.array(codes, dtype=np.int64).reshape(-1, 4).T.copy()
    offsets = np.cumsum([0, *map(len, schedule.ranks)], dtype=np.int64)
    return offsets, table[0], table[1], table[2], table[3]


def _segment_table(rows: RowCounts) -> NDArray[np.bool_]:
    table = np.zeros((rows.num_microbatches, rows.max_lag + 1), dtype=np.bool_)
    for k, j in rows.segments:
        table[k, j - k] = True
    return table


def segment_shares(rows: RowCounts, costs: StepCosts) -> dict[Segment, float]:
    """Part of its encoder microbatch's work that each segment makes; they sum to 1."""
    weights: Mapping[Segment, float] = costs.segment_shares or rows.segment_patches or rows.segments
    totals: dict[int, float] = {}
    for segment in rows.segments:
        totals[segment[0]] = totals.get(segment[0], 0.0) + weights[segment]
    return {s: weights[s] / totals[s[0]] if totals[s[0]] else 0.0 for s in rows.segments}


def _shares(
    rows: RowCounts,
    costs: StepCosts,
    stage: NDArray[np.int64],
    microbatch: NDArray[np.int64],
    target: NDArray[np.int64],
    placement: Placement,
) -> Floats:
    """Part of its microbatch's work that each action does."""
    share = np.ones(len(stage))
    partial = np.flatnonzero((target >= 0) & (stage < placement.num_encoder_stages))
    if len(partial):
        parts = segment_shares(rows, costs)
        for index in partial:
            share[index] = parts[int(microbatch[index]), int(target[index])]
    return share


def _transfer_tables(
    placement: Placement,
    rows: RowCounts,
    has_segment: NDArray[np.bool_],
    link: Link | None,
) -> tuple[Floats, Floats]:
    """Transfer time of outputs and of gradients, ``[stages, microbatches, lags + 1]`` each."""
    num_lags = has_segment.shape[1]
    shape = placement.num_stages, rows.num_microbatches, num_lags + 1
    forward, backward = np.zeros(shape), np.zeros(shape)
    if link is None:
        return forward, backward
    boundary = placement.num_encoder_stages - 1
    for s in range(placement.num_stages - 1):
        counts = rows.encoder if s < boundary else rows.llm
        if s != boundary:
            for m, num_rows in enumerate(counts):
                forward[s, m, -1] = backward[s + 1, m, -1] = link.transfer_ms(num_rows, s)
        for (k, j), num_rows in rows.segments.items():
            if s == boundary:
                forward[s, k, j - k] = backward[s + 1, k, j - k] = link.transfer_ms(num_rows, s)
            elif s < boundary and (k, j) in rows.segment_patches:
                patches = rows.segment_patches[k, j]
                backward[s + 1, k, j - k] = link.transfer_ms(patches, s)
    backward[: placement.first_backward + 1] = 0.0
    return forward, backward
