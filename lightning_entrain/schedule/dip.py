"""DIP-style schedule, as the Entrain paper runs it (section 6, arXiv 2605.27918).

Encoder and LLM stages share the ranks. All encoder forwards come first, then the LLM under 1F1B,
then all encoder backwards; so the encoder's activations of the whole minibatch are held.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_entrain.assign.types import ReplicaAssignment
from lightning_entrain.schedule.graph import StepGraph
from lightning_entrain.schedule.one_f_one_b import build_1f1b, build_forward_only
from lightning_entrain.schedule.types import Action, ActionKind, Placement, RowCounts, Schedule


def expand_groups(replica: ReplicaAssignment) -> ReplicaAssignment:
    """Sub-microbatches as encoder microbatches of their own.

    The LLM microbatch that they belong to stands beside the last of them; the LLM entries beside
    the others are empty. Without groups the replica is returned unchanged.
    """
    if replica.groups is None:
        return replica
    encoder: list[tuple[int, ...]] = []
    llm: list[tuple[int, ...]] = []
    for groups, entry in zip(replica.groups, replica.llm, strict=True):
        parts = list(groups) or [()]
        encoder += [tuple(part) for part in parts]
        llm += [()] * (len(parts) - 1) + [entry]
    return ReplicaAssignment(encoder=tuple(encoder), llm=tuple(llm))


def build_dip(placement: Placement, rows: RowCounts) -> Schedule:
    """Three phases: encoder forward, LLM 1F1B, encoder backward.

    Args:
        placement: Usually :meth:`Placement.colocated`.
        rows: Rows per microbatch and segment.
    """
    num_encoder = placement.num_encoder_stages
    forward = build_forward_only(placement, rows).ranks
    llm_rows = RowCounts(encoder=(0,) * rows.num_microbatches, segments={}, llm=rows.llm)
    llm = build_1f1b(placement, llm_rows).ranks
    graph = StepGraph(placement, rows)
    ranks = []
    for rank in range(placement.num_ranks):
        first = [action for action in forward[rank] if action.stage < num_encoder]
        stages = [s for s in placement.stages_of(rank) if s < num_encoder]
        last = [
            Action(stage, ActionKind.B, k)
            for k in graph.encoder_microbatches
            for stage in reversed(stages)
            if graph.needs_backward(stage)
        ]
        ranks.append((*first, *llm[rank], *last))
    return replace(Schedule(name="dip", placement=placement, ranks=()), ranks=tuple(ranks))
