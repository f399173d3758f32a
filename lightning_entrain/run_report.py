"""What the terminal shows when a run has ended."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from rich.console import Console
from rich.text import Text

from lightning_entrain.resuming import interrupted_checkpoint, wandb_parts

if TYPE_CHECKING:
    from lightning_entrain.train import RunResult


def print_report(result: RunResult, console: Console | None = None) -> None:
    """Print a run's losses, rates, files and the next command to try.

    Args:
        result: The finished run.
        console: Where to; standard output if None.
    """
    console = console or Console(highlight=False)
    lines = report_lines(result)
    width = max(len(name) for name, _ in lines)
    console.print(f"\n[bold]Run {'stopped' if result.stopped else 'finished'}[/bold]")
    for name, text in lines:
        line = Text.assemble((f"  {name:<{width}}  ", "bold"), text)
        console.print(line, soft_wrap=True)


def report_lines(result: RunResult) -> list[tuple[str, str]]:
    """The report as pairs of name and text."""
    summary = result.summary
    steps = f"{summary.num_steps} on {result.num_devices} process(es)"
    if (step := result.trainer.global_step) > summary.num_steps:
        steps += f", {step} with those before it was resumed"
    lines = [("steps", steps)]
    if summary.first_loss is not None and summary.last_loss is not None:
        lines.append(
            ("train/loss", f"first {summary.first_loss:.4f}, last {summary.last_loss:.4f}")
        )
    lines += rate_lines(result)
    lines += balance_lines(result)
    lines.append(("run", _short(result.run_dir)))
    metrics = result.run_dir / "metrics.csv"
    if metrics.is_file():
        lines.append(("metrics", _short(metrics)))
    report = _report(result)
    if report is not None and report.path is not None:
        lines.append(("report", _short(report.path)))
    checkpoint = last_checkpoint(result)
    if checkpoint is not None:
        lines.append(("checkpoint", _short(checkpoint)))
    if result.wandb_url:
        lines.append(("W&B", result.wandb_url))
    elif result.wandb_dir is not None:
        folder = _short(result.wandb_dir)
        lines.append(("W&B", f"{folder} (offline)"))
        parts = [_short(part) for part in wandb_parts(result.wandb_dir)]
        lines.append(("", f"upload it: {shlex.join(['wandb', 'sync', *parts])}"))
    if result.stopped:
        name = "again" if checkpoint is None else "resume"
        lines.append((name, resume_command(result, checkpoint)))
    else:
        lines.append(("next", next_command(result)))
    return lines


def rate_lines(result: RunResult) -> list[tuple[str, str]]:
    """Samples and tokens per second, as the report has them where there is one."""
    from lightning_entrain.observe.rates import WARM_UP_STEPS, rate

    report, summary = _report(result), result.summary
    record = report.record if report is not None else None
    found = [summary.samples_per_second, summary.tokens_per_second]
    without = "without the first step"
    if record is not None and record.last("throughput/tokens_per_sec") is not None:
        keys = ("throughput/samples_per_sec", "throughput/tokens_per_sec")
        found = [rate(record, key) for key in keys]
        without = f"without the first {WARM_UP_STEPS} steps"
    samples, tokens = found
    if samples is None or tokens is None:
        return []
    return [("samples/s", f"{samples:.1f}"), ("tokens/s", f"{tokens:,.0f} ({without})")]


def balance_lines(result: RunResult) -> list[tuple[str, str]]:
    """How balanced the run was, what was gained, and what would help, from its report."""
    from lightning_entrain.observe.rates import bubble_steps, mean_settled, measured_at
    from lightning_entrain.observe.run_page import entrain_text, gain_over_fixed, gain_text

    report = _report(result)
    record = report.record if report is not None else None
    if record is None:
        return []
    lines = []
    spreads = []
    for module, name in (("encoder", "encoder"), ("llm", "LLM")):
        cv, fixed = (record.mean(f"variability/{part}{module}_cv") for part in ("", "fixed_"))
        if cv is not None and fixed is not None:
            spreads.append(f"{name} {cv:.1%} (in sampler order {fixed:.1%})")
    if spreads:
        lines.append(("spread", ", ".join(spreads)))
    bubble = mean_settled(record, "pipeline/bubble_ratio")
    if bubble is not None:
        parts = ", ".join(
            f"{name} {mean_settled(record, f'pipeline/{key}_ratio') or 0.0:.0%}"
            for key, name in (
                ("fill_drain", "fill and drain"),
                ("imbalance", "imbalance"),
                ("communication", "communication"),
            )
        )
        at = measured_at([step + 1 for step in bubble_steps(record)])
        lines.append(("bubble", f"{bubble:.0%} of the ranks' time, {at}: {parts}"))
    gain = gain_over_fixed(record)
    if gain is not None:
        lines.append(("gain", f"{gain:+.0%} steps/s, by simulation: {gain_text(record)}"))
        if record.policy == "entrain" and (why := entrain_text(record)):
            lines.append(("", why))
    for number, text in enumerate(record.advice):
        lines.append(("advice" if number == 0 else "", text))
    return lines


def _report(result: RunResult) -> Any:
    """The run's `RunReport`, if it has one."""
    from lightning_entrain.callbacks.report import RunReport

    callbacks: list[Any] = getattr(result.trainer, "callbacks", [])
    return next((callback for callback in callbacks if isinstance(callback, RunReport)), None)


def last_checkpoint(result: RunResult) -> Path | None:
    """The newest checkpoint that the run wrote, if any."""
    interrupted = interrupted_checkpoint(result.trainer)
    is_new = interrupted.exists() and interrupted.stat().st_mtime >= result.started
    if result.stopped and is_new:
        return interrupted
    callback = result.trainer.checkpoint_callback
    for name in ("last_model_path", "best_model_path"):
        path = getattr(callback, name, "")
        if path and Path(path).exists():
            return Path(path)
    return None


def next_command(result: RunResult) -> str:
    """A command that builds on this run: another layout, or twice the steps."""
    resumed = any(text.lstrip("+").startswith("ckpt_path=") for text in _given())
    if not resumed and result.num_devices == 1:
        return _again({"strategy": None, "trainer.devices": "2"})
    if not resumed and result.num_devices == 2:
        return _again({"trainer.devices": "3"})
    trainer = result.trainer
    changes: dict[str, str | None] = {}
    checkpoint = last_checkpoint(result)
    if checkpoint is not None:
        changes["ckpt_path"] = _short(checkpoint)
    # The limits count from the first step of the first run.
    if trainer.max_steps >= 0:
        changes["trainer.max_steps"] = str(2 * max(trainer.global_step, 1))
    if trainer.max_epochs is not None and trainer.max_epochs > 0:
        changes["trainer.max_epochs"] = str(2 * trainer.max_epochs)
    return _again(changes)


def resume_command(result: RunResult, checkpoint: Path | None) -> str:
    """The command that goes on with a stopped run, in its folder; anew if nothing was saved."""
    changes = {"hydra.run.dir": _short(result.run_dir)}
    if checkpoint is not None:
        changes["ckpt_path"] = _short(checkpoint)
    return _again({**changes})


def _given() -> list[str]:
    """The run's own options, those of Hydra left out."""
    if not HydraConfig.initialized():
        return []
    return [str(text) for text in HydraConfig.get().overrides.task]


def _again(changes: dict[str, str | None]) -> str:
    """The run's own command with other values; None leaves an option out."""
    kept = [text for text in _given() if text.lstrip("+~").split("=", 1)[0] not in changes]
    new = [f"{name}={value}" for name, value in changes.items() if value is not None]
    return shlex.join(["entrain-train", *kept, *new])


def _short(path: Path) -> str:
    """The path as seen from the current folder where it lies below it."""
    path = path.absolute()
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
