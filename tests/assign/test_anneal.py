from __future__ import annotations

import numpy as np
import pytest

from lightning_entrain.assign import kernel
from lightning_entrain.assign.anneal import Job, Start, run_anneal
from lightning_entrain.assign.problem import build_problem

_HOT = (1000, 300)


def _job(num_samples: int = 24, num_bins: int = 4, **arguments: object) -> Job:
    generator = np.random.default_rng(0)
    encoder, llm = generator.lognormal(size=num_samples), generator.lognormal(size=num_samples)
    encoder[-num_samples // 4 :] = 0
    problem = build_problem(
        encoder,
        llm,
        num_replicas=1,
        num_microbatches=num_bins,
        **arguments,  # type: ignore[arg-type]
    )
    images, texts = problem.split_images(problem.order)
    return Job(problem=problem, samples=images + texts, num_images=len(images), num_bins=num_bins)


def _start(job: Job) -> Start:
    places = [n % job.num_bins for n in range(len(job.samples))]
    encoder = [k if n < job.num_images else -1 for n, k in enumerate(places)]
    return Start(encoder, places, 0)


@pytest.mark.parametrize("max_lag", [0, 1])
@pytest.mark.parametrize("num_samples", [1, 2, 3, 24])
def test_every_state_is_legal_and_its_score_the_true_one(num_samples: int, max_lag: int) -> None:
    job = _job(num_samples, max_lag=max_lag)
    for seed in range(20):
        end = run_anneal(job, _start(job), _HOT, 512, seed)
        assert end.score == job.score(end)
        for n, (k, j) in enumerate(zip(end.encoder, end.llm, strict=True)):
            assert 0 <= j < job.num_bins
            if n < job.num_images:
                assert 0 <= k < job.num_bins
                assert 0 <= j - k <= max_lag
            else:
                assert k == -1


def test_the_kernel_keeps_its_loads_in_step_with_the_places() -> None:
    job = _job(token_counts=list(range(24)), max_tokens=120)
    start = _start(job)
    slot = kernel.interleaved([start.encoder, start.llm])
    load = kernel.interleaved(job.loads(start))
    rules = kernel.as_numbers([job.num_images, 1, 120, 0, 8, 3072, 3280])
    thresholds = kernel.as_numbers([65536] * 1024)
    schedule = kernel.as_numbers([12345, 8, 1 << 34, 1 << 20, 1])
    kernel.anneal(kernel.interleaved(job.weight), slot, load, rules, thresholds, schedule)
    places = [int(k) for k in slot]
    end = Start(places[0::2], places[1::2])
    assert end != start
    assert [int(x) for x in load] == [int(x) for x in kernel.interleaved(job.loads(end))]
    assert job.fits(end)


def test_exchanges_alone_keep_the_numbers() -> None:
    job = _job()
    job = Job(
        problem=build_problem(
            job.problem.encoder_cost,
            job.problem.llm_cost,
            num_replicas=1,
            num_microbatches=4,
            max_lag=0,
        ),
        samples=job.samples,
        num_images=24,
        num_bins=4,
        exchanges_only=True,
    )
    places = [n % 4 for n in range(24)]
    end = run_anneal(job, Start(places, places), _HOT, 5000, 1)
    assert end.llm != places
    assert [end.llm.count(k) for k in range(4)] == [6] * 4
    assert end.llm == end.encoder


def test_the_ceiling_holds_where_free_runs_break_it() -> None:
    job = _job()
    start = run_anneal(job, _start(job), (1000, 3), 50_000, 0)
    ceiling = job.ceiling(start)
    hotter = (20_000, 20_000)
    free = [run_anneal(job, start, hotter, 256, seed) for seed in range(30)]
    held = [run_anneal(job, start, hotter, 256, seed, ceiling=ceiling) for seed in range(30)]
    assert max(job.ceiling(end) for end in free) > ceiling
    assert max(job.ceiling(end) for end in held) <= ceiling
    assert any(end.llm != start.llm for end in held)


def test_many_microbatches_stay_within_the_integers() -> None:
    job = _job(6000, 3000)
    assert job.scale * job.num_bins < 2**30
    end = run_anneal(job, _start(job), (200, 3), 60_000, 1)
    assert end.score < job.score(_start(job))
