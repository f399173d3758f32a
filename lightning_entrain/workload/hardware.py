"""Devices by name: peaks, memory and links, and the curve between peak and real matrix speed.

Peaks (dense, without sparsity), bandwidths, memory and multiprocessors are from the vendor's data
sheets.
``matmul_efficiency``, the best fraction of the peak that a large bf16 matrix multiplication
reaches, comes from published measurements:

- A100 SXM 267.9 of 312 TFLOPS, A100 PCIe 256.4, H100 SXM 794.5 of 989, B200 1745 of 2250: the
  "maximum achievable matmul FLOPS" table of github.com/stas00/ml-engineering (H200 as H100).
- Ada: cuBLAS on an L20 reaches 105-115 of 119.5 TFLOPS (github.com/DefTruth/CUDA-Learn-Notes).
- A40: none found; the PCIe A100 of the same generation stands in.

How speed falls off for smaller matrices is modelled as ``waves / (waves + HALF_WAVE) *
K / (K + HALF_DEPTH)``: a multiplication of M x K by K x N fills ``waves`` rounds of the
multiprocessors with 128 x 128 tiles, and each tile pays a fixed prologue. The two constants and
``LAUNCH_MS`` are fitted to :data:`PUBLISHED_MATMULS` and to nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_entrain.errors import ConfigError

TILE = 128
HALF_WAVE = 0.20
HALF_DEPTH = 25.0
LAUNCH_MS = 0.0032


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator (or a CPU) as a roofline.

    Attributes:
        name: Name for ``cluster.gpu``.
        peak_tflops: Dense peak per dtype.
        bandwidth_gbps: Memory bandwidth in GB/s.
        memory_gib: Memory in GiB.
        num_processors: Multiprocessors; 0 makes the efficiency a constant (CPU).
        matmul_efficiency: Fraction of the peak that large matrix multiplications reach.
        link_gbps: Default bandwidth between GPUs of a node, one direction, GB/s.
        reserved_gib: Context, communication buffers and fragmentation.
        launch_ms: Time to start one operation.
    """

    name: str
    peak_tflops: dict[str, float] = field(hash=False)
    bandwidth_gbps: float
    memory_gib: float
    num_processors: int
    matmul_efficiency: float
    link_gbps: float
    reserved_gib: float = 2.0
    launch_ms: float = LAUNCH_MS

    def matmul_tflops(
        self, rows: ArrayLike, depth: int, columns: int, dtype: str = "bfloat16"
    ) -> NDArray[np.float64]:
        """Speed of ``[rows, depth] @ [depth, columns]`` in TFLOPS, launch time not included.

        Args:
            rows: Rows of the first factor; fractions are fine.
            depth: Columns of the first factor, K.
            columns: Columns of the second factor, N.
            dtype: A key of ``peak_tflops``.
        """
        peak = self.peak(dtype) * self.matmul_efficiency
        if self.num_processors == 0:
            return np.full(np.shape(rows), peak)
        num_tiles = np.maximum(np.asarray(rows, dtype=np.float64) / TILE, 1e-9)
        waves = num_tiles * math.ceil(columns / TILE) / self.num_processors
        used = columns / (math.ceil(columns / TILE) * TILE)
        curve = waves / (waves + HALF_WAVE) * depth / (depth + HALF_DEPTH) * used
        return np.asarray(peak * curve, dtype=np.float64)

    def peak(self, dtype: str) -> float:
        """Dense peak in TFLOPS."""
        if dtype not in self.peak_tflops:
            raise ConfigError(
                f"{self.name} has no peak for dtype {dtype!r}",
                limit=f"one of {', '.join(self.peak_tflops)}",
            )
        return self.peak_tflops[dtype]


def _gpu(
    name: str,
    bf16: float,
    fp32: float,
    bandwidth: float,
    memory: float,
    processors: int,
    efficiency: float,
    link: float,
) -> Device:
    return Device(
        name=name,
        peak_tflops={"bfloat16": bf16, "float16": bf16, "float32": fp32},
        bandwidth_gbps=bandwidth,
        memory_gib=memory,
        num_processors=processors,
        matmul_efficiency=efficiency,
        link_gbps=link,
    )


_A100 = 267.9 / 312
_A100_PCIE = 256.4 / 312
_HOPPER = 794.5 / 989.4
_ADA = 110.0 / 119.5

DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        # name, bf16, fp32 (no TF32), GB/s, GiB, multiprocessors, efficiency, link GB/s
        _gpu("a40", 149.7, 37.4, 696, 44.7, 84, _A100_PCIE, 56.25),
        _gpu("a100-40", 312, 19.5, 1555, 39.5, 108, _A100, 300),
        _gpu("a100-80", 312, 19.5, 2039, 79.2, 108, _A100, 300),
        _gpu("h100", 989.4, 66.9, 3350, 79.6, 132, _HOPPER, 450),
        _gpu("h200", 989.4, 66.9, 4800, 139.8, 132, _HOPPER, 450),
        _gpu("l40s", 362, 91.6, 864, 44.5, 142, _ADA, 32),
        _gpu("b200", 2250, 80, 8000, 178.4, 148, 1745 / 2250, 900),
        _gpu("rtx4090", 165.2, 82.6, 1008, 23.6, 128, _ADA, 32),
    )
}

PUBLISHED_MATMULS: tuple[tuple[str, int, float], ...] = (
    ("rtx4060ti", 512, 13.029),
    ("rtx4060ti", 1024, 19.883),
    ("rtx4060ti", 2048, 21.173),
    ("rtx4060ti", 4096, 22.342),
    ("rtx4060ti", 8192, 23.384),
    ("b200", 1024, 405.2),
    ("b200", 2048, 981.7),
    ("b200", 4096, 1485.8),
    ("b200", 8192, 1383.0),
    ("b200", 16384, 1420.6),
)
"""Square matrix multiplications: device, side, TFLOPS reached, launch time included.

``rtx4060ti``: cuBLASLt, TF32, github.com/AD2605/gemm-zoo (34 multiprocessors). ``b200``: torch with
cuBLAS, bf16, from milliseconds published for a Blackwell data-centre GPU in a comparison of
compiler back ends. Absolute speeds differ with clocks and power, so the fit compares each series
with its own best value.
"""


def cpu_device(
    *,
    peak_tflops: float,
    bandwidth_gbps: float,
    memory_gib: float,
    name: str = "cpu",
    launch_ms: float = 0.005,
) -> Device:
    """A CPU as a roofline, from measured peaks.

    Args:
        peak_tflops: Speed of a large fp32 matrix multiplication.
        bandwidth_gbps: Memory bandwidth in GB/s.
        memory_gib: Memory in GiB.
        name: Name for tables and for matching profiles.
        launch_ms: Overhead of one operation.
    """
    return Device(
        name=name,
        peak_tflops={"float32": peak_tflops, "bfloat16": peak_tflops, "float16": peak_tflops},
        bandwidth_gbps=bandwidth_gbps,
        memory_gib=memory_gib,
        num_processors=0,
        matmul_efficiency=1.0,
        link_gbps=bandwidth_gbps / 4,
        reserved_gib=1.0,
        launch_ms=launch_ms,
    )


def device(name: str) -> Device:
    """A device by name.

    Raises:
        ConfigError: If it is unknown.
    """
    if name not in DEVICES:
        raise ConfigError(
            f"cluster.gpu is {name!r}",
            limit=f"one of {', '.join(DEVICES)}",
            remedy="name one of these, or measure your device with entrain-profile",
        )
    return DEVICES[name]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The machine a plan is for.

    Attributes:
        device: Its accelerator.
        num_gpus: Accelerators.
        gpus_per_node: Accelerators of one node; tensor parallelism stays within a node.
        link_gbps: Bandwidth between neighbours in a node, one direction, GB/s.
        network_gbps: Bandwidth per GPU between nodes, one direction, GB/s.
    """

    device: Device
    num_gpus: int
    gpus_per_node: int
    link_gbps: float
    network_gbps: float

    def __post_init__(self) -> None:
        for name in ("num_gpus", "gpus_per_node", "link_gbps", "network_gbps"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"cluster.{name} is {getattr(self, name)}", limit="above 0")

    @property
    def usable_bytes(self) -> float:
        """Memory per GPU minus what context and communication take."""
        return (self.device.memory_gib - self.device.reserved_gib) * 2**30
