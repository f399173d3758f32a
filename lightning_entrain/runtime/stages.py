"""Forward and backward of single stages, on packed rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from lightning_entrain.models.entrain_model import EntrainModel, gather_features
from lightning_entrain.models.protocol import EncoderPacking, PipelineModule
from lightning_entrain.plan.layout import StageLayout
from lightning_entrain.runtime.state import StepState
from lightning_entrain.workload.sizes import total_label_tokens


class StageRunner:
    """Runs the layers of a stage on the rows of a microbatch or segment.

    Args:
        model: The model; only the layers of this rank's stages need to be present.
        layout: Stages of the replica.
        wire_dtype: Type of boundary tensors.
    """

    def __init__(self, model: EntrainModel, layout: StageLayout, wire_dtype: torch.dtype) -> None:
        self._model = model
        self._layout = layout
        self._wire_dtype = wire_dtype
        self._carried_dtypes: dict[int, torch.dtype] = {}

    def encoder_inputs(
        self, stage: int, k: int, whole: Tensor | None, state: StepState
    ) -> dict[int, Tensor]:
        """Rows of each segment of an encoder microbatch, by destination.

        Args:
            stage: Encoder stage; the first reads the batch's pixels.
            k: Encoder microbatch.
            whole: Rows of the microbatch from the stage before, segment after segment.
            state: The step.
        """
        targets = state.graph.targets(stage, k)
        if stage > 0:
            assert whole is not None
            if len(targets) == 1:
                return {targets[0]: whole}
            lengths = [state.graph.rows.patches_of((k, j)) for j in targets]
            return dict(zip(targets, whole.split(lengths), strict=True))
        pixels = state.batch.pixels[state.replica, k]
        if len(targets) == 1:
            return {targets[0]: pixels}
        entry = state.batch.assignment.replicas[state.replica].encoder[k]
        rows = pixels.split([state.batch.sizes[i].num_patches for i in entry])
        by_sample = dict(zip(entry, rows, strict=True))
        return {j: torch.cat([by_sample[i] for i in self._samples(k, j, state)]) for j in targets}

    def encoder(self, stage: int, k: int, j: int, rows: Tensor, state: StepState) -> Tensor:
        """Forward of one segment: hidden ``[patches, columns]``, features ``[merged, columns]``."""
        start, stop = self._layout.encoder_ranges[stage]
        samples = self._samples(k, j, state)
        if stage > 0:
            rows = self._as_computed(stage, rows)
        grids = tuple(grid for i in samples for grid in state.batch.sizes[i].grids)
        with self._model.encoder_rows(samples, state.batch.sizes):
            output = self._model.encoder_stage(
                rows, EncoderPacking(grids=grids), start=start, stop=stop
            )
        return output.to(self._wire_dtype)

    def llm(self, stage: int, j: int, inputs: Tensor | None, state: StepState) -> Tensor:
        """Forward of an LLM microbatch: hidden ``[tokens, columns]`` or logits."""
        first = self._layout.num_encoder_stages
        start, stop = self._layout.llm_ranges[stage - first]
        row = state.batch.assignment.replicas[state.replica].llm[j]
        if inputs is not None:
            inputs = self._as_computed(stage, inputs)
        with self._model.llm_rows(row, state.batch.sizes):
            output = self._model.llm_stage(
                inputs,
                state.batch.llm_packing(state.replica, j),
                start=start,
                stop=stop,
                input_ids=state.batch.input_ids[state.replica, j] if stage == first else None,
            )
        return output if stage == state.graph.last else output.to(self._wire_dtype)

    def features(self, j: int, parts: dict[int, Tensor], state: StepState) -> Tensor | None:
        """Vision features of an LLM microbatch in the order of its placeholders.

        Args:
            j: LLM microbatch.
            parts: Features by the encoder microbatch they come from.
            state: The step.
        """
        row = state.batch.assignment.replicas[state.replica].llm[j]
        held: Sequence[tuple[Sequence[int], Tensor]] = [
            (self._samples(k, j, state), tensor) for k, tensor in parts.items()
        ]
        return gather_features(row, held, state.batch.sizes)

    def loss(self, j: int, logits: Tensor, state: StepState) -> Tensor:
        """Add a microbatch to the step's sums; returns its share of the mean loss."""
        labels = state.batch.labels[state.replica, j]
        row = state.batch.assignment.replicas[state.replica].llm[j]
        num_labels = total_label_tokens([state.batch.sizes[i] for i in row])
        loss = self._model.labelled_loss_sum(logits, labels, num_labels)
        with torch.no_grad():
            state.sums.loss += loss.detach().double()
            for name, value in self._model.scalar_sums(logits, labels).items():
                state.sums.scalars[name] += value
        return loss / max(state.batch.num_label_tokens, 1)

    def _as_computed(self, stage: int, rows: Tensor) -> Tensor:
        """Boundary rows in the type that the stage's layers carry on in.

        With bf16-mixed the sum of a layer and its input is kept in float32 on one process, and
        would be in bfloat16 if the input were.
        """
        if not rows.is_floating_point():
            return rows
        if stage not in self._carried_dtypes:
            found = carried_dtype(self._layers(stage))
            self._carried_dtypes[stage] = found or self._wire_dtype
        return rows.to(self._carried_dtypes[stage])

    def _layers(self, stage: int) -> list[nn.Module]:
        layout = self._layout
        in_encoder = stage < layout.num_encoder_stages
        module: PipelineModule = self._model.encoder if in_encoder else self._model.llm
        start, stop = (*layout.encoder_ranges, *layout.llm_ranges)[stage]
        return [module.get_submodule(name) for name in module.layer_names()[start:stop]]

    def _samples(self, k: int, j: int, state: StepState) -> tuple[int, ...]:
        return state.segments[k, j]


def carried_dtype(layers: Iterable[nn.Module]) -> torch.dtype | None:
    """The type in which layers pass on their sum: that of most of their weights.

    LoRA adapters do not count: what they compute is cast to the base layer's type.
    """
    sizes: Counter[torch.dtype] = Counter()
    for layer in layers:
        for name, parameter in layer.named_parameters():
            if parameter.is_floating_point() and "lora_" not in name:
                sizes[parameter.dtype] += parameter.numel()
    return sizes.most_common(1)[0][0] if sizes else None
