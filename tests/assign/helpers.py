from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from lightning_entrain.assign import Assignment
from lightning_entrain.workload.datasets import sample_sizes
from lightning_entrain.workload.flops import sample_flops
from lightning_entrain.workload.hf_config import model_shape

MODEL_1B = {
    "vision_config": {
        "model_type": "qwen2_5_vl",
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_channels": 3,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "out_hidden_size": 2048,
    },
    "text_config": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
}
"""Qwen2.5-VL's vision encoder in front of Llama-3.2-1B."""


def dataset_costs(name: str, num_samples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Encoder and LLM FLOPs per sample of a dataset's size law."""
    return sample_flops(model_shape(MODEL_1B), sample_sizes(name, num_samples, seed))


def whole_number_costs(num_samples: int, seed: int) -> tuple[list[int], list[int]]:
    """Costs by integer arithmetic alone; every fifth sample is text-only."""
    state = seed * 2654435761 % 2**32 + 1
    costs: list[tuple[int, int]] = []
    for i in range(num_samples):
        state = (state * 1664525 + 1013904223) % 2**32
        image = 0 if i % 5 == 4 else 50 + (state >> 20) % 400
        costs.append((image, 10 + image // 4 + (state >> 8) % 100))
    return [c[0] for c in costs], [c[1] for c in costs]


def cvs(assignment: Assignment) -> tuple[float, float]:
    """Coefficients of variation in percent, encoder and LLM, mean over replicas."""
    replicas = range(len(assignment.replicas))
    mean = [
        100 * float(np.mean([assignment.imbalance(module, r).cv for r in replicas]))
        for module in ("encoder", "llm")
    ]
    return mean[0], mean[1]


def run_python(code: str, **environment: str) -> Any:
    """Run code in a fresh interpreter and parse its last line of output as JSON."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])
