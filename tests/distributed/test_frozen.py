"""Frozen encoder, frozen LLM, trained projector: as on one process, with no needless backward."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from lightning_entrain.errors import ConfigError
from lightning_entrain.models.freezing import freeze
from lightning_entrain.models.tiny import nano_vlm
from lightning_entrain.plan.layout import LayoutRequest
from lightning_entrain.runtime.trained import TrainedStages
from lightning_entrain.schedule.types import ActionKind
from lightning_entrain.strategy import EntrainStrategy
from tests.distributed.job import Job, Module, Outcome
from tests.distributed.ranks import run_ranks
from tests.distributed.test_equal_to_one_process import assert_equal


@dataclasses.dataclass
class FrozenJob(Job):
    frozen: tuple[str, ...] = ()

    def module(self) -> Module:
        module = super().module()
        freeze(module.model, self.frozen)
        return module


def job(*frozen: str) -> FrozenJob:
    return FrozenJob(
        frozen=frozen,
        num_batches=3,
        batch_size=12,
        num_microbatches=4,
        policy="entrain",
        text_only=0.2,
        trainer={"gradient_clip_val": 0.05},
    )


def fit(job: FrozenJob, options: dict[str, Any], devices: int, root: Path) -> Any:
    strategy = EntrainStrategy(**options)
    kinds: set[tuple[int, ActionKind]] = set()
    module = job.module()
    trainer = job.make_trainer(strategy, devices, root)
    loader = job.loader(trainer, module)
    end = module.on_train_batch_end

    def note(*args: Any) -> None:
        plan = strategy.last_step_plan
        assert plan is not None
        own = plan.program.schedule.ranks[strategy.global_rank % strategy.layout.num_ranks]
        kinds.update((action.stage, action.kind) for action in own)
        end(*args)

    module.on_train_batch_end = note  # type: ignore[method-assign]
    trainer.fit(module, loader)
    outcome = Outcome(
        losses=module.losses,
        correct=module.correct,
        val_losses=[],
        first_gradients=module.first_gradients,
        parameters={n: p.detach().clone() for n, p in module.named_parameters()},
        metrics={},
    )
    return outcome.to_numpy(), kinds


BACKWARD = {ActionKind.B, ActionKind.I, ActionKind.W, ActionKind.RECV_B}
CASES = [
    # frozen parts, layout, schedule, first stage that goes backward
    (("encoder", "projector"), 4, {"encoder_stages": 2}, "1f1b_eager", 2),
    (("encoder", "projector"), 4, {"encoder_stages": 2}, "zero_bubble", 2),
    (("encoder", "projector"), 4, {"replicas": 2}, "1f1b_split", 1),
    (("encoder", "projector"), 1, {"encoder_stages": 2, "llm_stages": 2}, "zero_bubble", 2),
    (("encoder",), 3, {"encoder_stages": 2}, "1f1b_split", 1),
    (("encoder", "llm"), 4, {"encoder_stages": 2}, "zero_bubble", 1),
    (("llm",), 3, {"llm_stages": 2}, "1f1b_split", 0),
    (("llm",), 3, {"llm_stages": 2}, "zero_bubble", 0),
]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Outcome]:
    frozen = {case[0] for case in CASES}
    return {f: job(*f).fit(None, 1, tmp_path_factory.mktemp("one")).to_numpy() for f in frozen}


@pytest.mark.parametrize(("frozen", "devices", "options", "schedule", "first"), CASES)
def test_frozen_parts(
    frozen: tuple[str, ...],
    devices: int,
    options: dict[str, Any],
    schedule: str,
    first: int,
    references: dict[tuple[str, ...], Outcome],
    tmp_path: Path,
) -> None:
    options = {**options, "schedule": schedule}
    ranks = run_ranks(devices, fit, job(*frozen), options, devices, tmp_path)
    assert_equal([one for one, _ in ranks], references[frozen], parameters=1e-4, gradients=1e-6)
    backward = {(s, kind) for _, kinds in ranks for s, kind in kinds if kind in BACKWARD}
    assert min(s for s, _ in backward) == first
    assert not any(
        kind is ActionKind.SEND_B and s <= first for _, kinds in ranks for s, kind in kinds
    )


def test_what_frozen_parts_mean_for_the_stages() -> None:
    model = nano_vlm(encoder_layers=4, llm_layers=4)
    layout = LayoutRequest(world_size=4, encoder_stages=2, llm_stages=2).resolve(
        encoder_layers=4, llm_layers=4, encoder_weight=1, llm_weight=1
    )
    assert TrainedStages.of(model, layout).factors == ((1 / 3, 1 / 3, 1 / 3),) * 4
    freeze(model, ["encoder", "llm"])
    found = TrainedStages.of(model, layout)
    assert found.first_backward == 1
    assert found.factors[0] == (1.0, 0.0, 0.0)
    forward, inputs, weights = found.factors[1]  # only the merger, at the end of the stage
    assert 0 < inputs == weights < forward
    assert found.factors[2:] == ((0.5, 0.5, 0.0),) * 2
    with pytest.raises(ConfigError, match=r"freeze has 'vision'.*encoder, projector, llm"):
        freeze(model, ["vision"])
    with pytest.raises(ConfigError, match="freeze has all parts"):
        freeze(model, ["encoder", "projector", "llm"])


def test_thawing_during_a_fit_is_refused(tmp_path: Path) -> None:
    frozen = job("encoder")
    module = frozen.module()
    module.on_train_batch_end = lambda *args: module.model.requires_grad_(True)  # type: ignore
    trainer = frozen.make_trainer(EntrainStrategy(), 1, tmp_path)
    with pytest.raises(ConfigError, match=r"thawed during the run.*start another"):
        trainer.fit(module, frozen.loader(trainer, module))


def fit_twice(options: dict[str, Any] | None, devices: int, root: Path) -> dict[str, Any]:
    """All is trained at first, then the encoder is frozen: each rank freezes what it holds."""
    plain = job()
    strategy = None if options is None else EntrainStrategy(**options)
    module = plain.module()
    trainer = plain.make_trainer(strategy, devices, root)
    loader = plain.loader(trainer, module)
    trainer.fit(module, loader)
    modes, kinds = [], set()
    for parts in (["encoder"], ["encoder", "projector"]):
        freeze(module.model, parts)
        trainer.fit_loop.max_epochs += 1
        trainer.fit(module, loader)
        if strategy is not None:
            assert strategy.workload is not None
            training = strategy.workload.training
            modes.append((training.encoder, training.projector, training.llm))
            assert strategy._run_plan.partition is not None
            count, trained = strategy._run_plan.partition.parameter_counts()
            modes.append(0 < trained < count)
    if strategy is not None:
        assert strategy.last_step_plan is None
        planner = strategy.step_planner
        batch = loader.dataset[0]
        plan = planner(batch.assignment, batch.sizes, train=True)
        kinds = {(a.stage, a.kind) for own in plan.program.schedule.ranks for a in own}
    return {"losses": module.losses, "modes": modes, "kinds": kinds}


@pytest.mark.parametrize(
    ("devices", "options"), [(3, {"llm_stages": 2}), (4, {"replicas": 2}), (1, {})]
)
def test_freezing_between_fits(devices: int, options: dict[str, Any], tmp_path: Path) -> None:
    one = fit_twice(None, 1, tmp_path)
    assert len(one["losses"]) == 9
    for found in run_ranks(devices, fit_twice, options, devices, tmp_path):
        assert found["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert found["modes"] == [
            ("frozen", "full", "full"),
            True,
            ("frozen", "frozen", "full"),
            True,
        ]
        assert (0, ActionKind.F) in found["kinds"]
        backward = {kind for stage, kind in found["kinds"] if stage == 0} - {ActionKind.F}
        assert not backward & {ActionKind.B, ActionKind.I, ActionKind.W}


def test_ranks_that_disagree_on_what_is_trained(tmp_path: Path) -> None:
    plain = job()
    strategy = EntrainStrategy()
    module = plain.module()
    trainer = plain.make_trainer(strategy, 1, tmp_path)
    trainer.fit(module, plain.loader(trainer, module))
    flags = [{"llm.lm_head.weight": True}, {"llm.lm_head.weight": False}]
    told = r"lm_head\.weight is trained on rank 0 and frozen on rank 1"
    with pytest.raises(ConfigError, match=told):
        strategy._run_plan.adopt_again(flags, strategy.root_device, "32-true")
