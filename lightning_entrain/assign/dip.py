"""Policy ``dip``: DIP-style, as the Entrain paper runs it (section 6, arXiv 2605.27918).

Microbatches stay in sampler order. Inside each, the samples with images are shared out to a few
sub-microbatches of even encoder load, which the encoder runs one after the other before the LLM
runs the whole microbatch. Encoder and LLM stages are meant to share all ranks.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_entrain.assign.fixed import assign_fixed
from lightning_entrain.assign.problem import Problem, place
from lightning_entrain.assign.types import ReplicaAssignment
from lightning_entrain.errors import ConfigError


def assign_dip(problem: Problem, *, num_groups: int = 2) -> tuple[ReplicaAssignment, ...]:
    """Sampler order, with sub-microbatches in ``groups``.

    Args:
        problem: The global batch.
        num_groups: Sub-microbatches per microbatch; fewer where it has fewer samples with images.

    Raises:
        ConfigError: If ``num_groups`` is below 1.
    """
    if num_groups < 1:
        raise ConfigError(f"num_groups is {num_groups}", limit="at least 1")
    fixed = assign_fixed(
        [cost > 0 for cost in problem.encoder_cost],
        num_replicas=problem.num_replicas,
        num_microbatches=problem.num_microbatches,
    )
    return tuple(
        replace(
            replica,
            groups=tuple(_groups(problem, entry, num_groups) for entry in replica.encoder),
        )
        for replica in fixed.replicas
    )


def _groups(
    problem: Problem, entry: tuple[int, ...], num_groups: int
) -> tuple[tuple[int, ...], ...]:
    count = min(num_groups, len(entry))
    if count == 0:
        return ()
    units = problem.encoder_units
    bins: list[list[int]] = [[] for _ in range(count)]
    heaviest_first = sorted(entry, key=lambda i: (-units[i], i))
    place(problem, heaviest_first, units, bins, [0] * count, [0] * count)
    return tuple(tuple(sorted(group)) for group in bins)
