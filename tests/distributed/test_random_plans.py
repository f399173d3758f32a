"""Any legal plan trains as one process does: samples placed at random, in any layout."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lightning_entrain.assign.types import Assignment, ReplicaAssignment
from lightning_entrain.data.batch import DataNeeds, PlannedBatch
from lightning_entrain.data.collate import build_batch
from lightning_entrain.strategy import EntrainStrategy
from tests.distributed.job import Batches, Job, Outcome
from tests.distributed.ranks import run_ranks
from tests.distributed.test_equal_to_one_process import assert_equal
from tests.distributed.test_matrix import LAYOUTS, SCHEDULES, MatrixJob


def random_assignment(chance: random.Random, has_images: list[bool], replicas: int) -> Assignment:
    """Every sample anywhere: microbatches may be empty, out of order, deferred by one."""
    num = chance.randint(1, 5)
    owned: list[list[int]] = [[] for _ in range(replicas)]
    for index in chance.sample(range(len(has_images)), len(has_images)):
        chance.choice(owned).append(index)
    made = []
    for own in owned:
        encoder: list[list[int]] = [[] for _ in range(num)]
        llm: list[list[int]] = [[] for _ in range(num)]
        for index in own:
            j = chance.randrange(num)
            llm[j].append(index)
            if has_images[index]:
                encoder[chance.randint(max(j - 1, 0), j)].append(index)
        for entry in encoder:
            chance.shuffle(entry)
        made.append(
            ReplicaAssignment(encoder=tuple(map(tuple, encoder)), llm=tuple(map(tuple, llm)))
        )
    return Assignment(replicas=tuple(made), policy="random")


class RandomPlans(Batches):
    """Each batch with a plan of its own."""

    def __getitem__(self, index: int) -> PlannedBatch:
        assert isinstance(self.job, RandomJob)
        size = self.job.batch_size
        indices = range(index * size, (index + 1) * size)
        sizes = [self.source.sizes[i] for i in indices]
        has_images = [each.has_images for each in sizes]
        chance = random.Random(f"{self.job.plan_seed} {index}")
        assignment = random_assignment(chance, has_images, self.replicas)
        text_only = frozenset(i for i, has in enumerate(has_images) if not has)
        assignment.validate(size, text_only=text_only)
        costs = [float(s.num_patches) for s in sizes], [float(s.num_tokens) for s in sizes]
        return build_batch(self.source, indices, assignment.with_costs(*costs), sizes, self.needs)


@dataclass(kw_only=True)
class RandomJob(MatrixJob):
    plan_seed: int = 0

    def loader(self, trainer: Any, module: Any) -> DataLoader:
        strategy = trainer.strategy
        if not isinstance(strategy, EntrainStrategy):
            return super().loader(trainer, module)
        strategy.connect(module)
        return DataLoader(
            RandomPlans(self, strategy.num_replicas, strategy.data_needs), batch_size=None
        )


SHARED: dict[str, Any] = {"num_batches": 5, "batch_size": 9, "text_only": 0.3, "max_side": 160}


@cache
def one_process(root: Path) -> Outcome:
    """The same samples in fixed microbatches: how they are grouped must not matter."""
    return Job(**SHARED).fit(None, 1, root).to_numpy()


def _fit(job: RandomJob, root: Path) -> Outcome:
    return job.fit(job.strategy(), job.devices, root).to_numpy()


def test_the_random_plans_are_of_all_kinds() -> None:
    job = RandomJob(**SHARED)
    batches = RandomPlans(job, 2, DataNeeds.everything())
    plans = [batches[i].assignment for i in range(job.num_batches)]
    replicas = [replica for plan in plans for replica in plan.replicas]
    assert {replica.max_lag for replica in replicas} == {0, 1}
    assert any(not entry for replica in replicas for entry in replica.llm)
    assert any(not k and j for r in replicas for k, j in zip(r.encoder, r.llm, strict=True))
    assert len({len(replica.llm) for replica in replicas}) > 1


@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    layout=st.sampled_from(LAYOUTS),
    schedule=st.sampled_from(SCHEDULES),
    plan_seed=st.integers(0, 2**32),
)
@example(layout=LAYOUTS[3], schedule="zero_bubble", plan_seed=1)
@example(layout=LAYOUTS[4], schedule="1f1b_eager", plan_seed=2)
def test_random_plans(layout: Any, schedule: str, plan_seed: int, tmp_path: Path) -> None:
    job = RandomJob(layout=layout, schedule=schedule, plan_seed=plan_seed, **SHARED)
    ranks = run_ranks(job.devices, _fit, job, tmp_path)
    one = one_process(tmp_path)
    assert_equal(ranks, one, parameters=1e-4, gradients=1e-6)
    assert np.isfinite(one.losses).all()
