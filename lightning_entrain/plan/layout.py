"""Which layers each pipeline rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_entrain.errors import ConfigError
from lightning_entrain.plan.placements import check_placement, cut_layers
from lightning_entrain.schedule.types import Placement

LayerRange = tuple[int, int]
"""Layers [start, stop) of one module."""


@dataclass(frozen=True, kw_only=True)
class StageLayout:
    """The stages of one replica and how many replicas there are.

    Global rank = replica * num_ranks + rank inside the replica, so that a replica's pipeline stays
    within neighbouring ranks.

    Attributes:
        num_replicas: Data-parallel copies of the pipeline.
        encoder_ranges: Layers of each encoder stage.
        llm_ranges: Layers of each LLM stage.
        placement: The rank inside the replica that holds each stage.
    """

    num_replicas: int
    encoder_ranges: tuple[LayerRange, ...]
    llm_ranges: tuple[LayerRange, ...]
    placement: Placement

    @property
    def num_ranks(self) -> int:
        """Ranks of one replica."""
        return self.placement.num_ranks

    @property
    def world_size(self) -> int:
        """Ranks of all replicas."""
        return self.num_replicas * self.num_ranks

    @property
    def num_encoder_stages(self) -> int:
        """Stages that hold encoder layers."""
        return len(self.encoder_ranges)

    @property
    def num_stages(self) -> int:
        """Stages of one replica, encoder stages first."""
        return len(self.encoder_ranges) + len(self.llm_ranges)

    def split(self, global_rank: int) -> tuple[int, int]:
        """Replica and rank inside the replica of a global rank."""
        return divmod(global_rank, self.num_ranks)

    def ranges_of(self, rank: int) -> tuple[tuple[LayerRange, ...], tuple[LayerRange, ...]]:
        """Encoder and LLM layer ranges held by a rank of the replica."""
        encoder, llm = [], []
        for stage in self.placement.stages_of(rank):
            if stage < self.num_encoder_stages:
                encoder.append(self.encoder_ranges[stage])
            else:
                llm.append(self.llm_ranges[stage - self.num_encoder_stages])
        return tuple(encoder), tuple(llm)

    def describe(self) -> str:
        """One line for people."""
        encoder = ", ".join(f"{start}-{stop - 1}" for start, stop in self.encoder_ranges)
        llm = ", ".join(f"{start}-{stop - 1}" for start, stop in self.llm_ranges)
        return (
            f"{self.num_replicas} replica(s) x {self.num_ranks} rank(s): "
            f"encoder layers [{encoder}], LLM layers [{llm}]"
        )


@dataclass(frozen=True, kw_only=True)
class LayoutRequest:
    """What the user asked for; ``None`` means: choose.

    Attributes:
        world_size: Ranks of the whole job.
        replicas: Data-parallel copies.
        encoder_stages: Encoder stages per replica, or None.
        llm_stages: LLM stages per replica, or None.
        placement: How stages lie on ranks, a name in :data:`plan.placements.PLACEMENTS`.
    """

    world_size: int
    replicas: int = 1
    encoder_stages: int | None = None
    llm_stages: int | None = None
    placement: str = "one_per_rank"

    def check_values(self) -> None:
        """Check each number by itself.

        Raises:
            ConfigError: If one is not a whole number of at least 1.
        """
        for name in ("replicas", "encoder_stages", "llm_stages"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise ConfigError(f"{name} is {value!r}", limit="a whole number of at least 1")
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}", limit="at least 1")
        check_placement(self.placement)
        named = [name for name in ("encoder_stages", "llm_stages") if getattr(self, name)]
        if self.placement != "one_per_rank" and named:
            raise ConfigError(
                f"{named[0]}={getattr(self, named[0])} with placement={self.placement}",
                limit="this placement decides the stages",
                remedy=f"leave {named[0]} out, or the placement",
            )

    def ranks_per_replica(self) -> int:
        """Check that the numbers fit together; needs no model.

        Raises:
            ConfigError: If devices, replicas and stages do not fit.
        """
        self.check_values()
        ranks, rest = divmod(self.world_size, self.replicas)
        if rest or ranks == 0:
            raise ConfigError(
                f"{self.world_size} device(s) cannot hold {self.replicas} replicas",
                limit="devices = replicas x stages",
                remedy=f"set devices to a multiple of {self.replicas}, or replicas to a divisor of "
                f"{self.world_size}",
            )
        given = [n for n in (self.encoder_stages, self.llm_stages) if n is not None]
        if ranks > 1 and len(given) == 2 and sum(given) != ranks:
            raise ConfigError(
                f"{self.world_size} device(s) for {self.replicas} replica(s) x "
                f"({self.encoder_stages} encoder + {self.llm_stages} LLM) stages",
                limit=f"devices = replicas x stages = {self.replicas * sum(given)}",
                remedy=f"set devices={self.replicas * sum(given)}, or change encoder_stages, "
                "llm_stages or replicas",
            )
        if ranks > 1 and len(given) == 1 and given[0] >= ranks:
            name = "encoder_stages" if self.encoder_stages is not None else "llm_stages"
            raise ConfigError(
                f"{name}={given[0]} leaves no rank for the other module on {ranks} rank(s) per "
                "replica",
                limit=f"{name} at most {ranks - 1}",
                remedy=f"lower {name} or use more devices",
            )
        return ranks

    def check_depth(self, *, encoder_layers: int, llm_layers: int) -> None:
        """Check that the stages asked for fit the modules; needs no weights and no data.

        Args:
            encoder_layers: Layers of the encoder.
            llm_layers: Layers of the LLM.

        Raises:
            ConfigError: If a module has fewer layers than stages, or the numbers do not fit.
        """
        ranks = self.ranks_per_replica()
        if ranks > encoder_layers + llm_layers:
            raise ConfigError(
                f"{ranks} ranks per replica for a model of {encoder_layers} encoder and "
                f"{llm_layers} LLM layers",
                limit=f"at most {encoder_layers + llm_layers}, one layer per rank",
                remedy="lower devices, raise replicas or use a deeper model",
            )
        if self.placement != "one_per_rank" and ranks > 1:
            cut_layers(self.placement, ranks, [1.0] * encoder_layers, [1.0] * llm_layers)
        elif self.encoder_stages is not None or self.llm_stages is not None or ranks == 1:
            encoder, llm = self._stage_counts(ranks, 1.0, 1.0)
            _check_depth("encoder_stages", encoder, encoder_layers)
            _check_depth("llm_stages", llm, llm_layers)

    def resolve(
        self,
        *,
        encoder_layers: int,
        llm_layers: int,
        encoder_weight: float,
        llm_weight: float,
    ) -> StageLayout:
        """Choose the stages.

        Args:
            encoder_layers: Layers of the encoder.
            llm_layers: Layers of the LLM.
            encoder_weight: Encoder's share of the work, in any unit (here: parameters).
            llm_weight: The LLM's share in the same unit.

        Raises:
            ConfigError: If a module has fewer layers than stages, or the numbers do not fit.
        """
        ranks = self.ranks_per_replica()
        if self.placement != "one_per_rank" and ranks > 1:
            cut = cut_layers(
                self.placement,
                ranks,
                [encoder_weight / encoder_layers] * encoder_layers,
                [llm_weight / llm_layers] * llm_layers,
            )
            return StageLayout(
                num_replicas=self.replicas,
                encoder_ranges=cut.encoder_layers,
                llm_ranges=cut.llm_layers,
                placement=cut.placement,
            )
        encoder, llm = self._stage_counts(ranks, encoder_weight, llm_weight)
        _check_depth("encoder_stages", encoder, encoder_layers)
        _check_depth("llm_stages", llm, llm_layers)
        placement = (
            Placement.colocated(encoder, llm, 1)
            if ranks == 1
            else Placement.one_per_rank(encoder, llm)
        )
        return StageLayout(
            num_replicas=self.replicas,
            encoder_ranges=even_ranges(encoder_layers, encoder),
            llm_ranges=even_ranges(llm_layers, llm),
            placement=placement,
        )

    def _stage_counts(
        self, ranks: int, encoder_weight: float, llm_weight: float
    ) -> tuple[int, int]:
        if ranks == 1:
            return self.encoder_stages or 1, self.llm_stages or 1
        if self.encoder_stages is not None:
            return self.encoder_stages, ranks - self.encoder_stages
        if self.llm_stages is not None:
            return ranks - self.llm_stages, self.llm_stages
        share = encoder_weight / (encoder_weight + llm_weight)
        encoder = min(max(round(ranks * share), 1), ranks - 1)
        return encoder, ranks - encoder


def even_ranges(num_layers: int, num_stages: int) -> tuple[LayerRange, ...]:
    """Cut a row of layers into runs whose lengths differ by at most one, longer runs first."""
    base, extra = divmod(num_layers, num_stages)
    lengths = [base + (stage < extra) for stage in range(num_stages)]
    starts = [sum(lengths[:stage]) for stage in range(num_stages)]
    return tuple((start, start + length) for start, length in zip(starts, lengths, strict=True))


def _check_depth(name: str, stages: int, layers: int) -> None:
    if stages > layers:
        raise ConfigError(
            f"{name}={stages} for a module of {layers} layer(s)",
            limit=f"{name} at most {layers}, one layer per stage",
            remedy=f"lower {name} or use a deeper module",
        )
