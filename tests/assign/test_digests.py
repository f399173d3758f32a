"""The same arguments give the same assignment in every process, compiled or not."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_entrain.assign import POLICIES, assign_samples
from tests.assign.helpers import run_python, whole_number_costs

_DIGESTS = """
import json, sys
{before}
from lightning_entrain.assign import assign_samples
from tests.assign.helpers import whole_number_costs
found = []
for num_samples, arguments in (
    (40, dict(num_microbatches=6)),
    (24, dict(num_microbatches=5, max_lag=0)),
    (40, dict(num_microbatches=(4, 6), ramp=[1, 2, 2, 1])),
    (40, dict(num_microbatches=8, token_counts=list(range(40)), max_tokens=150)),
):
    encoder, llm = whole_number_costs(num_samples, 7)
    found.append(
        assign_samples(encoder, llm, num_replicas=2, seed=3, effort=0.5, **arguments).digest()
    )
from lightning_entrain.assign import kernel
print(json.dumps([kernel.IS_COMPILED, found]))
"""

_PINNED = {
    "fixed": "585db48ea01d39b8",
    "disttrain": "413ef868d317d86e",
    "dip": "d6b37890e9df4e3f",
    "entrain": "cd7bd12c9a0b8b32",
    "joint": "ae6f117ef51b93eb",
}


@pytest.mark.parametrize("policy", POLICIES)
def test_digests_are_those_of_other_machines(policy: str) -> None:
    encoder, llm = whole_number_costs(96, 1)
    found = assign_samples(encoder, llm, num_replicas=3, num_microbatches=8, policy=policy)
    assert found.digest()[:16] == _PINNED[policy]


def test_compiled_interpreted_and_without_numba_agree() -> None:
    compiled, digests = run_python(_DIGESTS.format(before=""))
    assert compiled
    assert len(set(digests)) == len(digests)
    interpreted = run_python(_DIGESTS.format(before=""), NUMBA_DISABLE_JIT="1")
    assert interpreted == [False, digests]
    missing = run_python(_DIGESTS.format(before="sys.modules['numba'] = None"))
    assert missing == [False, digests]


def test_hash_seed_and_process_do_not_matter() -> None:
    digests = [run_python(_DIGESTS.format(before=""), PYTHONHASHSEED=seed)[1] for seed in "01"]
    assert digests[0] == digests[1]


def test_the_seed_matters_to_joint_alone() -> None:
    encoder, llm = whole_number_costs(64, 2)
    for policy in POLICIES:
        first, second = (
            assign_samples(
                encoder, llm, num_replicas=2, num_microbatches=8, policy=policy, seed=seed
            ).digest()
            for seed in (0, 1)
        )
        assert (first == second) == (policy != "joint")


def test_import_and_plain_policies_load_no_compiler() -> None:
    loaded = run_python(
        "import json, sys\n"
        "from lightning_entrain.assign import POLICIES, assign_samples\n"
        "for policy in POLICIES:\n"
        "    if policy != 'joint':\n"
        "        assign_samples([1], [1], num_replicas=1, num_microbatches=2, policy=policy)\n"
        "print(json.dumps([name in sys.modules for name in ('numba', 'torch')]))"
    )
    assert loaded == [False, False]


def test_compiled_code_is_kept_on_disk(tmp_path: Path) -> None:
    code = (
        "import json\n"
        "from lightning_entrain.assign import assign_samples\n"
        "assign_samples([1, 2], [2, 1], num_replicas=1, num_microbatches=2)\n"
        "from lightning_entrain.assign import kernel\n"
        "stats = kernel.anneal.stats\n"
        "print(json.dumps([sum(stats.cache_hits.values()), sum(stats.cache_misses.values())]))"
    )
    assert run_python(code, NUMBA_CACHE_DIR=str(tmp_path)) == [0, 1]
    assert run_python(code, NUMBA_CACHE_DIR=str(tmp_path)) == [1, 0]
