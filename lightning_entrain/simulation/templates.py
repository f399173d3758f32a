"""The order of a plan's actions, found once per plan, number of microbatches and memory."""

from __future__ import annotations

import logging
import math
from functools import lru_cache

from lightning_entrain.errors import ScheduleError
from lightning_entrain.schedule.simulate import Link
from lightning_entrain.schedule.template import Template, find_template
from lightning_entrain.schedule.types import Placement
from lightning_entrain.simulation.inputs import GlobalBatch, Machine
from lightning_entrain.simulation.stage_plan import StagePlan

_log = logging.getLogger(__name__)
Numbers = tuple[float, ...]


def plan_template(
    plan: StagePlan,
    machine: Machine,
    batch: GlobalBatch,
    *,
    num_microbatches: int,
    caps: Numbers,
    ramp: bool,
    num_steps: int,
) -> Template | None:
    """Search for a template, or recall it.

    Args:
        plan: The layout.
        machine: For overhead and links.
        batch: A typical one, for the rows that are sent.
        num_microbatches: K.
        caps: Memory of each rank in mean microbatches.
        ramp: Whether microbatches may differ.
        num_steps: Orders to try; 0 for no template.

    Returns:
        None if none is wanted, or none fits the memory.
    """
    if not num_steps:
        return None
    placement = plan.placement
    scale = machine.num_microbatches / num_microbatches
    modules = [plan.module_ms[s >= placement.num_encoder_stages] for s in _stages(placement)]
    stage_ms = tuple(
        tuple(
            plan.shares[s] * float(plan.phases[s, kind]) * modules[s] * scale
            for s in _stages(placement)
        )
        for kind in range(3)
    )
    overhead_ms = machine.overhead * math.fsum(stage_ms[0]) / placement.num_stages
    transfer_ms = None
    if machine.link is not None:
        parts = machine.num_replicas * num_microbatches
        transfer_ms = _transfers(placement, machine.link, batch, parts)
    return _found(
        placement,
        stage_ms,
        num_microbatches,
        tuple(max(cap, 0.0) for cap in caps),
        overhead_ms,
        transfer_ms,
        ramp,
        num_steps,
        machine.seed,
    )


@lru_cache(maxsize=64)
def _found(
    placement: Placement,
    stage_ms: tuple[Numbers, ...],
    num_microbatches: int,
    caps: Numbers,
    overhead_ms: float,
    transfer_ms: Numbers | None,
    ramp: bool,
    num_steps: int,
    seed: int,
) -> Template | None:
    def report(part: float) -> None:
        _log.info("order of %d microbatches: %.0f %% of the search", num_microbatches, 100 * part)

    try:
        return find_template(
            placement,
            stage_ms,
            num_microbatches,
            max_live=caps,
            overhead_ms=overhead_ms,
            transfer_ms=transfer_ms,
            ramp=ramp,
            num_steps=num_steps,
            seed=seed,
            progress=report,
        )
    except ScheduleError:
        return None


def _stages(placement: Placement) -> range:
    return range(placement.num_stages)


def _transfers(placement: Placement, link: Link, batch: GlobalBatch, num_parts: int) -> Numbers:
    """Time of a mean microbatch's message from each stage to the next."""
    table = batch.table
    vision = int(table.num_vision_tokens.sum())
    boundary = placement.num_encoder_stages - 1
    rows = [int(table.num_patches.sum())] * boundary + [vision]
    rows += [vision + int(table.num_text_tokens.sum())] * (placement.num_llm_stages - 1)
    return tuple(link.transfer_ms(round(n / num_parts), s) for s, n in enumerate(rows))
