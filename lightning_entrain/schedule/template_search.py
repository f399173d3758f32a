"""A plan in the units of the kernels that search for its template."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_entrain.errors import ScheduleError
from lightning_entrain.schedule.list_schedule import climb_lists
from lightning_entrain.schedule.tables import TIME_UNITS, MaxBytes, per_rank
from lightning_entrain.schedule.types import Placement
from lightning_entrain.schedule.zero_bubble import Knobs

Ints = NDArray[np.int64]
MEAN_LOAD = 1024
"""The mean load of a microbatch."""
NUM_STARTS = 8
"""Orders that :meth:`TemplateSearch.starts` yields."""
_ROOM = 0.97
"""Part of the memory that a template uses: a step's microbatches are not all alike."""


@dataclass
class SearchState:
    """One of the orders under search."""

    offsets: Ints
    profile: Ints
    codes: Ints
    makespan: int = 0


class TemplateSearch:
    """A plan in the kernels' units."""

    def __init__(
        self,
        placement: Placement,
        stage_ms: Sequence[Sequence[float]],
        max_live: MaxBytes,
        overhead_ms: float,
        transfer_ms: Sequence[float] | None,
    ) -> None:
        from lightning_entrain.schedule import template_kernel

        self.kernel = template_kernel
        self.stuck = template_kernel.STUCK
        self.placement = placement
        num_stages, num_ranks = placement.num_stages, placement.num_ranks
        times = [list(map(float, own)) for own in stage_ms]
        if [len(own) for own in times] != [num_stages] * 3:
            raise ScheduleError(
                f"stage_ms has {[len(own) for own in times]} entries",
                limit=f"F, I and W of {num_stages} stages",
            )
        first = placement.first_backward
        scale = 16 * TIME_UNITS / MEAN_LOAD / max(math.fsum(times[0]) / num_stages, 1e-300)
        self.base = np.zeros((7, num_stages), dtype=np.int64)
        for kind in range(3):
            self.base[kind] = [round(ms * scale) for ms in times[kind]]
        delays = [0.0] * (num_stages - 1) if transfer_ms is None else list(transfer_ms)
        for s, ms in enumerate(delays):
            if placement.stage_to_rank[s] != placement.stage_to_rank[s + 1]:
                self.base[3, s] = self.base[4, s + 1] = round(ms * scale)
        for rank in range(num_ranks):
            own = placement.stages_of(rank)
            whole = math.fsum(times[0][s] for s in own) or 1.0
            self.base[5:, own] = [round(MEAN_LOAD * times[0][s] / whole) for s in own]
        self.base[1:3, :first] = self.base[5:, :first] = 0
        self.base[4, : first + 1] = 0
        self.overhead = round(overhead_ms * scale * MEAN_LOAD)
        caps = per_rank(math.inf if max_live is None else max_live, num_ranks)
        self.caps = np.array(
            [int(min(_ROOM * cap * MEAN_LOAD * MEAN_LOAD, 1 << 59)) for cap in caps],
            dtype=np.int64,
        )
        self.limits = np.array([MEAN_LOAD, MEAN_LOAD], dtype=np.int64)
        self.rank_of = np.array(placement.stage_to_rank, dtype=np.int64)
        width = max(len(placement.stages_of(rank)) for rank in range(num_ranks))
        self.own = np.full((num_ranks, width), -1, dtype=np.int64)
        for rank in range(num_ranks):
            self.own[rank, : len(placement.stages_of(rank))] = placement.stages_of(rank)
        self.period = self.bottleneck(1)

    def bottleneck(self, num_microbatches: int) -> int:
        """Work of the busiest rank."""
        each = self.base[:3] * MEAN_LOAD + self.overhead * (self.base[:3] > 0)
        per_stage = each.sum(axis=0).tolist()
        return num_microbatches * max(
            sum(per_stage[s] for s in self.placement.stages_of(rank))
            for rank in range(self.placement.num_ranks)
        )

    def no_codes(self, num_microbatches: int) -> Ints:
        """Empty lists of all ranks."""
        shape = self.placement.num_ranks, 3 * self.placement.num_stages * num_microbatches
        return np.full(shape, -1, dtype=np.int64)

    def starts(self) -> Iterator[Ints]:
        """One wave of F to the last stage, and one of I back; slower waves hold more memory."""
        forward, backward = (self.base[kind] * MEAN_LOAD + self.overhead for kind in (0, 1))
        for index in range(NUM_STARTS):
            slow = 4 + 2 * (index % 4)  # in quarters
            offsets = np.zeros((3, self.placement.num_stages), dtype=np.int64)
            clock = 0
            for s in range(self.placement.num_stages):
                offsets[0, s] = clock
                clock += int(forward[s]) * slow // 4
            for s in range(self.placement.num_stages - 1, -1, -1):
                offsets[1, s] = clock
                clock += int(backward[s])
                offsets[2, s] = clock
            yield offsets

    @property
    def is_ascending(self) -> bool:
        """Whether the stages of each rank follow each other."""
        return tuple(sorted(self.placement.stage_to_rank)) == self.placement.stage_to_rank

    def zero_bubble(self, state: SearchState, *, num_steps: int, seed: int) -> None:
        """Start from a zero-bubble order, tuned as if a rank were a stage."""
        from lightning_entrain.schedule import ramp_kernel, zb_kernel

        num_ranks, num = self.placement.num_ranks, len(state.profile)
        groups = [self.placement.stages_of(rank) for rank in range(num_ranks)]
        merged = np.zeros((7, num_ranks), dtype=np.int64)
        for rank, own in enumerate(groups):
            merged[:, rank] = self.base[:, own].sum(axis=1)
        total = merged[:3].sum(axis=1)
        knobs = Knobs.zb_h1(num_ranks)
        warmup, delay = np.array(knobs.warmup), np.array(knobs.weight_delay)
        tables = np.zeros((7, num_ranks, num), dtype=np.int64)
        order = np.arange(num, dtype=np.int64)
        if self.limits[0] < self.limits[1]:
            permille = np.round(1000 * total[1:] / max(total[0], 1)).astype(np.int64)
            ramp_kernel.climb_profile(
                state.profile,
                merged[0],
                self.caps // MEAN_LOAD,
                self.overhead,
                permille,
                self.limits[0],
                self.limits[1],
                warmup,
                delay,
                num_steps,
                seed + 1,
            )
        self.kernel.spread(merged, self.overhead, state.profile, tables)
        zb_kernel.climb(order, tables, self.caps, warmup, delay, num_steps // 4, False, seed + 1)
        codes = np.zeros((num_ranks, 3 * num), dtype=np.int64)
        done = np.full((num_ranks, 3 * num), -1, dtype=np.int64)
        state.makespan = zb_kernel.evaluate(
            order, tables, self.caps, warmup, delay, codes, done, self.stuck - 1
        )
        if state.makespan == self.stuck:
            return
        for rank, own in enumerate(groups):
            listed = [
                (s * num + code // 3) * 3 + code % 3
                for code in done[rank].tolist()
                for s in (own if code % 3 == 0 else own[::-1])
            ]
            state.codes[rank, : len(listed)] = listed
        # A rank's stages have an overhead each, and do not wait for each other.
        self.polish(state, heat=0.0, num_steps=0, seed=seed)

    def list_schedule(self, state: SearchState, *, num_steps: int, seed: int) -> None:
        """Start from a list schedule."""
        num = len(state.profile)
        tables = np.zeros((7, self.placement.num_stages, num), dtype=np.int64)
        self.kernel.spread(self.base, self.overhead, state.profile, tables)
        order = np.arange(num, dtype=np.int64)
        state.makespan = climb_lists(
            self.placement,
            order,
            tables,
            tables,
            self.caps,
            state.codes,
            num_steps=num_steps,
            may_reorder=False,
            seed=seed,
        )[0]

    def anneal(self, state: SearchState, *, heat: float, num_steps: int, seed: int) -> None:
        """Search over when each kind of action is due; a change may be worse by ``heat``."""
        state.makespan = self.kernel.anneal_offsets(
            self.rank_of,
            self.own,
            self.base,
            self.overhead,
            self.caps,
            self.limits,
            self.period,
            state.offsets,
            state.profile,
            state.codes,
            int(heat * 16 * TIME_UNITS),
            num_steps,
            seed + 1,
        )

    def polish(self, state: SearchState, *, heat: float, num_steps: int, seed: int) -> None:
        """Search over single actions; without steps, find out what the lists really take."""
        state.makespan = self.kernel.anneal_lists(
            self.rank_of,
            self.base,
            self.overhead,
            self.caps,
            self.limits,
            state.profile,
            state.codes,
            int(heat * 16 * TIME_UNITS),
            num_steps,
            seed + 1,
        )
