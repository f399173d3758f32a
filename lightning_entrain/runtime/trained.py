"""What is trained where, and so which stages have to go backward and what that costs them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from lightning_entrain.errors import ConfigError
from lightning_entrain.models.entrain_model import EntrainModel
from lightning_entrain.models.prune import stage_modules
from lightning_entrain.models.recompute import recomputed_share
from lightning_entrain.plan.layout import StageLayout

Factors = tuple[float, float, float]
"""Parts of a stage's work that F, I and W do; they sum to 1."""


@dataclass(frozen=True, kw_only=True)
class TrainedStages:
    """What follows from which parameters are trained.

    Attributes:
        first_backward: First stage with a trained parameter; the last stage if there is none.
        factors: Per stage the parts of F, I and W. I goes back to the first trained layer of the
            model, and runs what is recomputed; W is in proportion to the trained parameters.
        recomputes: Whether some layers are recomputed.
    """

    first_backward: int
    factors: tuple[Factors, ...]
    recomputes: bool

    @classmethod
    def of(cls, model: EntrainModel, layout: StageLayout) -> TrainedStages:
        """Read it off a model that is not pruned."""
        encoder, llm = layout.encoder_ranges, layout.llm_ranges
        names = [stage_modules(model, encoder=own) for own in encoder]
        names += [stage_modules(model, llm=own) for own in llm]
        again = [recomputed_share(model.encoder)] * len(encoder)
        again += [recomputed_share(model.llm)] * len(llm)
        sizes = [[_sizes(model.get_submodule(name)) for name in own] for own in names]
        trained = [stage for stage, own in enumerate(sizes) if any(some for _, some in own)]
        first = min(trained, default=layout.num_stages - 1)
        return cls(
            first_backward=first,
            recomputes=any(again),
            factors=tuple(
                _factors(own, stage - first, share)
                for stage, (own, share) in enumerate(zip(sizes, again, strict=True))
            ),
        )


def _sizes(module: nn.Module) -> tuple[int, int]:
    """All and trained parameters."""
    parameters = list(module.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


def _factors(sizes: list[tuple[int, int]], stages_behind_first: int, recomputed: float) -> Factors:
    total = sum(size for size, _ in sizes) or 1
    inputs = 0.0
    if stages_behind_first > 0:
        inputs = 1.0
    elif stages_behind_first == 0:
        first = next((i for i, (_, some) in enumerate(sizes) if some), len(sizes))
        inputs = sum(size for size, _ in sizes[first:]) / total
    if stages_behind_first >= 0:
        inputs += recomputed
    weights = sum(some for _, some in sizes) / total
    whole = 1.0 + inputs + weights
    return 1.0 / whole, inputs / whole, weights / whole


class TrainedCheck:
    """Notices parameters that are thawed after the stages were set up.

    Args:
        parameters: Of the model with this rank's layers.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._frozen = [p for p in parameters if not p.requires_grad]

    def __call__(self) -> None:
        """Raise ``ConfigError`` if a parameter that was frozen requires a gradient now."""
        thawed = sum(p.requires_grad for p in self._frozen)
        if thawed:
            raise ConfigError(
                f"{thawed} parameter(s) were thawed during the run",
                limit="what is trained is fixed when a fit starts: schedules, messages and "
                "optimizers follow from it",
                remedy="thaw them before the fit, or end it and start another from its checkpoint",
            )
