"""The measured cost model: times of real layers, fitted per layer (Entrain, section 4.1).

The paper fits ``T(x) = a x^2 + b x + c`` to one sequence of length x. A microbatch is several
sequences side by side, so the quadratic term is taken over query-key pairs: ``T = a * pairs + b *
rows + c``, with ``pairs`` the sum over the samples of their squares. For one sequence both agree.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_entrain.errors import ConfigError
from lightning_entrain.workload.costs import LayerCost, LayerTimes, check_parallelism, memory_cost
from lightning_entrain.workload.flops import attention_flops, layer_flops, linear_flops
from lightning_entrain.workload.layers import Axis, Layer
from lightning_entrain.workload.memory import Training
from lightning_entrain.workload.shapes import FloatArray, Load

PROFILE_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Non-negative coefficients of one layer and one direction, in milliseconds.

    Attributes:
        per_pair: Per query-key pair.
        per_row: Per row.
        constant: Per call.
        residual: Root mean square of the relative errors over the measured sizes.
    """

    per_pair: float
    per_row: float
    constant: float
    residual: float

    def predict(self, pairs: FloatArray, rows: FloatArray, share: FloatArray) -> FloatArray:
        """Milliseconds; ``share`` of the constant falls on each entry."""
        return self.per_pair * pairs + self.per_row * rows + self.constant * share


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One timing.

    Attributes:
        rows: Rows of the call.
        pairs: Query-key pairs of the call.
        forward_ms: Median over repetitions.
        backward_ms: Median of the backward for inputs and weights.
        spread: Interquartile range of the forward over its median.
    """

    rows: int
    pairs: int
    forward_ms: float
    backward_ms: float
    spread: float


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """What was measured of one distinct layer.

    Attributes:
        kind: The layer's kind.
        key: :func:`layer_key` of its shape.
        tp: Tensor-parallel ranks it was measured with.
        forward: Fit of the forward.
        backward: Fit of the backward, all of it trained.
        measurements: The timings.
    """

    kind: str
    key: str
    tp: int
    forward: Fit
    backward: Fit
    measurements: tuple[Measurement, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Timings of a model's layers on one device.

    Attributes:
        device: Name of the device.
        dtype: Number format.
        versions: Versions of python, torch and transformers.
        threads: Threads torch used (CPU).
        model: Name of the model.
        layers: One entry per distinct layer and TP size.
    """

    device: str
    dtype: str
    versions: Mapping[str, str]
    threads: int
    model: str
    layers: tuple[LayerProfile, ...]

    def to_json(self) -> str:
        """The record as text."""
        record = {"version": PROFILE_VERSION, **asdict(self)}
        return json.dumps(record, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Inverse of :meth:`to_json`.

        Raises:
            ConfigError: If the text is not a profile of this version.
        """
        try:
            record = json.loads(text)
            version = record.pop("version", None)
            if version != PROFILE_VERSION:
                raise ConfigError(
                    f"The profile's version is {version!r}",
                    limit=f"version {PROFILE_VERSION}",
                    remedy="measure again with entrain-profile",
                )
            layers = tuple(_layer_profile(item) for item in record.pop("layers"))
            return cls(layers=layers, **record)
        except (json.JSONDecodeError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"The profile cannot be read: {error}", remedy="measure again with entrain-profile"
            ) from error

    def require(self, *, device: str, dtype: str, allow_other: bool = False) -> None:
        """Refuse a profile of another device or number format.

        Args:
            device: Device the plan is for.
            dtype: Number format the plan is for.
            allow_other: The user said that it is fine.

        Raises:
            ConfigError: Naming both.
        """
        for name, wanted in (("device", device), ("dtype", dtype)):
            found = getattr(self, name)
            if found != wanted and not allow_other:
                raise ConfigError(
                    f"The profile's {name} is {found!r}, wanted is {wanted!r}",
                    limit="times of one device say nothing of another",
                    remedy="measure there with entrain-profile, or set allow_other_device=true",
                )


def layer_key(layer: Layer) -> str:
    """Short digest of a layer's shape: layers of equal shape share their measurements."""
    shape = (layer.kind, layer.linears, layer.attention, layer.lookup_parameters)
    return hashlib.sha256(repr(shape).encode()).hexdigest()[:16]


def fit_times(rows: Sequence[float], pairs: Sequence[float], times_ms: Sequence[float]) -> Fit:
    """Non-negative least squares of relative errors.

    Exact for three coefficients: the optimum is the best of the unconstrained solutions over all
    subsets of coefficients that are non-negative themselves.

    Args:
        rows: Rows per measurement.
        pairs: Query-key pairs per measurement; all 0 where there is no attention.
        times_ms: Measured milliseconds, above 0.

    Raises:
        ConfigError: If there are no measurements or a time is not above 0.
    """
    times = np.asarray(times_ms, dtype=np.float64)
    if times.size == 0 or not np.all(np.isfinite(times) & (times > 0)):
        raise ConfigError(f"Measured times are {times.tolist()}", limit="above 0, at least one")
    table = np.stack([np.asarray(pairs), np.asarray(rows), np.ones_like(times)], axis=1)
    scaled = table / times[:, None]
    best: NDArray[np.float64] = np.array([0.0, 0.0, float(times.mean())])
    best_error = math.inf
    for size in range(1, 4):
        for chosen in itertools.combinations(range(3), size):
            columns = scaled[:, chosen]
            norms = np.linalg.norm(columns, axis=0)
            if np.any(norms == 0):
                continue
            solution, *_ = np.linalg.lstsq(columns / norms, np.ones(len(times)), rcond=None)
            if np.any(solution < 0):
                continue
            candidate = np.zeros(3)
            candidate[list(chosen)] = solution / norms
            error = float(np.sum((scaled @ candidate - 1) ** 2))
            if error < best_error * (1 - 1e-12):
                best, best_error = candidate, error
    residual = math.sqrt(float(np.mean((scaled @ best - 1) ** 2)))
    return Fit(
        per_pair=float(best[0]),
        per_row=float(best[1]),
        constant=float(best[2]),
        residual=residual,
    )


@dataclass(frozen=True)
class MeasuredCostModel:
    """Times from a profile; operations and memory from the shapes.

    Attributes:
        profile: The measurements.
    """

    profile: Profile

    @property
    def name(self) -> str:
        """``measured`` and the device."""
        return f"measured ({self.profile.device}, {self.profile.dtype})"

    @property
    def tp_sizes(self) -> tuple[int, ...] | None:
        """Sizes that were measured."""
        return tuple(sorted({item.tp for item in self.profile.layers}))

    def layer_cost(
        self,
        module: str,
        layer: Layer,
        load: Load,
        training: Training,
        *,
        tp: int = 1,
        cp: int = 1,
        rows_together: float | None = None,
    ) -> LayerCost:
        """See :meth:`lightning_entrain.workload.costs.CostModel.layer_cost`."""
        times = self.layer_times(
            module, layer, load, training, tp=tp, cp=cp, rows_together=rows_together
        )
        linear, attention = linear_flops(layer, load) / tp, attention_flops(layer, load) / tp
        flows = training.needs_input_gradient(module, layer)
        full = training.mode_of(module, layer) == "full"
        kept, state = memory_cost(module, layer, load, training, tp=tp, cp=cp)
        return LayerCost(
            forward_ms=times.forward_ms,
            input_ms=times.input_ms,
            weight_ms=times.weight_ms,
            forward_flops=layer_flops(layer, load) / tp,
            backward_flops=linear * (float(flows) + float(full)) + 2.5 * attention,
            saved_bytes=kept,
            state_bytes=state,
        )

    def layer_times(
        self,
        module: str,
        layer: Layer,
        load: Load,
        training: Training,
        *,
        tp: int = 1,
        cp: int = 1,
        rows_together: float | None = None,
    ) -> LayerTimes:
        """See :meth:`lightning_entrain.workload.costs.CostModel.layer_times`."""
        check_parallelism(layer, tp=tp, cp=cp)
        if cp != 1:
            raise ConfigError(f"cp is {cp}", limit="profiles are measured with cp 1")
        found = self._find(layer, tp)
        rows, pairs = layer_rows_and_pairs(layer, load)
        share = np.sign(load.rows) if rows_together is None else load.rows / rows_together
        forward = found.forward.predict(pairs, rows, share)
        backward = found.backward.predict(pairs, rows, share)
        linear, attention = linear_flops(layer, load) / tp, attention_flops(layer, load) / tp
        mode = training.mode_of(module, layer)
        flows, full = training.needs_input_gradient(module, layer), mode == "full"
        # Half of the matrix multiplications of a backward are the weights' part.
        whole = 2.0 * linear + 2.5 * attention
        weights = np.where(whole > 0, linear / np.maximum(whole, 1e-30), 0.5)
        input_ms = backward * (1 - weights) if flows or mode != "frozen" else 0.0 * backward
        if flows or mode != "frozen":
            input_ms = input_ms + training.recomputed_forwards(module, layer) * forward
        return LayerTimes(
            forward_ms=forward,
            input_ms=input_ms,
            weight_ms=backward * weights if full else 0.0 * backward,
        )

    def _find(self, layer: Layer, tp: int) -> LayerProfile:
        key = layer_key(layer)
        for item in self.profile.layers:
            if item.key == key and item.tp == tp:
                return item
        raise ConfigError(
            f"The profile of {self.profile.model!r} has no {layer.kind} of this shape at tp {tp}",
            limit="a profile of the same model and tensor parallelism",
            remedy="measure this model with entrain-profile, or plan with the analytic model",
        )


def layer_rows_and_pairs(layer: Layer, load: Load) -> tuple[FloatArray, FloatArray]:
    """Rows that a layer's matrices see, and its query-key pairs."""
    merged = bool(layer.linears) and all(item.axis is Axis.MERGED for item in layer.linears)
    rows = load.merged if merged else load.rows
    if layer.attention is None:
        return rows, np.zeros_like(load.rows)
    return rows, load.pairs[layer.attention.pattern]


def _layer_profile(item: Mapping[str, Any]) -> LayerProfile:
    known = {field.name for field in fields(LayerProfile)}
    values = {name: item[name] for name in known}
    values["forward"] = Fit(**item["forward"])
    values["backward"] = Fit(**item["backward"])
    values["measurements"] = tuple(Measurement(**entry) for entry in item["measurements"])
    return LayerProfile(**values)
