"""Recomputation under every way of going backward: equal results, one more forward per layer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.job import Job, Outcome, fit_on_rank
from tests.distributed.ranks import run_ranks
from tests.distributed.test_equal_to_one_process import assert_equal, relative

PLAIN = Job(num_batches=2, batch_size=12, num_microbatches=4, policy="entrain")
RECOMPUTING = replace(PLAIN, model={"encoder_recompute": "full", "llm_recompute": "every_2"})


def fit_and_count(job: Job, options: dict[str, Any], devices: int, root: Path) -> Any:
    """The outcome, and how often each layer's first norm ran on this rank."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionBlock

    from tests.distributed import job as jobs

    calls: dict[str, int] = {}
    make = jobs.nano_vlm

    def counting(**arguments: Any) -> Any:
        model = make(**arguments)
        for name, part in model.named_modules():
            if isinstance(part, (LlamaDecoderLayer, Qwen2_5_VLVisionBlock)):
                norm = part.input_layernorm if hasattr(part, "input_layernorm") else part.norm1

                def hook(*args: Any, name: str = name) -> None:
                    calls[name] = calls.get(name, 0) + 1

                norm.register_forward_pre_hook(hook)
        return model

    jobs.nano_vlm = counting  # in a forked process of its own
    return fit_on_rank(job, options, devices, root), calls


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return PLAIN.fit(None, 1, tmp_path_factory.mktemp("one")).to_numpy()


@pytest.mark.parametrize("schedule", ["1f1b_split", "zero_bubble"])
def test_each_recomputed_layer_runs_once_more(schedule: str, one: Outcome, tmp_path: Path) -> None:
    options = {"llm_stages": 2, "schedule": schedule}
    counts = []
    for job in (PLAIN, RECOMPUTING):
        ranks = run_ranks(3, fit_and_count, job, options, 3, tmp_path)
        assert_equal([outcome for outcome, _ in ranks], one, parameters=1e-4, gradients=1e-6)
        counts.append({name: n for _, calls in ranks for name, n in calls.items()})
    plain, recomputing = counts
    assert len(plain) == 6
    for name, calls in plain.items():
        twice = "encoder" in name or int(name.rsplit(".", 1)[1]) % 2 == 0
        assert recomputing[name] == calls * (2 if twice else 1), name


def test_recompute_in_bf16(tmp_path: Path) -> None:
    mixed = {"precision": "bf16-mixed"}
    one = replace(PLAIN, trainer=mixed).fit(None, 1, tmp_path).to_numpy()
    job = replace(
        PLAIN,
        trainer=mixed,
        model={"encoder_recompute": "attention", "llm_recompute": "mlp"},
    )
    for rank in run_ranks(2, fit_on_rank, job, {"schedule": "zero_bubble"}, 2, tmp_path):
        np.testing.assert_allclose(rank.losses, one.losses, rtol=5e-3)
        for name, gradient in rank.first_gradients.items():
            assert relative(gradient, one.first_gradients[name]) < 5e-2, name
