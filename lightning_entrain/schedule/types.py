"""Actions, placements and schedules: plain records with a text form that parses back."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from lightning_entrain.assign.types import ReplicaAssignment
from lightning_entrain.errors import ScheduleError
from lightning_entrain.workload.sizes import SampleSize

Segment = tuple[int, int]
"""(encoder microbatch k, LLM microbatch j): the samples of k that are decoded in j."""


class ActionKind(str, Enum):
    """What a rank does: compute (F, B, I, W) or post a transfer."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the standard name of the input gradient
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"

    @property
    def is_compute(self) -> bool:
        """True for F, B, I and W."""
        return self in _COMPUTE

    @property
    def is_send(self) -> bool:
        """True for SEND_F and SEND_B."""
        return self in (ActionKind.SEND_F, ActionKind.SEND_B)


_COMPUTE = frozenset({ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W})
_KIND_INDEX = {kind: index for index, kind in enumerate(ActionKind)}
_ACTION = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d+)(?:>(\d+))?")


@dataclass(frozen=True)
class Action:
    """One entry of a rank's list.

    Attributes:
        stage: The stage whose layers run, or whose tensor is sent or received: SEND_F names the
            producer's stage, RECV_F the consumer's; SEND_B the stage that made the gradient,
            RECV_B the stage that needs it.
        kind: What to do.
        microbatch: Encoder microbatch on encoder stages, LLM microbatch on LLM stages; at the
            boundary between the modules always the encoder microbatch.
        target: LLM microbatch of a segment ("2B3>4"); None stands for the whole microbatch.
            Transfers across the encoder-LLM boundary always have it.
    """

    stage: int
    kind: ActionKind
    microbatch: int
    target: int | None = None

    def __hash__(self) -> int:
        target = -1 if self.target is None else self.target
        return hash((self.stage, self.kind.value, self.microbatch, target))

    def __str__(self) -> str:
        tail = "" if self.target is None else f">{self.target}"
        return f"{self.stage}{self.kind.value}{self.microbatch}{tail}"

    @property
    def sort_key(self) -> tuple[int, int, int, int]:
        """Total order: stage, kind, microbatch, target (none first)."""
        target = -1 if self.target is None else self.target
        return self.stage, _KIND_INDEX[self.kind], self.microbatch, target

    def __lt__(self, other: Action) -> bool:
        return self.sort_key < other.sort_key

    @classmethod
    def parse(cls, text: str) -> Action:
        """Inverse of ``str(action)``.

        Raises:
            ScheduleError: If the text is not an action.
        """
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"{text!r} is not an action",
                limit="stage, kind, microbatch and an optional segment, such as 3F2 or 2B3>4",
            )
        stage, kind, microbatch, target = match.groups()
        return cls(
            int(stage), ActionKind(kind), int(microbatch), None if target is None else int(target)
        )


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which rank of a replica holds which stage.

    Attributes:
        num_encoder_stages: Stages of the encoder; they come first.
        num_llm_stages: Stages of the LLM.
        stage_to_rank: Per stage its rank inside the replica, 0 … num_ranks-1, none left out.
        first_backward: First stage that computes gradients. Nothing is trained before it, so the
            stages before it run forward alone and get no gradient messages.
    """

    num_encoder_stages: int
    num_llm_stages: int
    stage_to_rank: tuple[int, ...]
    first_backward: int = 0

    def __post_init__(self) -> None:
        if self.num_encoder_stages < 1 or self.num_llm_stages < 1:
            raise ScheduleError(
                f"{self.num_encoder_stages} encoder and {self.num_llm_stages} LLM stages",
                limit="at least one stage per module",
            )
        if len(self.stage_to_rank) != self.num_stages:
            raise ScheduleError(
                f"stage_to_rank has {len(self.stage_to_rank)} entries",
                limit=f"one per stage, {self.num_stages}",
            )
        found = set(self.stage_to_rank)
        if found != set(range(len(found))):
            raise ScheduleError(
                f"Stages lie on the ranks {sorted(found)}",
                limit="ranks are numbered from 0 and each holds at least one stage",
                remedy="use at most as many ranks as there are stages",
            )
        if not 0 <= self.first_backward < self.num_stages:
            raise ScheduleError(
                f"first_backward is {self.first_backward}",
                limit=f"a stage, 0 to {self.num_stages - 1}",
            )

    @property
    def num_stages(self) -> int:
        """Stages of both modules."""
        return self.num_encoder_stages + self.num_llm_stages

    @property
    def num_ranks(self) -> int:
        """Ranks of one replica."""
        return max(self.stage_to_rank) + 1

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages that a rank holds, ascending."""
        return tuple(s for s, holder in enumerate(self.stage_to_rank) if holder == rank)

    @classmethod
    def one_per_rank(cls, num_encoder_stages: int, num_llm_stages: int) -> Placement:
        """Stage s on rank s."""
        ranks = tuple(range(num_encoder_stages + num_llm_stages))
        return cls._of(num_encoder_stages, num_llm_stages, ranks)

    @classmethod
    def contiguous(cls, num_encoder_stages: int, num_llm_stages: int, num_ranks: int) -> Placement:
        """Neighbouring stages share a rank; the first and last stages lie far apart."""
        num_stages = num_encoder_stages + num_llm_stages
        ranks = tuple(s * num_ranks // num_stages for s in range(num_stages))
        return cls._of(num_encoder_stages, num_llm_stages, ranks)._holding(num_ranks)

    @classmethod
    def colocated(cls, num_encoder_stages: int, num_llm_stages: int, num_ranks: int) -> Placement:
        """Each module is spread over all ranks, as DIP does."""
        encoder = [e * num_ranks // num_encoder_stages for e in range(num_encoder_stages)]
        llm = [i * num_ranks // num_llm_stages for i in range(num_llm_stages)]
        return cls._of(num_encoder_stages, num_llm_stages, tuple(encoder + llm))._holding(num_ranks)

    @classmethod
    def shared_boundary(cls, num_encoder_stages: int, num_llm_stages: int) -> Placement:
        """One rank holds the encoder's last and the LLM's first stage."""
        encoder = list(range(num_encoder_stages))
        llm = list(range(num_encoder_stages - 1, num_encoder_stages - 1 + num_llm_stages))
        return cls._of(num_encoder_stages, num_llm_stages, tuple(encoder + llm))

    @classmethod
    def v_shaped(cls, num_encoder_stages: int, num_llm_stages: int) -> Placement:
        """Two stages per rank, down the ranks and back up: rank 0 holds the first and the last."""
        num_stages = num_encoder_stages + num_llm_stages
        if num_stages % 2:
            raise ScheduleError(
                f"A V needs an even number of stages, not {num_stages}",
                remedy="split the modules into two stages per rank",
            )
        ranks = tuple(min(s, num_stages - 1 - s) for s in range(num_stages))
        return cls._of(num_encoder_stages, num_llm_stages, ranks)

    def _holding(self, num_ranks: int) -> Placement:
        if self.num_ranks != num_ranks:
            raise ScheduleError(
                f"{num_ranks} ranks for {self.num_encoder_stages} encoder and "
                f"{self.num_llm_stages} LLM stages",
                limit="every rank holds a stage",
                remedy="use at most as many ranks as there are stages to spread over them",
            )
        return self

    @classmethod
    def _of(cls, encoder: int, llm: int, ranks: tuple[int, ...]) -> Placement:
        return cls(num_encoder_stages=encoder, num_llm_stages=llm, stage_to_rank=ranks)


@dataclass(frozen=True, kw_only=True)
class RowCounts:
    """Rows of every tensor of one replica's step; zero rows mean no action and no message.

    Attributes:
        encoder: Patches per encoder microbatch.
        segments: Merged vision tokens per segment (k, j); absent segments have none.
        llm: Tokens per LLM microbatch.
        segment_patches: Patches per segment. Only encoder microbatches with several segments
            need it (for backward by segment).
    """

    encoder: tuple[int, ...]
    segments: Mapping[Segment, int]
    llm: tuple[int, ...]
    segment_patches: Mapping[Segment, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.encoder) != len(self.llm):
            raise ScheduleError(
                f"{len(self.encoder)} encoder and {len(self.llm)} LLM microbatches",
                limit="both lists have equal length",
            )
        kept = {key: self.segments[key] for key in sorted(self.segments) if self.segments[key]}
        object.__setattr__(self, "segments", kept)
        for (k, j), num_rows in kept.items():
            if not (0 <= k <= j < len(self.llm)) or num_rows < 0:
                raise ScheduleError(
                    f"Segment {k}>{j} with {num_rows} rows among {len(self.llm)} microbatches",
                    limit="a segment runs to its own or a later microbatch and has positive rows",
                )
            if not self.llm[j] or not self.encoder[k]:
                raise ScheduleError(f"Segment {k}>{j} joins an empty microbatch")
        sources = {k for k, _ in kept}
        for k, num_rows in enumerate(self.encoder):
            if num_rows and k not in sources:
                raise ScheduleError(
                    f"Encoder microbatch {k} has {num_rows} patches but yields no vision token",
                    limit="every image yields at least one merged vision token",
                )

    @classmethod
    def even(cls, num_microbatches: int) -> RowCounts:
        """Alike microbatches of one row each, nothing deferred."""
        ones = (1,) * num_microbatches
        return cls(encoder=ones, segments={(k, k): 1 for k in range(num_microbatches)}, llm=ones)

    @property
    def num_microbatches(self) -> int:
        """Length of both lists, empty entries included."""
        return len(self.llm)

    @property
    def max_lag(self) -> int:
        """Largest j - k over the segments."""
        return max((j - k for k, j in self.segments), default=0)

    def patches_of(self, segment: Segment) -> int:
        """Patches of one segment.

        Raises:
            ScheduleError: If the microbatch has several segments and no patch counts.
        """
        if segment in self.segment_patches:
            return self.segment_patches[segment]
        k = segment[0]
        if sum(1 for source, _ in self.segments if source == k) == 1:
            return self.encoder[k]
        raise ScheduleError(
            f"The patches of segment {k}>{segment[1]} are unknown",
            remedy="give segment_patches for encoder microbatches with several segments",
        )


def row_counts(replica: ReplicaAssignment, sizes: Sequence[SampleSize]) -> RowCounts:
    """Rows of one replica's microbatches and segments.

    Args:
        replica: The replica's microbatches.
        sizes: Sizes by global-batch index.
    """
    segments = replica.segments()
    return RowCounts(
        encoder=_sums((sizes[i].num_patches for i in entry) for entry in replica.encoder),
        llm=_sums((sizes[i].num_tokens for i in entry) for entry in replica.llm),
        segments={s: sum(sizes[i].num_vision_tokens for i in own) for s, own in segments.items()},
        segment_patches={s: sum(sizes[i].num_patches for i in own) for s, own in segments.items()},
    )


def _sums(entries: Iterable[Iterable[int]]) -> tuple[int, ...]:
    return tuple(sum(entry) for entry in entries)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The action list of every rank of one replica.

    Attributes:
        name: The builder's name, such as "1f1b".
        placement: Which rank holds which stage.
        ranks: Per rank its actions in order: compute alone, or with transfers after lowering.
        forward_only: True where no gradients are computed.
    """

    name: str
    placement: Placement
    ranks: tuple[tuple[Action, ...], ...]
    forward_only: bool = False

    def to_text(self) -> str:
        """Lines of text: a header, then one line of actions per rank."""
        place = self.placement
        lines = [
            f"schedule {self.name}" + (" forward_only" if self.forward_only else ""),
            f"encoder_stages {place.num_encoder_stages}",
            f"llm_stages {place.num_llm_stages}",
            "stage_to_rank " + " ".join(map(str, place.stage_to_rank)),
        ]
        if place.first_backward:
            lines.append(f"first_backward {place.first_backward}")
        lines += [" ".join(["rank", f"{r}:", *map(str, own)]) for r, own in enumerate(self.ranks)]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Inverse of :meth:`to_text`.

        Raises:
            ScheduleError: If a line cannot be read.
        """
        header: dict[str, list[str]] = {}
        ranks: list[tuple[Action, ...]] = []
        for line in filter(None, map(str.strip, text.splitlines())):
            key, *words = line.split()
            if key == "rank":
                if words[:1] != [f"{len(ranks)}:"]:
                    raise ScheduleError(f"Found {line[:40]!r} where rank {len(ranks)} belongs")
                ranks.append(tuple(Action.parse(word) for word in words[1:]))
            else:
                header[key] = words
        try:
            placement = Placement(
                num_encoder_stages=int(header["encoder_stages"][0]),
                num_llm_stages=int(header["llm_stages"][0]),
                stage_to_rank=tuple(map(int, header["stage_to_rank"])),
                first_backward=int(header.get("first_backward", ["0"])[0]),
            )
            name, *flags = header["schedule"]
        except (KeyError, IndexError, ValueError) as error:
            raise ScheduleError(
                f"The schedule's header cannot be read ({error!r})",
                limit="lines schedule, encoder_stages, llm_stages and stage_to_rank",
            ) from error
        return cls(
            name=name,
            placement=placement,
            ranks=tuple(ranks),
            forward_only=flags == ["forward_only"],
        )

    def digest(self) -> str:
        """Hex digest of the text form; equal on every rank or the step must not run."""
        return hashlib.sha256(self.to_text().encode()).hexdigest()
