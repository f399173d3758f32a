"""Cutting a LightningModule's model into stages, and knowing what is where."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import lightning.pytorch as pl
from torch import Tensor, nn

from lightning_entrain.data.batch import DataNeeds
from lightning_entrain.errors import ConfigError
from lightning_entrain.models.entrain_model import EntrainModel
from lightning_entrain.models.protocol import PassThrough
from lightning_entrain.models.prune import owned_names, prune_to_stages
from lightning_entrain.plan.layout import StageLayout
from lightning_entrain.runtime.ties import TiedCopies, TieGroups, find_ties, tie_again
from lightning_entrain.runtime.trained import TrainedStages


def find_model(module: pl.LightningModule) -> EntrainModel:
    """The one EntrainModel of a LightningModule.

    Raises:
        ConfigError: If there is none, or more than one.
    """
    found = [name for name, part in module.named_modules() if isinstance(part, EntrainModel)]
    if len(found) != 1:
        raise ConfigError(
            f"{type(module).__name__} holds {len(found)} EntrainModels"
            + (f" ({', '.join(found)})" if found else ""),
            limit="exactly one, which the strategy cuts into stages",
            remedy="assign it in __init__ or configure_model: self.model = EntrainModel(...); "
            "modules without one run on one process (devices=1)",
        )
    model = module.get_submodule(found[0])
    assert isinstance(model, EntrainModel)
    return model


class ModelPartition:
    """A model, its layout, and which rank holds which tensor.

    Made from the whole model, before anything is pruned.
    """

    def __init__(
        self, model: EntrainModel, layout: StageLayout, module: pl.LightningModule | None
    ) -> None:
        self.model = model
        self.layout = layout
        self.module = module
        self._prefix = _prefix_of(model, module)
        self._owned = [owned_names(model, *layout.ranges_of(r)) for r in range(layout.num_ranks)]
        self.full_names: tuple[str, ...] = tuple(module.state_dict()) if module is not None else ()
        self._tied_names = model.tied_parameters()
        self.ties = find_ties(model, self._owned)
        self._foreign: dict[str, nn.Module] = {}
        self._was_pruned = False
        self._trained: TrainedStages | None = None
        self._parameter_counts = 0, 0

    @property
    def pruned(self) -> bool:
        """Whether foreign modules have been taken out; the layout is final then."""
        return self._was_pruned

    def check(self) -> None:
        """Check what the layout asks of the model.

        Raises:
            ConfigError: If the LightningModule trains parameters outside the model.
        """
        if self.module is not None and self.layout.world_size > 1:
            self._check_outside(self.module)

    def data_needs(self, global_rank: int) -> DataNeeds:
        """What a rank reads: pixels first, token ids at the LLM's first stage, labels last."""
        replica, rank = self.layout.split(global_rank)
        stages = self.layout.placement.stages_of(rank)
        return DataNeeds(
            pixels=0 in stages,
            input_ids=self.layout.num_encoder_stages in stages,
            labels=self.layout.num_stages - 1 in stages,
            replica=replica,
        )

    def trained_stages(self) -> TrainedStages:
        """Which stages go backward; fixed when the model is pruned."""
        return self._trained or TrainedStages.of(self.model, self.layout)

    def parameter_counts(self) -> tuple[int, int]:
        """All and trained parameters of the whole module, tied ones counted once."""
        if not self._was_pruned:
            self._count_parameters()
        return self._parameter_counts

    def _count_parameters(self) -> None:
        whole = self.model if self.module is None else self.module
        sizes = [(p.numel(), p.requires_grad) for p in whole.parameters()]
        trained = sum(size for size, requires_grad in sizes if requires_grad)
        self._parameter_counts = sum(size for size, _ in sizes), trained

    def prune(self, global_rank: int) -> None:
        """Keep this rank's stages; the rest is kept aside without memory."""
        self.parameter_counts()
        self._was_pruned = True
        self._trained = TrainedStages.of(self.model, self.layout)
        before = dict(self.model.named_modules())
        _, rank = self.layout.split(global_rank)
        prune_to_stages(self.model, *self.layout.ranges_of(rank))
        for name, part in self.model.named_modules():
            if isinstance(part, PassThrough):
                self._foreign[name] = before[name].to("meta")

    def restore_foreign_as_meta(self) -> None:
        """Put foreign modules back, without values, so that optimizers see the whole model.

        The names of the full state are read anew: hooks may have added to the module since.
        """
        for name, part in self._foreign.items():
            parent, _, leaf = name.rpartition(".")
            self.model.get_submodule(parent)._modules[leaf] = part
        if self._foreign:
            tie_again(self.model, self.ties)
        self._foreign.clear()
        if self.module is not None:
            self.full_names = tuple(self.module.state_dict())

    def own_flags(self, global_rank: int) -> dict[str, bool]:
        """Which parameters of a rank's stages are trained, by name."""
        _, rank = self.layout.split(global_rank)
        return {
            name: parameter.requires_grad
            for name, parameter in self.model.named_parameters()
            if name in self._owned[rank]
        }

    def set_flags(self, flags: Mapping[str, bool]) -> None:
        """Train what others train, too; to be called while foreign modules are back."""
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(flags.get(name, parameter.requires_grad))
        self._count_parameters()

    def own_state(
        self, state: Mapping[str, Tensor], global_rank: int, *, second_copies: bool = True
    ) -> dict[str, Tensor]:
        """The part of a rank's state dict that it contributes to a full one.

        Args:
            state: The rank's state dict.
            global_rank: The rank.
            second_copies: Whether tied parameters come under their second name, too;
                :meth:`add_second_copies` adds those names to a full state dict.
        """
        _, rank = self.layout.split(global_rank)
        mine = {self._prefix + name for name in self._owned[rank]}
        if not second_copies:
            mine -= {self._prefix + second for _, second in self._tied_names}
        others = {self._prefix + name for owned in self._owned for name in owned}
        return {
            name: value
            for name, value in state.items()
            if name in mine or (rank == 0 and name not in others)
        }

    def add_second_copies(self, state: dict[str, Tensor]) -> None:
        """Name tied parameters a second time, where their first copy is in the state dict."""
        for first, second in self._tied_names:
            if self._prefix + first in state:
                state[self._prefix + second] = state[self._prefix + first]

    def tied_copies(self, global_rank: int, groups: TieGroups) -> TiedCopies:
        """A rank's copies of parameters that are tied to another rank's."""
        return TiedCopies(self.model, self.ties, self.layout.split(global_rank)[1], groups)

    def with_prefix(self, name: str) -> str:
        """The LightningModule's name of the model's state ``name``."""
        return self._prefix + name

    def own_tensors(self) -> Iterable[Tensor]:
        """Parameters and buffers of this rank's stages, in one order on every replica."""
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            yield tensor.data

    def _check_outside(self, module: pl.LightningModule) -> None:
        inside = set(self.model.parameters())
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and parameter not in inside:
                raise ConfigError(
                    f"{type(module).__name__} trains {name!r} outside its EntrainModel",
                    limit="the pipeline trains the EntrainModel's parameters alone",
                    remedy="move it into the encoder, the projector or the LLM, or freeze it",
                )


def _prefix_of(model: EntrainModel, module: pl.LightningModule | None) -> str:
    if module is None:
        return ""
    for name, part in module.named_modules():
        if part is model:
            return f"{name}."
    raise ConfigError(f"The model is not part of {type(module).__name__}")


def num_parameters(module: nn.Module) -> int:
    """Parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())
