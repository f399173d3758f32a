"""What would help a run, in plain words and by how much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_BUSIEST = 1.15
_WORTH = 0.03


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What advice is drawn from; what is unknown stays at its default.

    Attributes:
        policy: Assignment policy of the run.
        num_microbatches: In use, per replica.
        num_stages: Of a replica's pipeline; 1 without one.
        bubble: Parts of all ranks' time: fill_drain, imbalance, communication.
        rank_names: What each rank holds.
        rank_busy_ms: Compute time of each rank in the step that was looked at.
        stage_drift: Per stage name, measured / predicted time, relative to the whole model.
        better_plan: Stages that suit the measured times better, in words.
        better_plan_gain: Part of the step that they would save.
        policy_ms: Simulated step time per policy, on the trained batches.
        policy_schedules: The schedule that each of them has, in words.
        own_ms: The same for the run as it was.
        cv: Spread of the loads by module.
        data_wait_share: Part of the time spent waiting for data.
        planning_share: Planning time over step time.
        batch_size_text: What is to say about the batch size.
        global_batch_size: Samples per step; 0 if unknown.
        num_replicas: Copies of the pipeline.
        num_train_samples: Samples of the training data; 0 if unknown.
        data_options: What users write before an option of the data module: ``data.`` under
            `entrain-train`, nothing in a program of their own.
    """

    policy: str = ""
    num_microbatches: int = 0
    num_stages: int = 1
    bubble: Mapping[str, float] = field(default_factory=dict)
    rank_names: Sequence[str] = ()
    rank_busy_ms: Sequence[float] = ()
    stage_drift: Mapping[str, float] = field(default_factory=dict)
    better_plan: str = ""
    better_plan_gain: float = 0.0
    policy_ms: Mapping[str, float] = field(default_factory=dict)
    policy_schedules: Mapping[str, str] = field(default_factory=dict)
    own_ms: float = 0.0
    cv: Mapping[str, float] = field(default_factory=dict)
    data_wait_share: float = 0.0
    planning_share: float = 0.0
    batch_size_text: str = ""
    global_batch_size: int = 0
    num_replicas: int = 1
    num_train_samples: int = 0
    data_options: str = ""


def advise(facts: RunFacts) -> list[str]:
    """Sentences, that with the most to gain first; one that says so where there is nothing."""
    found = [
        *_slow_rank(facts),
        *_policy(facts),
        *_fill_and_drain(facts),
        *_communication(facts),
        *_waiting(facts),
    ]
    found.sort(key=lambda entry: -entry[0])
    sentences = [text for _, text in found]
    if facts.batch_size_text:
        sentences.append(facts.batch_size_text)
    return sentences or ["Nothing stands out: no single change promises more than a few percent."]


Entry = tuple[float, str]


def _slow_rank(facts: RunFacts) -> list[Entry]:
    lost = facts.bubble.get("imbalance", 0.0)
    text, gain = "", lost
    busy = list(facts.rank_busy_ms)
    if len(busy) > 1 and sum(busy) > 0 and lost > _WORTH:
        mean = sum(busy) / len(busy)
        slowest = busy.index(max(busy))
        ratio = busy[slowest] / mean
        if ratio > _BUSIEST:
            name = facts.rank_names[slowest]
            text = (
                f"{name} is the bottleneck: it computes {ratio:.2f} times as long as the mean of "
                f"all ranks, and the others wait for it ({lost:.0%} of all ranks' time is lost to "
                "unequal work)."
            )
            for stage, factor in facts.stage_drift.items():
                if factor > 1.25 and name.endswith(stage):
                    text += (
                        f" It takes {factor:.2f} times as long as the cost model predicts: look "
                        "for what slows that rank down, such as another process on its device."
                    )
    if facts.better_plan and facts.better_plan_gain > _WORTH:
        gain = max(gain, facts.better_plan_gain)
        text += (
            f" By what was measured, {facts.better_plan} would save about "
            f"{facts.better_plan_gain:.0%} of a step."
        )
    text = text.strip()
    return [(gain, text[0].upper() + text[1:])] if text else []


def _policy(facts: RunFacts) -> list[Entry]:
    entries: list[Entry] = []
    others = {name: ms for name, ms in facts.policy_ms.items() if name != facts.policy and ms > 0}
    if others and facts.own_ms > 0:
        best = min(others, key=lambda name: others[name])
        gain = 1 - others[best] / facts.own_ms
        if gain > _WORTH:
            spread = ", ".join(f"{module} {cv:.0%}" for module, cv in facts.cv.items())
            schedule = facts.policy_schedules.get(best)
            under = f" under {schedule}" if schedule else ""
            entries.append(
                (
                    gain,
                    f"Assignment {best!r}{under} would shorten a step by about {gain:.0%} on these "
                    f"batches, by simulation (spread of the microbatches now: {spread}): set "
                    f"assignment={best}, or joint, which is never worse.",
                )
            )
    return entries


def _fill_and_drain(facts: RunFacts) -> list[Entry]:
    lost = facts.bubble.get("fill_drain", 0.0)
    if lost <= 0.15 or facts.num_stages < 2 or not facts.num_microbatches:
        return []
    doubled = 2 * facts.num_microbatches
    needed = doubled * facts.num_replicas
    change = f"{facts.data_options}num_microbatches={doubled}"
    if needed > facts.global_batch_size:
        if 0 < facts.num_train_samples < needed:
            return []
        change += f" with {facts.data_options}global_batch_size={needed} or more"
    return [
        (
            lost / 2,
            f"Filling and draining the pipeline takes {lost:.0%} of all ranks' time with "
            f"{facts.num_microbatches} microbatches on {facts.num_stages} stages. Twice as many "
            f"({change}) would about halve that.",
        )
    ]


def _communication(facts: RunFacts) -> list[Entry]:
    lost = facts.bubble.get("communication", 0.0)
    if lost <= 0.15:
        return []
    return [
        (
            lost / 2,
            f"Transfers and the work between actions take {lost:.0%} of all ranks' time. Fewer, "
            "larger microbatches send less often; ranks that exchange tensors should share a node, "
            "and no more ranks should run than there are cores or devices.",
        )
    ]


def _waiting(facts: RunFacts) -> list[Entry]:
    entries: list[Entry] = []
    if facts.data_wait_share > 0.1:
        entries.append(
            (
                facts.data_wait_share,
                f"Training waits for data {facts.data_wait_share:.0%} of the time: raise "
                f"{facts.data_options}num_workers.",
            )
        )
    elif facts.planning_share > 0.1:
        entries.append(
            (
                facts.planning_share / 2,
                f"Planning a step takes {facts.planning_share:.0%} as long as the step: with "
                f"{facts.data_options}num_workers of 1 or more it runs beside the training.",
            )
        )
    return entries
