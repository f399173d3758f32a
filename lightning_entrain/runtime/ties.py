"""Tied parameters whose two places lie on different ranks: two copies that stay equal.

Typically the LLM's first stage holds the embedding and its last stage the head. Each rank has a
copy; the copies' gradients are summed in every step, so that both take the same optimizer step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_entrain.models.entrain_model import EntrainModel
from lightning_entrain.plan.layout import StageLayout

TieGroups = dict[tuple[int, int], dist.ProcessGroup]
"""This rank's groups, by the two ranks (inside the replica) that hold the copies."""


@dataclass(frozen=True, kw_only=True)
class Tie:
    """One parameter with two names on two ranks.

    Attributes:
        first: Name in the model's state dict under which checkpoints keep its optimizer state.
        second: The other name.
        ranks: Ranks inside the replica that hold the first and the second name.
    """

    first: str
    second: str
    ranks: tuple[int, int]


def find_ties(model: EntrainModel, owned: Sequence[set[str]]) -> tuple[Tie, ...]:
    """Tied parameters that lie on two ranks.

    Args:
        model: The whole model.
        owned: Names of the state that each rank of a replica holds.
    """
    ties = []
    for first, second in model.tied_parameters():
        a, b = (next(r for r, own in enumerate(owned) if name in own) for name in (first, second))
        if a != b:
            ties.append(Tie(first=first, second=second, ranks=(a, b)))
    return tuple(ties)


def tie_again(model: EntrainModel, ties: Sequence[Tie]) -> None:
    """Make both names one parameter again, on a model whose foreign parts are back as meta."""
    for tie in ties:
        one, other = (model.get_parameter(name) for name in (tie.first, tie.second))
        kept = other if one.is_meta else one
        for name in (tie.first, tie.second):
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, kept)


def create_tie_groups(layout: StageLayout, ties: Sequence[Tie], timeout: timedelta) -> TieGroups:
    """One group per replica and pair of ranks; every rank of the job calls this together."""
    found: TieGroups = {}
    if not dist.is_initialized():
        return found
    me = dist.get_rank()
    for replica in range(layout.num_replicas):
        base = replica * layout.num_ranks
        for pair in sorted({tie.ranks for tie in ties}):
            members = [base + rank for rank in pair]
            group = dist.new_group(members, timeout=timeout)
            if me in members:
                found[pair] = group
    return found


class TiedCopies:
    """This rank's copies of parameters that are tied to another rank's.

    Args:
        model: The model with this rank's layers.
        ties: All ties of the model.
        rank: This rank inside its replica.
        groups: As from :func:`create_tie_groups`.

    Attributes:
        seconds: Parameters whose first copy is another rank's: to be counted there.
        names: First name of each of those, by parameter.
    """

    def __init__(
        self, model: EntrainModel, ties: Sequence[Tie], rank: int, groups: TieGroups
    ) -> None:
        self._copies: dict[nn.Parameter, dist.ProcessGroup] = {}
        self.names: dict[Tensor, str] = {}
        for tie in ties:
            if rank not in tie.ranks:
                continue
            is_second = rank == tie.ranks[1]
            parameter = model.get_parameter(tie.second if is_second else tie.first)
            self._copies[parameter] = groups[tie.ranks]
            if is_second:
                self.names[parameter] = tie.first

    @property
    def seconds(self) -> set[Tensor]:
        """Parameters whose first copy is another rank's, where norms count them."""
        return set(self.names)

    def equalize(self) -> None:
        """Give the second copy the first one's values; models may start from unequal seeds."""
        for parameter, group in self._copies.items():
            first, second = dist.get_process_group_ranks(group)
            source = second if (dist.get_rank() == first) == (parameter in self.names) else first
            dist.broadcast(parameter.data, source, group=group)

    def sum_gradients(
        self, parameters: Sequence[nn.Parameter], gradients: list[Tensor | None]
    ) -> None:
        """Sum both copies' gradients, in place.

        Args:
            parameters: The trained parameters of this rank.
            gradients: Their gradients; None counts as zero.
        """
        for index, parameter in enumerate(parameters):
            group = self._copies.get(parameter)
            if group is not None:
                gradient = gradients[index]
                if gradient is None:
                    gradient = torch.zeros_like(parameter)
                gradients[index] = gradient = gradient.contiguous()
                dist.all_reduce(gradient, group=group)
