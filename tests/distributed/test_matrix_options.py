"""Recomputation, compilation, tied embeddings and adapters, each with everything else.

Every value of these four meets every value of every other dimension of the matrix at least once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_entrain.models.lora import LoraOptions, add_lora
from tests.distributed.job import Module, Outcome
from tests.distributed.pairs import Case, covering
from tests.distributed.ranks import run_ranks
from tests.distributed.test_equal_to_one_process import relative
from tests.distributed.test_matrix import MatrixJob
from tests.distributed.test_tied import under_first_name

NEW = ("recompute", "compile", "tied", "lora")
# In an order that makes few cases, and few that compile.
VALUES: dict[str, tuple[Any, ...]] = {
    "compile": (False, True),
    "clip": (None, "norm", "value"),
    "schedule": ("1f1b", "1f1b_split", "zero_bubble", "auto"),
    "frozen": ((), ("encoder",)),
    "precision": ("32-true", "bf16-mixed"),
    "layout": (
        (1, 1, 1, (0, 1)),
        (1, 1, 2, (0, 1, 2)),
        (2, 1, 1, (0, 1)),
        (1, 2, 2, (0, 1, 0, 1)),
    ),
    "tied": (False, True),
    "lora": ((), ("llm",), ("encoder", "llm")),
    "recompute": ("none", "full", "mlp"),
    "accumulate": (1, 2),
    "policy": ("fixed", "entrain", "joint"),
}


def allowed(case: Case) -> bool:
    """Compiled layers do not split B, which the strategy refuses."""
    return not (case.get("compile") and case.get("schedule") == "zero_bubble")


CASES = covering(VALUES, wanted=NEW, allowed=allowed)


@dataclass(kw_only=True)
class OptionsJob(MatrixJob):
    lora: tuple[str, ...] = ()

    def module(self) -> Module:
        module = super().module()
        options = LoraOptions(rank=4, dropout=0.0 if self.options["compile"] else 0.1)
        add_lora(module.model, **dict.fromkeys(self.lora, options))
        return module


def job_of(case: Case) -> OptionsJob:
    trainer: dict[str, Any] = {"precision": case["precision"]}
    trainer["accumulate_grad_batches"] = case["accumulate"]
    if case["clip"] is not None:
        trainer.update(gradient_clip_val=0.03, gradient_clip_algorithm=case["clip"])
    return OptionsJob(
        layout=case["layout"],
        schedule=case["schedule"],
        frozen=case["frozen"],
        lora=case["lora"],
        options={"compile": case["compile"], "compile_backend": "eager"},
        policy=case["policy"],
        num_batches=3,
        batch_size=8,
        trainer=trainer,
        model={
            "tie_word_embeddings": case["tied"],
            "encoder_recompute": case["recompute"],
            "llm_recompute": case["recompute"],
        },
    )


def _fit(job: OptionsJob, root: Path) -> Outcome:
    return job.fit(job.strategy(), job.devices, root).to_numpy()


def test_every_pair_is_there() -> None:
    for a, b in product(NEW, VALUES):
        if a == b:
            continue
        wanted = {(x, y) for x, y in product(VALUES[a], VALUES[b]) if allowed({a: x, b: y})}
        assert {(case[a], case[b]) for case in CASES} == wanted, (a, b)
    assert all(allowed(case) for case in CASES)
    assert len(CASES) <= 13, "each takes two seconds"


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_case(case: Case, tmp_path: Path) -> None:
    job = job_of(case)
    alone = job_of({**case, "recompute": "none"})  # neither recomputed nor compiled
    one = alone.fit(None, 1, tmp_path).to_numpy()
    low = case["precision"] == "bf16-mixed"
    losses, gradients = (5e-3, 5e-2) if low else (1e-5, 1e-6)
    seen: set[str] = set()
    for rank in run_ranks(job.devices, _fit, job, tmp_path):
        rank = under_first_name(rank) if case["tied"] else rank
        np.testing.assert_allclose(rank.losses, one.losses, rtol=losses, err_msg=str(case))
        for name, gradient in rank.first_gradients.items():
            assert relative(gradient, one.first_gradients[name]) < gradients, (name, case)
        if (
            low
        ):  # AdamW turns the sign of a tiny gradient, which rounding decides, into a whole step
            found, expected = (
                np.concatenate([part[name].ravel() for name in rank.parameters])
                for part in (rank.parameters, one.parameters)
            )
            assert relative(found, expected) < 5e-3, case
        else:
            for name, parameter in rank.parameters.items():
                assert relative(parameter, one.parameters[name]) < 1e-4, (name, case)
        seen |= set(rank.first_gradients)
    assert seen == set(one.first_gradients), case
