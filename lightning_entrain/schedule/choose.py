"""The automatic choice: simulate every schedule that fits the memory, take the fastest."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_entrain.errors import ScheduleError
from lightning_entrain.schedule.limits import step_limits
from lightning_entrain.schedule.list_schedule import tune_list_schedule
from lightning_entrain.schedule.one_f_one_b import build_1f1b
from lightning_entrain.schedule.simulate import Link, Simulation, StepCosts, simulate
from lightning_entrain.schedule.tables import MaxBytes, per_rank
from lightning_entrain.schedule.template import Template, follow_template
from lightning_entrain.schedule.types import Placement, RowCounts, Schedule
from lightning_entrain.schedule.zero_bubble import Knobs, Tuned, tune_zero_bubble

FAMILIES = ("1f1b", "zero_bubble", "list")
"""What may be chosen from: "zero_bubble" and "list" split B into I and W."""

_MAX_EAGER = 4
_NEAR = 1.04
"""A template's run this near to what no schedule beats makes the search for lists superfluous."""
_TIE = 1 + 1e-6
"""A split B has to gain more than this: splitting costs what the simulation does not see."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The fastest schedule and what it was compared with.

    Attributes:
        name: The winner's name in ``iteration_ms``.
        tuned: Its schedule, and the order of microbatches it is for.
        simulation: Its predicted run.
        iteration_ms: Predicted time per candidate; None where it does not fit the memory, or was
            left out because its lower limit is above the fastest.
    """

    name: str
    tuned: Tuned
    simulation: Simulation
    iteration_ms: Mapping[str, float | None]


def choose_schedule(
    placement: Placement,
    rows: RowCounts,
    costs: StepCosts,
    *,
    max_bytes: MaxBytes = None,
    link: Link | None = None,
    families: Collection[str] = FAMILIES,
    profile: Sequence[float] | None = None,
    template: Template | None = None,
    may_reorder: bool = True,
    num_steps: int = 1000,
    seed: int = 0,
) -> Choice:
    """Simulate all candidates that fit into the memory; never worse than any of them.

    Candidates: a template; zero bubble as ZB-H1 and tuned, where each rank's stages are
    neighbours; list schedules where some rank has several stages, unless the template comes within
    4 % of the step's limit; 1F1B; with deferral also by segment; both with eager forward, one to
    four microbatches more on encoder stages where memory allows. 1F1B is not built where its
    least possible fill, work and drain already take longer than the fastest. Of equally fast
    candidates one with whole B is taken, for it holds fewer operands; one rank has nothing to gain
    from other schedules where 1F1B fits.

    Args:
        placement: Which rank holds which stages.
        rows: Rows per microbatch and segment.
        costs: Predicted times and bytes.
        max_bytes: Most activation bytes (in the costs' unit) a rank may hold: one number for
            all, one per rank, or None for no cap.
        link: Transfer times; None for none.
        families: Subset of :data:`FAMILIES`.
        profile: Relative load per microbatch that the samples were assigned to, if not even.
        template: Order of the plan; left out where the step has another number of microbatches.
        may_reorder: Whether tuning may change the microbatches' order (never with deferral).
        num_steps: Orders that tuning tries.
        seed: Of the search.

    Raises:
        ScheduleError: If no candidate fits; says the least memory that would do.
    """
    if unknown := set(families) - set(FAMILIES):
        raise ScheduleError(
            f"Schedule family {sorted(unknown)[0]!r}", limit=f"some of {', '.join(FAMILIES)}"
        )
    caps = per_rank(math.inf if max_bytes is None else max_bytes, placement.num_ranks)
    options = {"max_bytes": max_bytes, "link": link, "seed": seed, "may_reorder": may_reorder}
    best: tuple[str, Tuned, Simulation] | None = None
    times: dict[str, float | None] = {}
    least_of = _least_times(placement, rows, costs, template)
    for name, make in _candidates(
        placement, rows, costs, families, profile, template, num_steps, options
    ):
        if best is not None and best[2].iteration_ms * _TIE <= least_of(name):
            times[name] = None
            continue
        found = _tried(make, rows, costs, caps, link)
        times[name] = found[1].iteration_ms if found is not None else None
        if found is not None and (best is None or _is_better(name, found[1], best)):
            best = name, *found
    if best is None:
        least = _least_bytes(placement, rows, costs)
        raise ScheduleError(
            f"No schedule fits into {max_bytes} activation bytes per rank",
            limit=f"one microbatch at a time needs {least:g}",
            remedy="raise the memory budget, or use more, smaller microbatches",
        )
    return Choice(name=best[0], tuned=best[1], simulation=best[2], iteration_ms=times)


def _tried(
    make: Callable[[], Tuned],
    rows: RowCounts,
    costs: StepCosts,
    caps: Sequence[float],
    link: Link | None,
) -> tuple[Tuned, Simulation] | None:
    """A candidate and its run; None if it does not fit the memory."""
    try:
        tuned = make()
    except ScheduleError:
        return None
    found = simulate(
        tuned.schedule, tuned.reorder_costs(costs), tuned.reorder_rows(rows), link=link
    )
    fits = all(x <= cap * (1 + 1e-6) for x, cap in zip(found.peak_bytes, caps, strict=True))
    return (tuned, found) if fits else None


def _is_better(name: str, found: Simulation, best: tuple[str, Tuned, Simulation]) -> bool:
    """Whether it is faster, or whole where the best is split and no faster."""
    best_ms = best[2].iteration_ms
    if _is_whole(name) and not _is_whole(best[0]):
        return found.iteration_ms <= best_ms * _TIE
    return found.iteration_ms < best_ms


def _is_whole(name: str) -> bool:
    """Whether a candidate's B are not split into I and W."""
    return name.startswith("1f1b")


def _candidates(
    placement: Placement,
    rows: RowCounts,
    costs: StepCosts,
    families: Collection[str],
    profile: Sequence[float] | None,
    template: Template | None,
    num_steps: int,
    options: dict[str, Any],
) -> Iterator[tuple[str, Callable[[], Tuned]]]:
    """Names and makers, not yet run; those that may be left out come last."""
    whole: list[tuple[str, Callable[[], Tuned]]] = []
    if "1f1b" in families:
        limits = _live_limits(placement, costs, options["max_bytes"])
        for split in (False, True) if rows.max_lag else (False,):
            for extra in range(_MAX_EAGER + 1):
                name = "1f1b" + ("_split" if split else "") + (f"_eager{extra}" if extra else "")
                whole.append((name, partial(_one_f_one_b, placement, rows, extra, split, limits)))
    if placement.num_ranks == 1:
        yield from whole[:1]
    has_lists = placement.num_ranks < placement.num_stages
    family = "list" if has_lists else "zero_bubble"
    if template is not None and template.fits(placement, rows) and family in families:
        follow = partial(follow_template, template, rows, costs, **options)
        yield "template", partial(follow, num_steps=num_steps)
    ascending = tuple(sorted(placement.stage_to_rank)) == placement.stage_to_rank
    if "zero_bubble" in families and ascending:
        tune = partial(tune_zero_bubble, placement, rows, costs, **options)
        if template is None:  # which leaves little to find
            yield "zero_bubble_static", partial(tune, num_steps=0)
        yield "zero_bubble_tuned", partial(tune, num_steps=num_steps)
    if "list" in families and has_lists:
        tune = partial(tune_list_schedule, placement, rows, costs, **options)
        yield "list_tuned", partial(tune, profile=profile, num_steps=num_steps // 5)
    yield from whole if placement.num_ranks > 1 else whole[1:]


def _least_times(
    placement: Placement, rows: RowCounts, costs: StepCosts, template: Template | None
) -> Callable[[str], float]:
    """For a candidate's name the time at which others are fast enough to leave it out."""
    found: dict[bool, float] = {}

    def least(name: str) -> float:
        whole = _is_whole(name)
        if placement.num_ranks == 1 and name != "1f1b":
            return math.inf
        if not whole and (name != "list_tuned" or template is None):
            return 0.0
        if whole not in found:
            # By segment, the encoder may end with a part of a microbatch, however small.
            splits = not whole or rows.max_lag > 0
            limits = step_limits(placement, rows, costs, splits_gradients=splits)
            found[whole] = limits.bound_ms * (1.0 if whole else _NEAR)
        return found[whole]

    return least


def _live_limits(placement: Placement, costs: StepCosts, max_bytes: MaxBytes) -> tuple[float, ...]:
    """Per stage how many microbatches of the largest size its rank's memory holds."""
    if max_bytes is None:
        return (math.inf,) * placement.num_stages
    caps = per_rank(max_bytes, placement.num_ranks)
    largest = costs.activation_bytes.max(axis=1, initial=0.0).tolist()
    on_rank = [
        math.fsum(largest[s] for s in placement.stages_of(rank))
        for rank in range(placement.num_ranks)
    ]
    return tuple(
        caps[rank] * (1 + 1e-9) // on_rank[rank] if on_rank[rank] else math.inf
        for rank in placement.stage_to_rank
    )


def _one_f_one_b(
    placement: Placement, rows: RowCounts, extra: int, split: bool, limits: Sequence[float]
) -> Tuned:
    """1F1B; eager forward goes as far as memory allows, and never below the plain caps."""
    num_stages = placement.num_stages
    caps = [num_stages - s for s in range(num_stages)]
    for stage in range(placement.num_encoder_stages):
        caps[stage] = int(max(caps[stage], min(caps[stage] + extra, limits[stage])))
    schedule = build_1f1b(placement, rows, split_backward=split, caps=caps)
    return _as_tuned(schedule, rows.num_microbatches)


def _as_tuned(schedule: Schedule, num_microbatches: int) -> Tuned:
    stages = range(schedule.placement.num_stages)
    knobs = Knobs(
        warmup=tuple(len(stages) - s for s in stages), weight_delay=tuple(0 for _ in stages)
    )
    return Tuned(schedule=schedule, order=tuple(range(num_microbatches)), knobs=knobs)


def _least_bytes(placement: Placement, rows: RowCounts, costs: StepCosts) -> float:
    """Memory of the schedule that begins a microbatch only when it has to."""
    caps = [1 + rows.max_lag] * placement.num_encoder_stages + [1] * placement.num_llm_stages
    schedule = build_1f1b(placement, rows, split_backward=True, caps=caps)
    return max(simulate(schedule, costs, rows).peak_bytes, default=0.0)
