"""The executor: a plain loop over one rank's verified list of actions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_entrain.data.batch import PlannedBatch
from lightning_entrain.errors import RuntimeMismatchError
from lightning_entrain.models.entrain_model import EntrainModel
from lightning_entrain.plan.layout import StageLayout
from lightning_entrain.runtime.accumulate import GradientAccumulator
from lightning_entrain.runtime.recorder import StepRecorder
from lightning_entrain.runtime.stages import StageRunner
from lightning_entrain.runtime.state import StepState, StepSums
from lightning_entrain.runtime.transfer import Transfers
from lightning_entrain.runtime.weight_store import WeightStore
from lightning_entrain.schedule.graph import Edge, StepGraph
from lightning_entrain.schedule.lower import Program
from lightning_entrain.schedule.types import Action, ActionKind, RowCounts


class Executor:
    """Runs the stages of one rank (Entrain, section 5.3).

    F runs a microbatch, one forward per segment where samples are deferred, so that each segment
    can go backward by itself. B goes backward through a microbatch or a segment; I does so without
    the weight gradients of linear layers, and W computes those.

    Args:
        model: The model; only the layers of this rank's stages need to be present.
        layout: Stages of the replica.
        rank: This rank's place inside the replica.
        transfers: Messages to and from the neighbours.
        wire_dtype: Type of boundary tensors.
        accumulator: Where gradients are added.
        weight_store: Where I leaves the work of W.
    """

    def __init__(
        self,
        model: EntrainModel,
        layout: StageLayout,
        rank: int,
        transfers: Transfers,
        *,
        wire_dtype: torch.dtype,
        accumulator: GradientAccumulator,
        weight_store: WeightStore,
    ) -> None:
        self._model = model
        self._stages = StageRunner(model, layout, wire_dtype)
        self._rank = rank
        self._transfers = transfers
        self._accumulator = accumulator
        self._weight_store = weight_store
        self._compute: dict[ActionKind, Callable[[Action, StepState], None]] = {
            ActionKind.F: self._forward,
            ActionKind.B: self._backward,
            ActionKind.I: self._backward,
            ActionKind.W: self._weights,
        }

    def run(
        self,
        program: Program,
        rows: RowCounts,
        batch: PlannedBatch,
        replica: int,
        *,
        train: bool,
        device: torch.device,
        recorder: StepRecorder,
    ) -> StepSums:
        """Run one step of this rank.

        Args:
            program: A lowered and verified schedule.
            rows: The rows it was made for.
            batch: The global batch with the tensors this rank needs.
            replica: Which of the assignment's replicas this rank works on.
            train: Whether backward actions follow, so that graphs are kept.
            device: Where the sums live.
            recorder: Notes when each action ran.

        Returns:
            This rank's sums; gradients are left in the accumulator.
        """
        zero = torch.zeros((), dtype=torch.float64, device=device)
        state = StepState(
            program=program,
            graph=StepGraph(program.schedule.placement, rows),
            segments=batch.assignment.replicas[replica].segments(),
            batch=batch,
            replica=replica,
            train=train,
            sums=StepSums(loss=zero, scalars={name: zero.clone() for name in self._model.scalars}),
        )
        own = program.schedule.ranks[self._rank]
        self._weight_store.enable(any(action.kind is ActionKind.W for action in own))
        action: Action | None = None
        try:
            for action in own:
                self._execute(action, state, recorder)
            with recorder.draining():
                self._transfers.drain()
        except Exception as error:
            self._transfers.reset()
            self._accumulator.clear()
            if hasattr(error, "add_note"):  # Python 3.11
                waited = _waited_for(recorder.activity.waits_for, program)
                error.add_note(f"while rank {self._rank} of replica {replica} ran {action}{waited}")
            raise
        if left := state.leftovers():
            raise RuntimeMismatchError(
                f"Rank {self._rank} ended a step with state left over: {left}",
                limit="a step leaves nothing behind",
            )
        return state.sums

    def _execute(self, action: Action, state: StepState, recorder: StepRecorder) -> None:
        if action.kind.is_compute:
            arrived = [
                edge
                for edge in state.graph.inputs(action)
                if not state.graph.is_local(edge) and state.graph.num_rows(edge)
            ]
            for edge in arrived:
                with recorder.waiting(edge.receive):
                    state.local[edge] = self._transfers.take(state.program.messages[edge.receive])
            with recorder.computing(action):
                self._compute[action.kind](action, state)
        elif action.kind.is_send:
            edge = _edge_of(action, state)
            with recorder.waiting(action):
                self._transfers.send(state.program.messages[action], state.outgoing.pop(edge))
        else:
            self._transfers.post_receive(state.program.messages[action])

    # --- forward ----------------------------------------------------------------------------

    def _forward(self, action: Action, state: StepState) -> None:
        with torch.set_grad_enabled(state.goes_backward(action.stage)):
            if state.graph.is_encoder(action.stage):
                self._encoder_forward(action, state)
            else:
                self._llm_forward(action, state)

    def _encoder_forward(self, action: Action, state: StepState) -> None:
        stage, k = action.stage, action.microbatch
        whole = None
        for edge in state.graph.inputs(action):
            whole = state.local.pop(edge)
        outputs: dict[int, Tensor] = {}
        returns = state.goes_backward(stage - 1)
        for j, rows in self._stages.encoder_inputs(stage, k, whole, state).items():
            leaf = _leaf(rows, returns)
            output = self._stages.encoder(stage, k, j, leaf, state)
            if state.goes_backward(stage):
                state.outputs[stage, k, j] = output
            if returns:
                state.inputs[stage, k, j] = leaf
            outputs[j] = output.detach()
        for edge in state.graph.outputs(action):
            joined = list(outputs.values()) if edge.target is None else [outputs[edge.target]]
            self._deliver(edge, _join(joined), state)

    def _llm_forward(self, action: Action, state: StepState) -> None:
        stage, j = action.stage, action.microbatch
        edges = state.graph.inputs(action)
        returns = state.goes_backward(stage - 1)
        inputs: Tensor | None
        if stage == state.graph.num_encoder:
            parts = {e.microbatch: _leaf(state.local.pop(e), returns) for e in edges}
            inputs = self._stages.features(j, parts, state)
            if returns:
                state.features[j] = parts
        else:
            inputs = _leaf(state.local.pop(edges[0]), returns)
            if returns:
                state.inputs[stage, j, j] = inputs
        output = self._stages.llm(stage, j, inputs, state)
        if stage == state.graph.last:
            output = self._stages.loss(j, output, state)
        if state.goes_backward(stage):
            state.outputs[stage, j, j] = output
        for edge in state.graph.outputs(action):
            self._deliver(edge, output.detach(), state)

    # --- backward ---------------------------------------------------------------------------

    def _backward(self, action: Action, state: StepState) -> None:
        stage, microbatch = action.stage, action.microbatch
        targets = self._targets(action, state)
        gradients = self._output_gradients(action, targets, state)
        for j in targets:
            piece = (stage, microbatch, j)
            output = state.outputs.pop(piece)
            if output.requires_grad:
                self._run_autograd(action, output, gradients[j], piece, state)
            elif action.kind is ActionKind.I:
                state.weights[piece] = []
        for edge in state.graph.outputs(action):
            if stage == state.graph.num_encoder:
                leaves = [state.features[microbatch].pop(edge.microbatch)]
            elif edge.target is None:
                leaves = [state.inputs.pop((stage, microbatch, j)) for j in targets]
            else:
                leaves = [state.inputs.pop((stage, microbatch, edge.target))]
            self._deliver(edge, _join([_gradient_of(leaf) for leaf in leaves]), state)
        if stage == state.graph.num_encoder and not state.features.get(microbatch, True):
            state.features.pop(microbatch)

    def _run_autograd(
        self,
        action: Action,
        output: Tensor,
        gradient: Tensor | None,
        piece: tuple[int, int, int],
        state: StepState,
    ) -> None:
        def backward() -> None:
            with torch.autocast(output.device.type, enabled=False):
                torch.autograd.backward(output, gradient)

        if action.kind is ActionKind.I:
            state.weights[piece] = self._weight_store.collect(backward)
        else:
            backward()

    def _weights(self, action: Action, state: StepState) -> None:
        for j in self._targets(action, state):
            self._weight_store.flush(state.weights.pop((action.stage, action.microbatch, j)))

    def _targets(self, action: Action, state: StepState) -> tuple[int, ...]:
        if action.target is not None:
            return (action.target,)
        return state.graph.targets(action.stage, action.microbatch)

    def _output_gradients(
        self, action: Action, targets: Sequence[int], state: StepState
    ) -> dict[int, Tensor | None]:
        """Gradient of each piece's output, by target; None where the loss itself is the output."""
        edges = state.graph.inputs(action)
        if not edges:
            return dict.fromkeys(targets)
        tensors = [state.local.pop(edge) for edge in edges]
        if len(edges) == len(targets):
            return dict(zip(targets, tensors, strict=True))
        lengths = [state.outputs[action.stage, action.microbatch, j].shape[0] for j in targets]
        return dict(zip(targets, tensors[0].split(lengths), strict=True))

    # --- hand-over --------------------------------------------------------------------------

    def _deliver(self, edge: Edge, tensor: Tensor, state: StepState) -> None:
        """Hand a tensor over inside the rank, or keep it for its send action."""
        if state.graph.is_local(edge):
            state.local[edge] = tensor
        else:
            state.outgoing[edge] = tensor


def _waited_for(what: object, program: Program) -> str:
    """The peer of a transfer that a rank waits for, in words; empty if it waits for none."""
    if not isinstance(what, Action) or what not in program.messages:
        return ""
    message = program.messages[what]
    peer = message.target_rank if what.kind.is_send else message.source_rank
    return f", waiting for rank {peer} in {what}"


def _edge_of(send: Action, state: StepState) -> Edge:
    message = state.program.messages[send]
    return Edge(
        send.kind is ActionKind.SEND_F,
        message.source_stage,
        message.target_stage,
        message.microbatch,
        message.target,
    )


def _leaf(rows: Tensor, returns: bool) -> Tensor:
    """Rows that start a graph of their own, if a gradient is to be returned for them."""
    return rows.detach().requires_grad_() if returns else rows


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _gradient_of(leaf: Tensor) -> Tensor:
    """The gradient that reached a stage's input; zero where no path leads to it."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
