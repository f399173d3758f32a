"""The runtime against torch.distributed.pipelining, against the simulator, and its own overhead.

    python benchmarks/runtime.py peer        # equal and uneven work against Schedule1F1B
    python benchmarks/runtime.py simulator   # stages that sleep, against the simulated times
    python benchmarks/runtime.py overhead    # host time of a step that is no action and no wait

All numbers are ratios within one run. `--write` puts them into docs/benchmarks_runtime.json.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from lightning_entrain.assign import assign_samples
from lightning_entrain.assign.types import Assignment, ReplicaAssignment
from lightning_entrain.data.batch import DataNeeds, PlannedBatch
from lightning_entrain.models.entrain_model import EntrainModel
from lightning_entrain.models.protocol import EncoderModule, LlmModule
from lightning_entrain.models.prune import prune_to_stages
from lightning_entrain.models.tiny import tiny_vlm
from lightning_entrain.plan.layout import LayoutRequest, StageLayout
from lightning_entrain.planning import stage_shares, workload_of
from lightning_entrain.runtime.engine import PipelineEngine
from lightning_entrain.runtime.groups import create_groups
from lightning_entrain.runtime.recorder import StepRecorder
from lightning_entrain.runtime.step_plan import StepPlanner
from lightning_entrain.runtime.weight_store import WeightWork
from lightning_entrain.schedule.predict import replica_step
from lightning_entrain.schedule.simulate import simulate
from lightning_entrain.schedule.timeline import Timeline
from lightning_entrain.workload.sizes import SampleSize

CPU = torch.device("cpu")
PATCH_DIM = 3 * 2 * 14 * 14
VOCAB = 512


def run(world_size: int, function: Callable[..., Any], *args: Any) -> Any:
    """Run ``function(rank, ...)`` on forked ranks; rank 0's result."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        mp.start_processes(
            _rank_main,
            (world_size, port, str(out), function, args),
            nprocs=world_size,
            start_method="fork",
        )
        return json.loads(out.read_text())


def _rank_main(
    rank: int, world_size: int, port: int, out: str, function: Callable[..., Any], args: Any
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    result = function(rank, *args)
    if rank == 0:
        Path(out).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


# --- batches ------------------------------------------------------------------------------------


def size(rows: int, columns: int, text: int) -> SampleSize:
    return SampleSize(grids=((1, rows, columns),), num_text_tokens=text, num_label_tokens=text - 1)


def equal_sizes(num: int) -> list[SampleSize]:
    return [size(16, 16, 64) for _ in range(num)]


def uneven_sizes(num: int, seed: int = 0) -> list[SampleSize]:
    """Images and texts as uneven as charts are: sides and lengths over an order of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    sides = (4 * 9 ** torch.rand(num, 2, generator=generator)).long() // 2 * 2
    texts = (8 * 24 ** torch.rand(num, generator=generator)).long()
    return [
        size(max(int(r), 2), max(int(c), 2), int(t) + 2)
        for (r, c), t in zip(sides.tolist(), texts.tolist(), strict=True)
    ]


def make_batch(sizes: Sequence[SampleSize], assignment: Assignment) -> PlannedBatch:
    generator = torch.Generator().manual_seed(1)
    pixels, ids, labels = {}, {}, {}
    for r, replica in enumerate(assignment.replicas):
        for k, entry in enumerate(replica.encoder):
            if entry:
                rows = sum(sizes[i].num_patches for i in entry)
                pixels[r, k] = torch.randn(rows, PATCH_DIM, generator=generator)
        for j, entry in enumerate(replica.llm):
            if entry:
                ids[r, j] = torch.cat([token_row(sizes[i], generator) for i in entry])
                labels[r, j] = torch.cat([label_row(sizes[i], generator) for i in entry])
    return PlannedBatch(
        assignment=assignment,
        sizes=sizes,
        needs=DataNeeds.everything(),
        sample_indices=range(len(sizes)),
        pixels=pixels,
        input_ids=ids,
        labels=labels,
    )


def token_row(sample: SampleSize, generator: torch.Generator) -> Tensor:
    text = torch.randint(1, VOCAB, (sample.num_text_tokens,), generator=generator)
    return torch.cat([torch.zeros(sample.num_vision_tokens, dtype=torch.long), text])


def label_row(sample: SampleSize, generator: torch.Generator) -> Tensor:
    row = torch.full((sample.num_tokens,), -100)
    targets = torch.randint(1, VOCAB, (sample.num_label_tokens,), generator=generator)
    row[-sample.num_label_tokens - 1 : -1] = targets
    return row


def in_order(sizes: Sequence[SampleSize], num_microbatches: int) -> Assignment:
    costs = [float(s.num_patches) for s in sizes], [float(s.num_tokens) for s in sizes]
    return assign_samples(
        *costs, num_replicas=1, num_microbatches=num_microbatches, policy="fixed"
    ).with_costs(*costs)


# --- engines ------------------------------------------------------------------------------------


def layout_for(model: EntrainModel, encoder_stages: int, llm_stages: int) -> StageLayout:
    request = LayoutRequest(
        world_size=encoder_stages + llm_stages,
        encoder_stages=encoder_stages,
        llm_stages=llm_stages,
    )
    return request.resolve(
        encoder_layers=model.encoder.num_layers,
        llm_layers=model.llm.num_layers,
        encoder_weight=1,
        llm_weight=1,
    )


def planner_for(
    model: EntrainModel, layout: StageLayout, schedule: str, shares: tuple[float, ...] | None
) -> StepPlanner:
    return StepPlanner(
        placement=layout.placement,
        replica=0,
        schedule=schedule,
        boundary_columns=model.boundary_columns(len(layout.encoder_ranges), len(layout.llm_ranges)),
        dtype="float32",
        stage_shares=shares,
    )


def engine_for(model: EntrainModel, layout: StageLayout, planner: StepPlanner) -> PipelineEngine:
    groups = create_groups(layout, CPU, timedelta(seconds=120))
    rank = dist.get_rank()
    prune_to_stages(model, *layout.ranges_of(rank))
    return PipelineEngine(
        model, layout, global_rank=rank, groups=groups, device=CPU, planner=planner
    )


def timed(step: Callable[[], Any]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    step()
    dist.barrier()
    return (time.perf_counter() - begin) * 1e3


# --- (a), (b): torch.distributed.pipelining -----------------------------------------------------


class PeerStage(nn.Module):
    """One stage of the same model as a module that torch's stages can hold."""

    def __init__(self, model: EntrainModel, rank: int, batch: PlannedBatch) -> None:
        super().__init__()
        self.model = model
        self.rank = rank
        self.images = batch.encoder_packing(0, 0)
        self.tokens = batch.llm_packing(0, 0)
        self.register_buffer("ids", batch.input_ids[0, 0])

    def forward(self, rows: Tensor) -> Tensor:
        rows = rows[0]
        if self.rank == 0:
            stop = self.model.encoder.num_layers
            return self.model.encoder_stage(rows, self.images, start=0, stop=stop)[None]
        stop = self.model.llm.num_layers
        logits = self.model.llm_stage(rows, self.tokens, start=0, stop=stop, input_ids=self.ids)
        return logits[None]


def pad(sizes: Sequence[SampleSize], assignment: Assignment) -> tuple[Any, Assignment]:
    """Fill every microbatch up to the largest with one blank image and its text."""
    entries = assignment.replicas[0].llm
    patches = [sum(sizes[i].num_patches for i in entry) for entry in entries]
    texts = [sum(sizes[i].num_text_tokens for i in entry) for entry in entries]
    padded = list(sizes)
    rows: list[tuple[int, ...]] = []
    for entry, own_patches, own_text in zip(entries, patches, texts, strict=True):
        blank = SampleSize(
            grids=((1, 2, (max(patches) - own_patches) // 2 + 2),),
            num_text_tokens=max(texts) - own_text + 2,
            num_label_tokens=0,
        )
        padded.append(blank)
        rows.append((*entry, len(padded) - 1))
    replica = ReplicaAssignment(encoder=tuple(rows), llm=tuple(rows))
    return padded, Assignment(replicas=(replica,), policy="padded")


def peer_step(rank: int, model: EntrainModel, batch: PlannedBatch) -> Callable[[], None]:
    """A step of torch's Schedule1F1B on microbatches of one shape."""
    num = batch.assignment.replicas[0].num_microbatches
    stage = PipelineStage(PeerStage(model, rank, batch), rank, 2, CPU)
    pixels = torch.stack([batch.pixels[0, k] for k in range(num)])
    labels = torch.stack([batch.labels[0, k] for k in range(num)])

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return model.loss_sum(logits[0], target[0]) / batch.num_label_tokens

    schedule = Schedule1F1B(stage, num, loss_fn=loss, scale_grads=False)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        if rank == 0:
            schedule.step(pixels)
        else:
            schedule.step(target=labels, losses=[])

    return step


def our_step(
    model: EntrainModel, batch: PlannedBatch, engine: PipelineEngine, planner: StepPlanner
) -> Callable[[], None]:
    # In training the loader plans ahead, so the plan comes with the batch.
    batch.step_plan = planner(batch.assignment, batch.sizes, train=True)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        engine(batch).backward()

    return step


def peer_rank(rank: int, kind: str, num_rounds: int) -> dict[str, float]:
    num_samples, num_microbatches = 32, 8
    sizes = equal_sizes(num_samples) if kind == "equal" else uneven_sizes(num_samples)
    ours, theirs = tiny_vlm(VOCAB, 0), tiny_vlm(VOCAB, 0)
    layout = layout_for(ours, 1, 1)
    workload = workload_of(ours, CPU)
    assert workload is not None
    costs = workload.sample_costs(sizes)
    fixed = in_order(sizes, num_microbatches)
    if kind == "equal":
        assignment, schedule = fixed, "1f1b"
    else:
        assignment = assign_samples(
            *costs, num_replicas=1, num_microbatches=num_microbatches, max_lag=0
        )
        schedule = "auto"
    planner = planner_for(ours, layout, schedule, stage_shares(workload, layout, sizes))
    batch = make_batch(sizes, assignment)
    engine = engine_for(ours, layout, planner)
    peer_sizes, peer_assignment = (sizes, fixed) if kind == "equal" else pad(sizes, fixed)
    prune_to_stages(theirs, *layout.ranges_of(rank))
    steps = {
        "ours": our_step(ours, batch, engine, planner),
        "torch": peer_step(rank, theirs, make_batch(peer_sizes, peer_assignment)),
    }
    for step in steps.values():
        timed(step)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(num_rounds):
        for name, step in steps.items():
            times[name].append(timed(step))
    medians = {name: statistics.median(found) for name, found in times.items()}
    return {"ratio": medians["ours"] / medians["torch"], **medians}


# --- (c): the simulator -------------------------------------------------------------------------


class Sleep(torch.autograd.Function):
    """Costs time in proportion to its rows, forward, backward and for its weights."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, layer: SleepLayer, ms: float) -> Tensor:
        ctx.layer, ctx.ms, ctx.weight = layer, ms, weight
        pause(ms)
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        pause(ctx.ms)
        work = SleepWork(
            weight=ctx.weight, bias=None, inputs=gradients[0], gradient=gradients[0], ms=ctx.ms
        )
        store = ctx.layer.store
        if store is None or not store.put(work):
            work.products()
        return gradients[0], torch.zeros_like(ctx.weight), None, None


class SleepWork(WeightWork):
    """Weight work that takes its time."""

    def __init__(self, *, ms: float, **fields: Any) -> None:
        super().__init__(**fields)
        object.__setattr__(self, "ms", ms)

    def products(self) -> tuple[Tensor | None, Tensor | None]:
        pause(self.ms)  # type: ignore[attr-defined]
        return torch.zeros_like(self.weight), None


def pause(ms: float) -> None:
    time.sleep(ms / 1e3)


class SleepLayer(nn.Module):
    def __init__(self, ms_per_row: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.ms_per_row = ms_per_row
        self.store: Any = None

    def forward(self, rows: Tensor, num_rows: int) -> Tensor:
        return Sleep.apply(rows, self.weight, self, self.ms_per_row * num_rows)


class SleepingModel(EntrainModel):
    def loss_sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        return logits.sum() * 0.0


class SleepingEncoder(EncoderModule):
    def __init__(self, num_layers: int, ms_per_patch: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SleepLayer(ms_per_patch) for _ in range(num_layers))
        self.num_layers, self.hidden_size, self.output_size = num_layers, 4, 4

    def layer_names(self) -> tuple[str, ...]:
        return tuple(f"layers.{i}" for i in range(self.num_layers))

    def prologue_names(self) -> tuple[str, ...]:
        return ()

    def epilogue_names(self) -> tuple[str, ...]:
        return ()

    def forward_stage(self, inputs: Tensor, packing: Any, *, start: int, stop: int) -> Tensor:
        rows = inputs[:, :4]
        for index in range(start, stop):
            rows = self.layers[index](rows, packing.num_patches)
        return rows[::4] if stop == self.num_layers else rows


class SleepingLlm(LlmModule):
    def __init__(self, num_layers: int, ms_per_token: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SleepLayer(ms_per_token) for _ in range(num_layers))
        self.num_layers, self.hidden_size, self.output_size = num_layers, 4, 4

    layer_names = SleepingEncoder.layer_names
    prologue_names = SleepingEncoder.prologue_names
    epilogue_names = SleepingEncoder.epilogue_names

    def forward_stage(
        self,
        inputs: Tensor | None,
        packing: Any,
        *,
        start: int,
        stop: int,
        input_ids: Tensor | None = None,
    ) -> Tensor:
        if start == 0:
            assert input_ids is not None
            rows = torch.zeros(packing.num_tokens, 4)
            if inputs is not None:
                rows = rows.index_put((torch.arange(inputs.shape[0]),), inputs)
        else:
            assert inputs is not None
            rows = inputs
        for index in range(start, stop):
            rows = self.layers[index](rows, packing.num_tokens)
        return rows


POLICIES = {
    "fixed": ("fixed", 1, "1f1b"),
    "entrain": ("entrain", 1, "1f1b_eager"),
    "joint": ("joint", 0, "zero_bubble"),
}


def sleeping_rank(rank: int, policy: str, num_rounds: int, stages: int) -> dict[str, float]:
    mean_ms = 40.0  # of one forward action
    sizes = uneven_sizes(48)
    patches, tokens = [s.num_patches for s in sizes], [s.num_tokens for s in sizes]
    name, max_lag, schedule = POLICIES[policy]
    num_microbatches = 12
    per_patch = mean_ms * num_microbatches / sum(patches)
    per_token = mean_ms * num_microbatches / sum(tokens)
    encoder = SleepingEncoder(stages, per_patch)
    model = SleepingModel(encoder, SleepingLlm(stages, per_token))
    layout = layout_for(model, stages, stages)
    costs = [p * per_patch * stages for p in patches], [t * per_token * stages for t in tokens]
    assignment = assign_samples(
        *costs,
        num_replicas=1,
        num_microbatches=num_microbatches,
        policy=name,
        max_lag=max_lag,
        limit_by_heaviest=False,
    )
    shares = (1 / stages,) * (2 * stages)
    planner = planner_for(model, layout, schedule, shares)
    batch = make_batch(sizes, assignment)
    engine = engine_for(model, layout, planner)
    for module in model.modules():
        if isinstance(module, SleepLayer):
            module.store = engine._weight_store
    step = our_step(model, batch, engine, planner)
    timed(step)
    first = engine.last_recorder
    measured = statistics.median(timed(step) for _ in range(num_rounds))
    plan = planner(assignment, sizes, train=True)
    compute = replace(
        plan.program.schedule,
        ranks=tuple(
            tuple(a for a in own if a.kind.is_compute) for own in plan.program.schedule.ranks
        ),
    )
    rows, costs_of_step = replica_step(assignment, 0, layout.placement, shares, sizes=sizes)
    # What an action costs besides its sleep comes from the first step, which is not measured.
    launch = launch_ms(first, simulate(compute, costs_of_step, rows).timeline)
    with_launch = replace(costs_of_step, overhead_ms=launch)
    simulated = simulate(compute, with_launch, rows).iteration_ms
    return {
        "measured_ms": measured,
        "simulated_ms": simulated,
        "launch_ms": launch,
        "ratio": measured / simulated,
    }


def launch_ms(recorder: StepRecorder | None, asleep: Timeline) -> float:
    """How much longer an action takes than it sleeps: median over a rank's, mean over ranks."""
    assert recorder is not None
    sleeps = {row.action: row.duration_ms for row in asleep.rows}
    extra = [
        row.duration_ms - sleeps[row.action]
        for row in recorder.timeline().rows
        if row.action.kind.is_compute
    ]
    found = torch.tensor(statistics.median(extra))
    dist.all_reduce(found)
    return float(found) / dist.get_world_size()


# --- (d): host overhead -------------------------------------------------------------------------


def overhead_rank(rank: int, num_rounds: int) -> dict[str, float]:
    sizes = uneven_sizes(32)
    model = tiny_vlm(VOCAB, 0)
    layout = layout_for(model, 1, 1)
    planner = planner_for(model, layout, "1f1b", None)
    batch = make_batch(sizes, in_order(sizes, 8))
    engine = engine_for(model, layout, planner)
    step = our_step(model, batch, engine, planner)
    shares = []
    for _ in range(num_rounds + 1):
        dist.barrier()
        begin = time.perf_counter()
        step()
        step_ms = (time.perf_counter() - begin) * 1e3
        assert engine.last_recorder is not None
        rows = engine.last_recorder.timeline().rows
        known_ms = engine.last_sync_ms + sum(row.duration_ms for row in rows)
        shares.append(1 - known_ms / step_ms)
    found = torch.tensor(statistics.median(shares[1:]))
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return {"overhead": float(found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "part", nargs="?", choices=("peer", "simulator", "overhead", "all"), default="all"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--stages", type=int, default=4, help="per module, for the simulator part")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    if args.part in ("peer", "all"):
        for kind in ("equal", "uneven"):
            found[f"peer_{kind}"] = run(2, peer_rank, kind, args.rounds)
            print(kind, found[f"peer_{kind}"], flush=True)
    if args.part in ("simulator", "all"):
        for policy in POLICIES:
            result = run(2 * args.stages, sleeping_rank, policy, args.rounds, args.stages)
            found[f"simulator_{policy}"] = result
            print(policy, result, flush=True)
    if args.part in ("overhead", "all"):
        found["overhead"] = run(2, overhead_rank, args.rounds)
        print("overhead", found["overhead"], flush=True)
    if args.write:
        path = Path(__file__).parents[1] / "docs" / "benchmarks_runtime.json"
        path.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
