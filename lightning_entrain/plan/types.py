"""The record of a parallel plan, to and from JSON."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from lightning_entrain.errors import ConfigError
from lightning_entrain.plan.partition import Stages
from lightning_entrain.schedule.types import Placement

PLAN_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class StagePrediction:
    """What is expected of one stage, per microbatch and per rank.

    Attributes:
        module: ``encoder`` or ``llm``.
        start: First layer.
        stop: Layer behind the last.
        forward_ms: Forward of one microbatch.
        backward_ms: Backward of one microbatch.
        state_gib: Weights, gradients, optimizer states.
        activation_gib: Kept for backward by all microbatches in flight.
        buffer_gib: Deferred features, boundary tensors, logits.
        in_flight: Microbatches whose activations are alive at most.
    """

    module: str
    start: int
    stop: int
    forward_ms: float
    backward_ms: float
    state_gib: float
    activation_gib: float
    buffer_gib: float
    in_flight: int

    @property
    def time_ms(self) -> float:
        """Forward and backward."""
        return self.forward_ms + self.backward_ms

    @property
    def memory_gib(self) -> float:
        """All of it."""
        return self.state_gib + self.activation_gib + self.buffer_gib


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """The static configuration of a run (Entrain, section 4.3).

    Attributes:
        dp: Data-parallel replicas.
        encoder_layers: Layers ``(start, stop)`` of each encoder stage.
        llm_layers: The same for the LLM.
        stage_to_rank: The rank of a replica that holds each stage, encoder stages first; None: a
            rank for each stage.
        encoder_tp: Tensor-parallel ranks per encoder stage.
        llm_tp: Tensor-parallel ranks per LLM stage.
        encoder_cp: Context-parallel ranks per encoder stage.
        llm_cp: Context-parallel ranks per LLM stage.
        num_microbatches: K, microbatches per replica and step.
        global_batch_size: Samples per optimizer step.
        b_min: Smallest stable profiling batch, if it was determined.
        proportions: Share of the work per module.
        trials: GPU splits ``"encoder:llm"`` seen per profiling batch size.
        stages: Predictions per stage, encoder stages first.
        iteration_ms: Predicted time of a step.
        tokens_per_s: Predicted LLM tokens per second over all replicas.
        evaluated_ms: Time of a step according to the ``evaluate`` function, if one was given.
        limited_by: What bounds the speed, for people.
        not_runnable: Fields the runtime cannot carry out yet.
        model: Name of the model.
        data: Name of the data.
        cluster: Name of the cluster.
        cost_model: Name of the cost model.
    """

    dp: int
    encoder_layers: Stages
    llm_layers: Stages
    stage_to_rank: tuple[int, ...] | None = None
    encoder_tp: int = 1
    llm_tp: int = 1
    encoder_cp: int = 1
    llm_cp: int = 1
    num_microbatches: int
    global_batch_size: int
    b_min: int | None = None
    proportions: Mapping[str, float] = field(default_factory=dict)
    trials: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    stages: tuple[StagePrediction, ...] = ()
    iteration_ms: float = math.nan
    tokens_per_s: float = math.nan
    evaluated_ms: float | None = None
    limited_by: str = ""
    not_runnable: tuple[str, ...] = ()
    model: str = ""
    data: str = ""
    cluster: str = ""
    cost_model: str = ""

    def __post_init__(self) -> None:
        for name in ("dp", "encoder_tp", "llm_tp", "encoder_cp", "llm_cp", "num_microbatches"):
            _whole(f"plan.{name}", getattr(self, name))
        _whole("plan.global_batch_size", self.global_batch_size)
        _check_layers("plan.encoder_layers", self.encoder_layers)
        _check_layers("plan.llm_layers", self.llm_layers)
        self._check_ranks()
        if self.global_batch_size % self.dp:
            raise ConfigError(
                f"plan.global_batch_size is {self.global_batch_size} with plan.dp {self.dp}",
                limit="a multiple of dp",
            )

    def _check_ranks(self) -> None:
        ranks = self.stage_to_rank
        if ranks is None:
            return
        num_stages = self.encoder_stages + self.llm_stages
        whole = all(isinstance(rank, int) and not isinstance(rank, bool) for rank in ranks)
        if not whole or len(ranks) != num_stages or set(ranks) != set(range(len(set(ranks)))):
            raise ConfigError(
                f"plan.stage_to_rank is {list(ranks)}",
                limit=f"a rank for each of {num_stages} stages, numbered from 0, none left out",
            )
        sizes = {self.encoder_tp, self.llm_tp, self.encoder_cp, self.llm_cp}
        if sizes != {1}:
            raise ConfigError(
                "plan.stage_to_rank with tensor or context parallelism",
                limit="one GPU per rank where ranks hold several stages",
            )

    @property
    def placement(self) -> Placement:
        """Which rank of a replica holds which stage."""
        if self.stage_to_rank is None:
            return Placement.one_per_rank(self.encoder_stages, self.llm_stages)
        return Placement(
            num_encoder_stages=self.encoder_stages,
            num_llm_stages=self.llm_stages,
            stage_to_rank=self.stage_to_rank,
        )

    @property
    def encoder_stages(self) -> int:
        """Encoder stages per replica."""
        return len(self.encoder_layers)

    @property
    def llm_stages(self) -> int:
        """LLM stages per replica."""
        return len(self.llm_layers)

    @property
    def encoder_gpus(self) -> int:
        """GPUs of the encoder in one replica."""
        return self.encoder_stages * self.encoder_tp * self.encoder_cp

    @property
    def llm_gpus(self) -> int:
        """GPUs of the LLM in one replica."""
        return self.llm_stages * self.llm_tp * self.llm_cp

    @property
    def gpus_per_replica(self) -> int:
        """GPUs of one replica."""
        if self.stage_to_rank is not None:
            return self.placement.num_ranks
        return self.encoder_gpus + self.llm_gpus

    @property
    def num_gpus(self) -> int:
        """GPUs of all replicas."""
        return self.dp * self.gpus_per_replica

    @property
    def microbatch_size(self) -> float:
        """Samples per microbatch on average."""
        return self.global_batch_size / self.dp / self.num_microbatches

    def check_layers(self, *, encoder_layers: int, llm_layers: int) -> None:
        """Check that the plan was made for a model of that many layers.

        Raises:
            ConfigError: If it was not; names the field.
        """
        for name, layers, held in (
            ("encoder", self.encoder_layers, encoder_layers),
            ("llm", self.llm_layers, llm_layers),
        ):
            if layers[-1][1] != held:
                raise ConfigError(
                    f"plan.{name}_layers ends at layer {layers[-1][1]}",
                    limit=f"the model's {name} has {held} layers",
                    remedy="plan for the model that is trained",
                )

    def check_devices(self, num_devices: int) -> None:
        """Check that the plan was made for that many devices.

        Raises:
            ConfigError: If it was not.
        """
        if self.num_gpus != num_devices:
            raise ConfigError(
                f"The plan is for {self.num_gpus} devices ({self.dp} replicas x "
                f"{self.gpus_per_replica})",
                limit=f"this job has {num_devices}",
                remedy=f"set devices={self.num_gpus}, or plan for {num_devices}",
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; derived numbers are included for readers."""
        record = asdict(self)
        record["version"] = PLAN_VERSION
        record["encoder_stages"] = self.encoder_stages
        record["llm_stages"] = self.llm_stages
        record["encoder_layers_per_stage"] = [b - a for a, b in self.encoder_layers]
        record["llm_layers_per_stage"] = [b - a for a, b in self.llm_layers]
        record["num_gpus"] = self.num_gpus
        record["trials"] = {str(size): list(splits) for size, splits in self.trials.items()}
        record["proportions"] = dict(self.proportions)
        record["digest"] = self.digest()
        return _without_nan(record)

    def to_json(self) -> str:
        """The record as text."""
        text = json.dumps(self.to_dict(), indent=2)
        # Pairs and short lists on one line each: plans are read by people too.
        return re.sub(r"\[[^\[\]{}]*\]", lambda m: " ".join(m.group().split()), text) + "\n"

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> ParallelPlan:
        """Inverse of :meth:`to_dict`.

        Raises:
            ConfigError: If a key is missing, unknown, of the wrong kind or out of range.
        """
        if not isinstance(record, Mapping):
            raise ConfigError(f"The plan is a {type(record).__name__}", limit="a mapping of keys")
        version = record.get("version", PLAN_VERSION)
        if version != PLAN_VERSION:
            raise ConfigError(
                f"plan.version is {version!r}",
                limit=f"version {PLAN_VERSION}",
                remedy="make the plan again with this version's entrain-plan",
            )
        known = {item.name for item in fields(cls)}
        unknown = sorted(set(record) - known - _DERIVED)
        if unknown:
            raise ConfigError(f"The plan has an unknown key {unknown[0]!r}")
        values = {name: record[name] for name in known if name in record}
        for name in ("dp", "encoder_layers", "llm_layers", "num_microbatches", "global_batch_size"):
            if name not in values:
                raise ConfigError(f"The plan has no {name}", remedy="make it with entrain-plan")
        for name in ("encoder_layers", "llm_layers"):
            values[name] = _stages(f"plan.{name}", values[name])
        if values.get("stage_to_rank") is not None:
            values["stage_to_rank"] = _ranks(values["stage_to_rank"])
        values["stages"] = tuple(_prediction(item) for item in values.get("stages", ()))
        trials = values.get("trials", {})
        try:
            values["trials"] = {int(size): tuple(splits) for size, splits in trials.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"plan.trials is {trials!r}", limit="a list of splits per batch size"
            ) from error
        values["not_runnable"] = tuple(values.get("not_runnable", ()))
        for name in ("iteration_ms", "tokens_per_s"):
            if values.get(name, 0.0) is None:
                values[name] = math.nan
        plan = cls(**values)
        if record.get("digest", plan.digest()) != plan.digest():
            raise ConfigError(
                "The plan's digest does not fit its content",
                remedy="remove the digest if the plan was edited by hand",
            )
        return plan

    @classmethod
    def from_json(cls, text: str) -> ParallelPlan:
        """Inverse of :meth:`to_json`; see :meth:`from_dict`."""
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"The plan is not JSON: {error}") from error
        return cls.from_dict(record)

    def digest(self) -> str:
        """Hex digest of what ranks must agree on; predictions do not count."""
        names = ("dp", "encoder_tp", "llm_tp", "encoder_cp", "llm_cp", "num_microbatches")
        decided = {name: getattr(self, name) for name in (*names, "global_batch_size")}
        decided["encoder_layers"] = [list(item) for item in self.encoder_layers]
        decided["llm_layers"] = [list(item) for item in self.llm_layers]
        if self.stage_to_rank is not None:
            decided["stage_to_rank"] = list(self.stage_to_rank)
        text = json.dumps(decided, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


_DERIVED = frozenset(
    {
        "version",
        "encoder_stages",
        "llm_stages",
        "encoder_layers_per_stage",
        "llm_layers_per_stage",
        "num_gpus",
        "digest",
    }
)


@dataclass(frozen=True, kw_only=True)
class Supported:
    """What the runtime can carry out.

    Attributes:
        tp: Tensor-parallel sizes.
        cp: Context-parallel sizes.
        unequal_tp: Whether encoder and LLM may differ in tensor parallelism.
    """

    tp: tuple[int, ...] = (1,)
    cp: tuple[int, ...] = (1,)
    unequal_tp: bool = False

    def problems(self, plan: ParallelPlan) -> tuple[str, ...]:
        """Fields of a plan that cannot be carried out, as ``name=value``."""
        found = [
            f"{name}={getattr(plan, name)}"
            for name, known in (
                ("encoder_tp", self.tp),
                ("llm_tp", self.tp),
                ("encoder_cp", self.cp),
                ("llm_cp", self.cp),
            )
            if getattr(plan, name) not in known
        ]
        if plan.encoder_tp != plan.llm_tp and not self.unequal_tp and not found:
            found.append(f"llm_tp={plan.llm_tp} (encoder_tp={plan.encoder_tp})")
        return tuple(found)

    def require(self, plan: ParallelPlan) -> None:
        """Refuse a plan that cannot be carried out.

        Raises:
            ConfigError: Naming the first offending field.
        """
        problems = self.problems(plan)
        if problems:
            raise ConfigError(
                f"plan.{problems[0]} is not runnable yet",
                limit=f"tensor parallelism of {_or(self.tp)} and context parallelism of "
                f"{_or(self.cp)}" + ("" if self.unequal_tp else ", the same for encoder and LLM"),
                remedy="plan with entrain-plan runnable_only=true encoder_tp=null llm_tp=null",
            )


def _or(numbers: tuple[int, ...]) -> str:
    return " or ".join(map(str, numbers))


def _whole(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} is {value!r}", limit="a whole number of at least 1")
    if value < 1:
        raise ConfigError(f"{name} is {value}", limit="at least 1")


def _check_layers(name: str, stages: Stages) -> None:
    if not stages:
        raise ConfigError(f"{name} is empty", limit="at least one stage")
    position = 0
    for start, stop in stages:
        if start != position or stop <= start:
            raise ConfigError(
                f"{name} is {[list(item) for item in stages]}",
                limit="ranges that follow each other from 0, at least one layer each",
            )
        position = stop


def _stages(name: str, value: Any) -> Stages:
    try:
        return tuple((int(start), int(stop)) for start, stop in value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} is {value!r}", limit="a list of [start, stop]") from error


def _ranks(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"plan.stage_to_rank is {value!r}", limit="a list of ranks, or null")
    return tuple(value)


def _prediction(item: Any) -> StagePrediction:
    try:
        return StagePrediction(**item)
    except TypeError as error:
        raise ConfigError(f"plan.stages holds {item!r}", limit=str(error)) from error


def _without_nan(record: dict[str, Any]) -> dict[str, Any]:
    return {
        key: None if isinstance(value, float) and math.isnan(value) else value
        for key, value in record.items()
    }
