"""W&B workspace and report with this package's panels; needs the extra `dashboards`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_entrain.errors import ConfigError
from lightning_entrain.observe.wandb_log import STEP_METRIC

WORKSPACE_NAME = "Workload balance"


@dataclass(frozen=True)
class Panel:
    """A line plot over steps.

    Attributes:
        title: Of the panel.
        keys: Logged values that it shows.
    """

    title: str
    keys: tuple[str, ...]


SECTIONS: dict[str, tuple[Panel, ...]] = {
    "Training": (
        Panel("Loss", ("train/loss", "val/loss")),
        Panel("Token accuracy", ("train/token_accuracy",)),
        Panel("Learning rate", ("train/learning_rate",)),
    ),
    "Variability": (
        Panel(
            "Encoder microbatches, std / mean",
            (
                "variability/encoder_cv",
                "variability/fixed_encoder_cv",
                "variability/encoder_measured_cv",
            ),
        ),
        Panel(
            "LLM microbatches, std / mean",
            ("variability/llm_cv", "variability/fixed_llm_cv", "variability/llm_measured_cv"),
        ),
        Panel("Std, ms", ("variability/encoder_std_ms", "variability/llm_std_ms")),
        Panel(
            "Heaviest / mean",
            ("variability/encoder_max_over_mean", "variability/llm_max_over_mean"),
        ),
        Panel(
            "Heaviest above its bound",
            ("variability/encoder_bound_gap", "variability/llm_bound_gap"),
        ),
        Panel(
            "Encoder : LLM work",
            ("variability/encoder_llm_ratio", "variability/plan_encoder_llm_ratio"),
        ),
        Panel("Deferred samples", ("variability/deferred_samples",)),
    ),
    "Pipeline": (
        Panel("Bubble", ("pipeline/bubble_ratio", "pipeline/predicted_bubble_ratio")),
        Panel(
            "Bubble by cause",
            (
                "pipeline/fill_drain_ratio",
                "pipeline/imbalance_ratio",
                "pipeline/communication_ratio",
            ),
        ),
        Panel("Step, ms", ("pipeline/step_ms",)),
    ),
    "Throughput": (
        Panel("Samples/s", ("throughput/samples_per_sec",)),
        Panel("Tokens/s", ("throughput/tokens_per_sec", "throughput/vision_tokens_per_sec")),
        Panel("Model FLOPs utilisation", ("throughput/mfu",)),
        Panel("Time without training", ("throughput/data_wait_share", "throughput/planning_share")),
    ),
    "Memory": (Panel("Peak, GiB", ("memory/max_peak_gib", "memory/predicted_peak_gib")),),
    "Plan": (
        Panel("Cost model's error", ("plan/prediction_error",)),
        Panel("Drift", ("plan/encoder_drift", "plan/llm_drift")),
        Panel("Gain of the best other stages", ("plan/better_plan_gain",)),
    ),
}
"""Sections of the workspace and their panels."""


def build_workspace(entity: str, project: str) -> Any:
    """The workspace, not yet saved.

    Raises:
        ConfigError: If the extra `dashboards` is not installed.
    """
    ws, wr = _modules()
    sections = [
        ws.Section(name=name, panels=[_plot(wr, panel) for panel in panels], is_open=True)
        for name, panels in SECTIONS.items()
    ]
    timeline = wr.MediaBrowser(media_keys=["pipeline/timeline"], num_columns=1)
    next(s for s in sections if s.name == "Pipeline").panels.append(timeline)
    return ws.Workspace(
        entity=entity,
        project=project,
        name=WORKSPACE_NAME,
        sections=sections,
        settings=ws.WorkspaceSettings(x_axis=STEP_METRIC),
        auto_generate_panels=False,
    )


def build_report(
    entity: str, project: str, *, group: str | None = None, runs: Sequence[str] = ()
) -> Any:
    """A report that compares runs, not yet saved.

    Args:
        entity: W&B user or team.
        project: W&B project.
        group: Only runs of this group, for example one sweep.
        runs: Only runs with these names.

    Raises:
        ConfigError: If the extra `dashboards` is not installed.
    """
    _, wr = _modules()
    conditions = [f"Group == '{_quoted(group)}'"] if group else []
    if runs:
        names = ", ".join(f"'{_quoted(name)}'" for name in runs)
        conditions.append(f"DisplayName in [{names}]")
    # Without entity and project of its own a run set is the report's, and needs no look-up.
    runset = wr.Runset(name="Runs", filters=" and ".join(conditions))
    blocks: list[Any] = [
        wr.P(
            "Each line is a run. Variability is the spread of work over microbatches; the bubble "
            "is the share of all ranks' time without compute."
        )
    ]
    for name, panels in SECTIONS.items():
        blocks += [
            wr.H2(name),
            wr.PanelGrid(runsets=[runset], panels=[_plot(wr, panel) for panel in panels]),
        ]
    blocks += [
        wr.H2("Configurations"),
        wr.PanelGrid(runsets=[runset], panels=[wr.RunComparer(diff_only=True)]),
    ]
    return wr.Report(
        entity=entity,
        project=project,
        title="Assignment policies compared" if not group else f"Runs of {group}",
        description="Made by entrain-dashboard",
        blocks=blocks,
        width="fluid",
    )


def _plot(wr: Any, panel: Panel) -> Any:
    return wr.LinePlot(title=panel.title, x=STEP_METRIC, y=list(panel.keys))


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'")


def _modules() -> tuple[Any, Any]:
    try:
        import wandb_workspaces.reports.v2 as reports
        import wandb_workspaces.workspaces as workspaces
    except ImportError as error:
        raise ConfigError(
            "entrain-dashboard needs the package wandb-workspaces",
            remedy='pip install "lightning_entrain[dashboards]"',
        ) from error
    return workspaces, reports
