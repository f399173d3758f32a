"""The executor: a plain loop over one rank's verified list of actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_entrain.data.batch import PlannedBatch
from lightning_entrain.errors import RuntimeMismatchError
from lightning_entrain.models.entrain_model import EntrainModel, gather_features
from lightning_entrain.plan.layout import StageLayout
from lightning_entrain.runtime.transfer import Transfers
from lightning_entrain.schedule.lower import Message, Program
from lightning_entrain.schedule.types import Action, ActionKind

_Key = tuple[int, int]  # (stage, microbatch)


@dataclass
class StepSums:
    """What a rank's last stage adds up over a step; zero elsewhere.

    Attributes:
        loss: Sum of the cross entropies over label tokens, float64 scalar.
        scalars: Sums of the model's scalar hooks, by name.
    """

    loss: Tensor
    scalars: dict[str, Tensor]


@dataclass
class _StepState:
    batch: PlannedBatch
    replica: int
    train: bool
    sums: StepSums
    inputs: dict[_Key, Tensor] = field(default_factory=dict)
    outputs: dict[_Key, Tensor] = field(default_factory=dict)
    features: dict[_Key, dict[_Key, Tensor]] = field(default_factory=dict)
    inbox: dict[Action, Tensor] = field(default_factory=dict)
    outbox: dict[Action, Tensor] = field(default_factory=dict)

    def leftovers(self) -> list[str]:
        found = []
        for name in ("inputs", "outputs", "features", "inbox", "outbox"):
            if getattr(self, name):
                found.append(f"{name}: {', '.join(str(key) for key in getattr(self, name))}")
        return found


class Executor:
    """Runs the stages of one rank.

    Args:
        model: The model; only the layers of this rank's stages need to be present.
        layout: Stages of the replica.
        rank: This rank's place inside the replica.
        transfers: Messages to and from the neighbours.
        wire_dtype: Type of boundary tensors.
    """

    def __init__(
        self,
        model: EntrainModel,
        layout: StageLayout,
        rank: int,
        transfers: Transfers,
        wire_dtype: torch.dtype,
    ) -> None:
        self._model = model
        self._layout = layout
        self._rank = rank
        self._transfers = transfers
        self._wire_dtype = wire_dtype
        self._program: Program | None = None
        self._on_action: Callable[[Action], None] | None = None

    def run(self, program: Program, batch: PlannedBatch, replica: int, *, train: bool) -> StepSums:
        """Run one step of this rank.

        Args:
            program: A lowered and verified schedule.
            batch: The global batch with the tensors this rank needs.
            replica: Which of the assignment's replicas this rank works on.
            train: Whether backward actions follow, so that graphs are kept.

        Returns:
            This rank's sums; gradients are left in ``p.grad``.
        """
        device = next(iter(self._model.parameters()), torch.empty(0)).device
        zero = torch.zeros((), dtype=torch.float64, device=device)
        sums = StepSums(loss=zero, scalars={name: zero.clone() for name in self._model.scalars})
        state = _StepState(batch=batch, replica=replica, train=train, sums=sums)
        self._program = program
        action: Action | None = None
        try:
            for action in program.schedule.ranks[self._rank]:
                self._execute(action, state)
            self._transfers.drain()
        except Exception as error:
            self._transfers.reset()
            note = f"while rank {self._rank} of replica {replica} ran {action}"
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(note)
            raise
        if left := state.leftovers():
            raise RuntimeMismatchError(
                f"Rank {self._rank} ended a step with state left over ({'; '.join(left)})",
                limit="a step leaves nothing behind",
            )
        return sums

    def _execute(self, action: Action, state: _StepState) -> None:
        kind = action.kind
        if kind is ActionKind.F:
            self._forward(action, state)
        elif kind is ActionKind.B:
            self._backward(action, state)
        elif kind in (ActionKind.RECV_F, ActionKind.RECV_B):
            self._transfers.post_receive(self._message(action))
        elif kind in (ActionKind.SEND_F, ActionKind.SEND_B):
            self._transfers.send(self._message(action), state.outbox.pop(action))
        else:
            raise RuntimeMismatchError(f"The executor does not know action {action}")

    def _forward(self, action: Action, state: _StepState) -> None:
        stage, microbatch = action.stage, action.microbatch
        output: Tensor | None
        with torch.set_grad_enabled(state.train):
            if stage < self._layout.num_encoder_stages:
                output = self._encoder_forward(stage, microbatch, state)
            else:
                output = self._llm_forward(stage, microbatch, state)
        if output is None:
            return
        if state.train:
            state.outputs[stage, microbatch] = output
        self._deliver_forward(stage, microbatch, output.detach(), state)

    def _encoder_forward(self, stage: int, k: int, state: _StepState) -> Tensor:
        start, stop = self._layout.encoder_ranges[stage]
        if stage == 0:
            inputs = state.batch.pixels[state.replica, k]
        else:
            inputs = self._boundary_input(stage, k, state)
        packing = state.batch.encoder_packing(state.replica, k)
        output = self._model.encoder_stage(inputs, packing, start=start, stop=stop)
        return output.to(self._wire_dtype)

    def _llm_forward(self, stage: int, j: int, state: _StepState) -> Tensor | None:
        first = self._layout.num_encoder_stages
        start, stop = self._layout.llm_ranges[stage - first]
        packing = state.batch.llm_packing(state.replica, j)
        input_ids = None
        inputs: Tensor | None
        if stage == first:
            input_ids = state.batch.input_ids[state.replica, j]
            inputs = self._features_of(stage, j, state)
        else:
            inputs = self._boundary_input(stage, j, state)
        output = self._model.llm_stage(inputs, packing, start=start, stop=stop, input_ids=input_ids)
        if stage < self._layout.num_stages - 1:
            return output.to(self._wire_dtype)
        self._finish_microbatch(stage, j, output, state)
        return None

    def _finish_microbatch(self, stage: int, j: int, logits: Tensor, state: _StepState) -> None:
        labels = state.batch.labels[state.replica, j]
        loss = self._model.loss_sum(logits, labels)
        with torch.no_grad():
            state.sums.loss += loss.detach().double()
            for name, value in self._model.scalar_sums(logits, labels).items():
                state.sums.scalars[name] += value.detach().double()
        if state.train:
            state.outputs[stage, j] = loss / max(state.batch.num_label_tokens, 1)

    def _boundary_input(self, stage: int, microbatch: int, state: _StepState) -> Tensor:
        tensor = self._take(Action(stage, ActionKind.RECV_F, microbatch), state)
        if state.train:
            tensor.requires_grad_()
            state.inputs[stage, microbatch] = tensor
        return tensor

    def _features_of(self, stage: int, j: int, state: _StepState) -> Tensor | None:
        """Vision features of LLM microbatch j in the order of its placeholders."""
        segments = state.batch.assignment.replicas[state.replica].segments()
        parts: dict[_Key, Tensor] = {}
        for k, target in segments:
            if target == j:
                tensor = self._take(Action(stage, ActionKind.RECV_F, k, j), state)
                parts[k, j] = tensor.requires_grad_() if state.train else tensor
        if state.train:
            state.features[stage, j] = parts
        if not parts:
            return None
        row = state.batch.assignment.replicas[state.replica].llm[j]
        held = [(segments[key], tensor) for key, tensor in parts.items()]
        return gather_features(row, held, state.batch.sizes)

    def _backward(self, action: Action, state: _StepState) -> None:
        stage, microbatch = action.stage, action.microbatch
        output = state.outputs.pop((stage, microbatch))
        gradient = None
        if stage < self._layout.num_stages - 1:
            gradient = self._output_gradient(stage, microbatch, state)
        if output.requires_grad:
            with torch.autocast(output.device.type, enabled=False):
                torch.autograd.backward(output, gradient)
        self._deliver_backward(stage, microbatch, state)

    def _output_gradient(self, stage: int, microbatch: int, state: _StepState) -> Tensor:
        if stage == self._layout.num_encoder_stages - 1:
            return self._take(Action(stage, ActionKind.RECV_B, microbatch, microbatch), state)
        return self._take(Action(stage, ActionKind.RECV_B, microbatch), state)

    def _deliver_forward(self, stage: int, k: int, tensor: Tensor, state: _StepState) -> None:
        target = k if stage == self._layout.num_encoder_stages - 1 else None
        self._deliver(
            Action(stage, ActionKind.SEND_F, k, target),
            Action(stage + 1, ActionKind.RECV_F, k, target),
            tensor,
            state,
        )

    def _deliver_backward(self, stage: int, microbatch: int, state: _StepState) -> None:
        first = self._layout.num_encoder_stages
        if stage == first:
            for (k, j), leaf in state.features.pop((stage, microbatch)).items():
                self._deliver(
                    Action(stage, ActionKind.SEND_B, k, j),
                    Action(stage - 1, ActionKind.RECV_B, k, j),
                    _gradient_of(leaf),
                    state,
                )
        elif stage > 0:
            self._deliver(
                Action(stage, ActionKind.SEND_B, microbatch),
                Action(stage - 1, ActionKind.RECV_B, microbatch),
                _gradient_of(state.inputs.pop((stage, microbatch))),
                state,
            )

    def _deliver(self, send: Action, receive: Action, tensor: Tensor, state: _StepState) -> None:
        """Hand a tensor over inside the rank, or leave it for its send action."""
        owner = self._layout.placement.stage_to_rank
        if owner[send.stage] == owner[receive.stage]:
            state.inbox[receive] = tensor
        else:
            state.outbox[send] = tensor

    def _take(self, receive: Action, state: _StepState) -> Tensor:
        if receive in state.inbox:
            return state.inbox.pop(receive)
        return self._transfers.take(self._message(receive))

    def _message(self, action: Action) -> Message:
        assert self._program is not None
        return self._program.messages[action]


def _gradient_of(leaf: Tensor) -> Tensor:
    """The gradient that reached a stage's input; zero where no path leads to it."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
