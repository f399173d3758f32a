"""The model users train: an encoder and an LLM, each a row of layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_entrain.data.batch import IGNORE_INDEX
from lightning_entrain.errors import ConfigError, RuntimeMismatchError
from lightning_entrain.models.batch_check import check_label_count, check_rows
from lightning_entrain.models.dropout import count_dropout, rows_of
from lightning_entrain.models.on_device import chosen_rows
from lightning_entrain.models.protocol import (
    EncoderModule,
    EncoderPacking,
    LlmModule,
    LlmPacking,
)
from lightning_entrain.models.prune import check_names
from lightning_entrain.workload.sizes import total_label_tokens

if TYPE_CHECKING:
    from lightning_entrain.assign.types import ReplicaAssignment
    from lightning_entrain.data.batch import PlannedBatch
    from lightning_entrain.workload.sizes import SampleSize

IGNORED_LABEL = IGNORE_INDEX
"""Label of positions that do not count towards the loss."""

ScalarFn = Callable[[Tensor, Tensor], Tensor]
"""Maps logits ``[tokens, vocab]`` and labels ``[tokens]`` to a sum (a scalar tensor)."""


def gather_features(
    row: Sequence[int],
    parts: Sequence[tuple[Sequence[int], Tensor]],
    sizes: Sequence[SampleSize],
) -> Tensor | None:
    """Vision features of an LLM row, in the order of the row's placeholders.

    The encoder emits features in the order of its own microbatches; the LLM row may order the same
    samples otherwise, and take them from two encoder microbatches (paper, section 5.2).

    Args:
        row: Global-batch indices of the LLM microbatch, in row order.
        parts: Per encoder output (a whole microbatch or one segment) the samples it holds, in its
            order, and its rows ``[merged, columns]``. Samples outside ``row`` are left out.
        sizes: Size of every sample of the global batch.

    Returns:
        ``[merged, columns]``, or None if no sample of the row has an image.

    Raises:
        RuntimeMismatchError: If a part has not the rows its samples announce, or a sample with
            images is in no part.
    """
    pieces: dict[int, Tensor] = {}
    for samples, features in parts:
        lengths = [sizes[index].num_vision_tokens for index in samples]
        if sum(lengths) != features.shape[0]:
            raise RuntimeMismatchError(
                f"The encoder returned {features.shape[0]} rows for samples {tuple(samples)}",
                limit=f"their {sum(lengths)} vision tokens",
            )
        pieces.update(zip(samples, features.split(lengths), strict=True))
    wanted = [index for index in row if sizes[index].num_vision_tokens]
    missing = [index for index in wanted if index not in pieces]
    if missing:
        raise RuntimeMismatchError(
            f"Sample {missing[0]} reached the LLM without its vision features",
            limit="a sample is encoded before it is decoded",
        )
    if not wanted:
        return None
    if len(parts) == 1 and wanted == [i for i in parts[0][0] if sizes[i].num_vision_tokens]:
        return parts[0][1]
    return torch.cat([pieces[index] for index in wanted])


def num_correct(logits: Tensor, labels: Tensor) -> Tensor:
    """Number of label tokens that the largest logit predicts; for token accuracy."""
    return (logits.argmax(dim=-1) == labels).sum()  # no token has the ignored label's id


class EntrainModel(nn.Module):
    """An encoder, an optional projector and an LLM that the strategy can cut into stages.

    Called with a :class:`PlannedBatch`, it returns the mean loss over the label tokens of the whole
    global batch. On one process it loops over the assignment's microbatches; under the strategy an
    attached engine runs the same batch as a pipeline and returns the same scalar. The loss does not
    depend on how samples are grouped (beyond rounding).

    Args:
        encoder: Vision encoder; its last stage also runs the projector.
        llm: Decoder.
        projector: Maps the encoder's features ``[merged, encoder.output_size]`` to
            ``[merged, llm.hidden_size]``. None if the encoder's epilogue already does.
        scalars: Further sums over logits and labels, by name, such as
            ``{"num_correct": num_correct}``. They run without gradients where the logits are.
        dropout_seed: Seed of the masks of ``nn.Dropout`` layers, which are replaced by layers with
            equal masks in every layout.

    Attributes:
        scalars_out: Global sums of the last forward (0-dim float64 tensors), by name.
    """

    def __init__(
        self,
        encoder: EncoderModule,
        llm: LlmModule,
        projector: nn.Module | None = None,
        *,
        scalars: Mapping[str, ScalarFn] | None = None,
        dropout_seed: int = 0,
    ) -> None:
        super().__init__()
        _check_columns(encoder, llm, projector)
        check_names("encoder", encoder)
        check_names("llm", llm)
        self.encoder = encoder
        self.llm = llm
        self.projector = projector
        self.scalars = dict(scalars or {})
        self.scalars_out: dict[str, Tensor] = {}
        self._engine: Callable[[PlannedBatch], Tensor] | None = None
        self.dropout_step: Tensor | None = None
        self.count_dropout(dropout_seed)

    def count_dropout(self, seed: int) -> None:
        """Replace ``nn.Dropout`` layers; called again after layers were added.

        A model with dropout counts its training steps in the buffer ``dropout_step``, so that a
        resumed run meets the masks of an uninterrupted one.

        Args:
            seed: Of the masks.
        """
        if count_dropout(self, seed) and self.dropout_step is None:
            del self.dropout_step
            self.register_buffer("dropout_step", torch.zeros((), dtype=torch.long))

    def encoder_rows(
        self, samples: Sequence[int], sizes: Sequence[SampleSize]
    ) -> AbstractContextManager[Any]:
        """Context in which dropout knows the rows of these samples in the encoder."""
        own = [sizes[i] for i in samples]
        patches, merged = [s.num_patches for s in own], [s.num_vision_tokens for s in own]
        return rows_of(samples, (patches, merged), self.dropout_step)

    def llm_rows(
        self, samples: Sequence[int], sizes: Sequence[SampleSize]
    ) -> AbstractContextManager[Any]:
        """Context in which dropout knows the rows of these samples in the LLM."""
        return rows_of(samples, ([sizes[i].num_tokens for i in samples],), self.dropout_step)

    def attach_engine(self, engine: Callable[[PlannedBatch], Tensor]) -> None:
        """Let ``engine`` answer calls of this model from now on.

        The engine returns the scalar loss and fills :attr:`scalars_out`.
        """
        self.__dict__["_engine"] = engine  # not a submodule, even if the engine is a module

    def detach_engine(self) -> None:
        """Go back to the loop on one process."""
        self.__dict__["_engine"] = None

    def __getstate__(self) -> dict[str, Any]:
        """Engines hold process groups: copies and pickles of the model go without."""
        return {**self.__dict__, "_engine": None}

    def boundary_columns(self, num_encoder_stages: int, num_llm_stages: int) -> tuple[int, ...]:
        """Columns of the tensor between each stage and the next."""
        return (
            (self.encoder.hidden_size,) * (num_encoder_stages - 1)
            + (self.llm.hidden_size,)
            + (self.llm.hidden_size,) * (num_llm_stages - 1)
        )

    def tied_parameters(self) -> tuple[tuple[str, str], ...]:
        """Pairs of names in this model's state dict that are one parameter."""
        return tuple(
            (f"{prefix}.{first}", f"{prefix}.{second}")
            for prefix, module in (("encoder", self.encoder), ("llm", self.llm))
            for first, second in module.tied_parameters()
        )

    def encoder_stage(
        self, inputs: Tensor, packing: EncoderPacking, *, start: int, stop: int
    ) -> Tensor:
        """Encoder layers ``[start, stop)``, with the projector after the last.

        Args:
            inputs: Pixels ``[patches, patch_dim]`` or hidden ``[patches, encoder.hidden_size]``.
            packing: The images of the row.
            start: First layer.
            stop: One past the last layer.

        Returns:
            Hidden states, or features ``[merged, llm.hidden_size]``.
        """
        output = self.encoder.forward_stage(inputs, packing, start=start, stop=stop)
        if stop == self.encoder.num_layers and self.projector is not None:
            output = self.projector(output)
        return output

    def llm_stage(
        self,
        inputs: Tensor | None,
        packing: LlmPacking,
        *,
        start: int,
        stop: int,
        input_ids: Tensor | None = None,
    ) -> Tensor:
        """LLM layers ``[start, stop)``; see :meth:`LlmModule.forward_stage`."""
        return self.llm.forward_stage(inputs, packing, start=start, stop=stop, input_ids=input_ids)

    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy in fp32, summed over the positions that have a label.

        Args:
            logits: ``[tokens, vocab]``, any floating dtype.
            labels: ``[tokens]``, already shifted; -100 where there is no label.

        Returns:
            0-dim fp32 tensor with a graph, 0 if there is no label.
        """
        return F.cross_entropy(logits.float(), labels, ignore_index=IGNORED_LABEL, reduction="sum")

    def labelled_loss_sum(self, logits: Tensor, labels: Tensor, num_labels: int) -> Tensor:
        """:meth:`loss_sum` of the labelled rows alone, so that the others are not upcast.

        A subclass's own ``loss_sum`` gets all rows.

        Args:
            logits: ``[tokens, vocab]``.
            labels: ``[tokens]``.
            num_labels: Labels that are not -100: known to the host, which need not wait for them.

        Raises:
            RuntimeMismatchError: If labels on the host are more or fewer.
        """
        if labels.device.type == "cpu":
            check_label_count(int((labels != IGNORED_LABEL).sum()), num_labels, "A row")
        if type(self).loss_sum is EntrainModel.loss_sum:
            rows = chosen_rows(labels != IGNORED_LABEL, num_labels)
            logits, labels = logits.index_select(0, rows), labels.index_select(0, rows)
        return self.loss_sum(logits, labels)

    @torch.no_grad()
    def scalar_sums(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The ``scalars`` hooks on one microbatch, as 0-dim float64 tensors."""
        return {name: fn(logits, labels).double() for name, fn in self.scalars.items()}

    def forward(self, batch: PlannedBatch) -> Tensor:
        """Mean loss over all label tokens of the global batch; 0 if there are none.

        Raises:
            RuntimeMismatchError: If a row has not the labels or placeholders its samples announce.
        """
        if self.dropout_step is not None and self.training:
            self.dropout_step += 1
        if self._engine is not None:
            return self._engine(batch)
        check_rows(batch, getattr(self.llm, "image_token_id", None))
        total: Tensor | None = None
        sums: dict[str, Tensor] = {}
        for r, replica in enumerate(batch.assignment.replicas):
            for j, logits in self._replica_logits(batch, r, replica):
                labels = batch.labels[r, j]
                announced = total_label_tokens([batch.sizes[i] for i in replica.llm[j]])
                loss = self.labelled_loss_sum(logits, labels, announced)
                total = loss if total is None else total + loss
                for name, value in self.scalar_sums(logits, labels).items():
                    sums[name] = sums[name] + value if name in sums else value
        assert total is not None, "a global batch has samples"
        self.scalars_out = sums
        return total / max(batch.num_label_tokens, 1)

    def _replica_logits(self, batch: PlannedBatch, r: int, replica: ReplicaAssignment) -> Any:
        """Yield (j, logits) of each LLM microbatch; features are kept for one microbatch."""
        encoded: dict[int, tuple[Sequence[int], Tensor]] = {}
        for j, row in enumerate(replica.llm):
            encoded.pop(j - 2, None)
            if replica.encoder[j]:
                with self.encoder_rows(replica.encoder[j], batch.sizes):
                    features = self.encoder_stage(
                        batch.pixels[r, j],
                        batch.encoder_packing(r, j),
                        start=0,
                        stop=self.encoder.num_layers,
                    )
                encoded[j] = (replica.encoder[j], features)
            if not row:
                continue
            with self.llm_rows(row, batch.sizes):
                logits = self.llm_stage(
                    gather_features(row, tuple(encoded.values()), batch.sizes),
                    batch.llm_packing(r, j),
                    start=0,
                    stop=self.llm.num_layers,
                    input_ids=batch.input_ids[r, j],
                )
            yield j, logits


def _check_columns(encoder: EncoderModule, llm: LlmModule, projector: nn.Module | None) -> None:
    features = encoder.output_size
    if projector is not None:
        expected = getattr(projector, "input_size", features)
        if expected != features:
            raise ConfigError(
                f"The projector takes {expected} columns",
                limit=f"the {features} columns of the encoder's features",
            )
        features = getattr(projector, "output_size", llm.hidden_size)
    if features != llm.hidden_size:
        raise ConfigError(
            f"Vision features have {features} columns",
            limit=f"the LLM's hidden size, {llm.hidden_size}",
            remedy="set the vision config's out_hidden_size to it, or add a projector",
        )
