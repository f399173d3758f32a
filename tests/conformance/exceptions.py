"""Tests of Lightning that may differ under EntrainStrategy, and why.

Keys are beginnings of test ids below `tests_pytorch/`.
"""

REASONS: dict[str, str] = {
    "trainer/connectors/test_checkpoint_connector.py::test_hpc_": (
        "SLURM is simulated with environment variables alone; EntrainStrategy asks the cluster "
        "environment for its rank, where SingleDeviceStrategy is always rank 0"
    ),
}
