"""Optimizer state between the parts that ranks hold and the whole of a single device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_entrain.checkpoint.gather import TensorGather
from lightning_entrain.errors import CheckpointError

_KEYED_BY_PARAMETER = ("params", "param_names")


@dataclass(frozen=True)
class OptimizerLayout:
    """Names of an optimizer's parameters, group by group, as on a single device."""

    groups: tuple[tuple[str, ...], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All names in the order of torch's parameter ids."""
        return tuple(name for group in self.groups for name in group)


def record_layout(optimizer: Optimizer, names: Mapping[Tensor, str]) -> OptimizerLayout:
    """Note which parameter is where in a freshly configured optimizer.

    Raises:
        CheckpointError: If the optimizer holds a parameter that the module does not have.
    """
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in names:
                raise CheckpointError(
                    f"{type(optimizer).__name__} group {index} holds a parameter of shape "
                    f"{tuple(parameter.shape)} that is not in the LightningModule",
                    limit="optimizers hold parameters of the module",
                    remedy="build the optimizer from self.parameters() in configure_optimizers",
                )
        groups.append(tuple(names[parameter] for parameter in group["params"]))
    return OptimizerLayout(groups=tuple(groups))


def prune_optimizer(optimizer: Optimizer, kept: set[nn.Parameter]) -> None:
    """Drop the parameters of other ranks; groups stay, even when they end up empty."""
    for group in optimizer.param_groups:
        keep = [parameter in kept for parameter in group["params"]]
        for key in _KEYED_BY_PARAMETER:
            if key in group:
                values = zip(group[key], keep, strict=True)
                group[key] = [value for value, wanted in values if wanted]
    for parameter in [p for p in optimizer.state if p not in kept]:
        del optimizer.state[parameter]


def full_optimizer_state(
    optimizer: Optimizer,
    layout: OptimizerLayout,
    names: Mapping[Tensor, str],
    gather: TensorGather,
) -> dict[str, Any]:
    """The state dict the optimizer would have on one device; complete on rank 0.

    Args:
        optimizer: This rank's pruned optimizer.
        layout: Its parameters on a single device.
        names: Names of this rank's parameters; those without a name are another rank's to give.
        gather: Brings the parts of all ranks to rank 0.
    """
    own = {names[p]: state for p, state in optimizer.state.items() if p in names}
    collected = gather(own)
    ids = {name: index for index, name in enumerate(layout.names)}
    groups = []
    for group, group_names in zip(optimizer.param_groups, layout.groups, strict=True):
        packed = {k: v for k, v in group.items() if k not in _KEYED_BY_PARAMETER}
        if "param_names" in group:
            packed["param_names"] = list(group_names)
        groups.append({**packed, "params": [ids[name] for name in group_names]})
    state = {ids[name]: collected[name] for name in layout.names if name in collected}
    return {"state": state, "param_groups": groups}


def load_optimizer_state(
    optimizer: Optimizer,
    layout: OptimizerLayout,
    names: Mapping[Tensor, str],
    saved: Mapping[str, Any],
    saved_names: Sequence[str] | None = None,
) -> None:
    """Load this rank's part of a single-device optimizer state.

    Args:
        optimizer: This rank's pruned optimizer.
        layout: Its parameters on a single device.
        names: Names of this rank's parameters.
        saved: State dict of the optimizer on a single device; entries of other ranks may lack.
        saved_names: The parameters' names in the order of their ids, if the checkpoint tells them.

    Raises:
        CheckpointError: If the saved groups are not those of this optimizer.
    """
    sizes = [len(group["params"]) for group in saved["param_groups"]]
    expected = [len(group) for group in layout.groups]
    if sizes != expected:
        raise CheckpointError(
            f"The checkpoint's optimizer has parameter groups of {sizes} parameters",
            limit=f"this run's {type(optimizer).__name__} has {expected}",
            remedy="configure the optimizer as in the run that wrote the checkpoint, or load the "
            "weights alone",
        )
    saved_ids = {
        name: index
        for group, group_names in zip(saved["param_groups"], layout.groups, strict=True)
        for index, name in zip(group["params"], group_names, strict=True)
    }
    if saved_names is not None:
        by_name = {name: index for index, name in enumerate(saved_names)}
        if by_name != saved_ids:
            unlike = sorted(n for n in saved_ids if by_name.get(n) != saved_ids[n])
            raise CheckpointError(
                f"The checkpoint's optimizer has its parameters in another order, among them "
                f"{unlike[0]}",
                limit=f"that of this run's {type(optimizer).__name__}",
                remedy="configure the optimizer as in the run that wrote the checkpoint, or load "
                "the weights alone",
            )
    state: dict[int, Any] = {}
    groups = []
    next_id = 0
    for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        packed = {k: v for k, v in saved_group.items() if k not in _KEYED_BY_PARAMETER}
        if "param_names" in group:
            packed["param_names"] = group["param_names"]
        packed["params"] = list(range(next_id, next_id + len(group["params"])))
        next_id += len(group["params"])
        groups.append(packed)
        for local_id, parameter in zip(packed["params"], group["params"], strict=True):
            entry = saved["state"].get(saved_ids[names[parameter]])
            if entry is not None:
                # Copied: optimizers keep tensors that fit, and these may lie in a mapped file.
                state[local_id] = {key: _copied(value) for key, value in entry.items()}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def check_names(saved: Iterable[str], expected: Iterable[str]) -> None:
    """Compare the names in a checkpoint with the full model's.

    Raises:
        CheckpointError: If a name is missing or unknown.
    """
    found, wanted = set(saved), set(expected)
    for what, names in (("lacks", wanted - found), ("has unknown", found - wanted)):
        if names:
            some = ", ".join(sorted(names)[:3])
            raise CheckpointError(
                f"The checkpoint {what} {len(names)} of the model's tensors, such as {some}",
                limit="checkpoint and model have the same names",
                remedy="build the model with the configuration of the run that wrote the "
                "checkpoint, or set strict_loading=False on the LightningModule",
            )
