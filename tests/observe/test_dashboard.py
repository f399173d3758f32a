"""The workspace and the report as W&B would store them: made without an account."""

import json

import pytest

from lightning_entrain import dashboard_app
from lightning_entrain.callbacks import batch_size, drift, memory, throughput, timeline, variability
from lightning_entrain.observe.dashboard import SECTIONS, build_report, build_workspace

pytest.importorskip("wandb_workspaces")


def line_plots(value):
    """All line plots in a serialised page."""
    if isinstance(value, dict):
        if value.get("viewType") == "Run History Line Plot":
            yield value["config"]
        for part in value.values():
            yield from line_plots(part)
    elif isinstance(value, list):
        for part in value:
            yield from line_plots(part)


def test_every_panel_is_stored_with_its_keys_over_optimizer_steps():
    for build in (build_workspace, build_report):
        page = dashboard_app.serialised(build("me", "project"))
        plots = list(line_plots(page))
        wanted = [panel for panels in SECTIONS.values() for panel in panels]
        assert [(p["chartTitle"], p["metrics"]) for p in plots] == [
            (panel.title, list(panel.keys)) for panel in wanted
        ]
        assert {plot["xAxis"] for plot in plots} == {"trainer/global_step"}


def test_every_key_of_a_panel_is_one_that_a_monitor_documents():
    documented = "".join(
        part.__doc__
        for module in (batch_size, drift, memory, throughput, timeline, variability)
        for part in vars(module).values()
        if isinstance(part, type) and part.__module__ == module.__name__ and part.__doc__
    )
    for panels in SECTIONS.values():
        for panel in panels:
            for key in panel.keys:
                assert key.startswith(("train/", "val/")) or f"`{key}`" in documented


def test_runs_are_chosen_by_group_and_name():
    text = json.dumps(
        dashboard_app.serialised(build_report("me", "p", group="sweep-1", runs=["fixed", "it's"]))
    )
    assert "sweep-1" in text
    assert "it's" in text


def test_the_app_prints_without_an_account_and_refuses_to_save_without_one(
    capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr(dashboard_app, "wandb_key_is_configured", lambda: False)
    dashboard_app.main(["--entity", "me", "--dry-run"])
    assert len(json.loads(capsys.readouterr().out)) == 2
    with pytest.raises(SystemExit) as end:
        dashboard_app.main(["--entity", "me"])
    assert end.value.code == 1
    assert "wandb login" in capsys.readouterr().err
