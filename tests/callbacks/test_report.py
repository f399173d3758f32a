"""The report is written whatever the run is, and however it ends."""

import csv
import re
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_entrain.callbacks.memory import MemoryMonitor
from lightning_entrain.callbacks.report import RunReport
from lightning_entrain.callbacks.throughput import ThroughputMonitor
from lightning_entrain.callbacks.timeline import PipelineTimelineMonitor
from lightning_entrain.callbacks.variability import WorkloadVariabilityMonitor
from lightning_entrain.observe.rates import rate, step_ms
from lightning_entrain.observe.run_files import read_run
from lightning_entrain.observe.run_page import run_page
from lightning_entrain.observe.run_record import RunRecord
from lightning_entrain.report_app import main


def all_callbacks(folder):
    return [
        WorkloadVariabilityMonitor(),
        PipelineTimelineMonitor(every_n_steps=1),
        ThroughputMonitor(every_n_steps=1),
        MemoryMonitor(every_n_steps=1),
        RunReport(folder),
    ]


def test_one_process_without_a_pipeline_two_loggers(fit, batches, tmp_path, capsys):
    pytest.importorskip("tensorboard")
    loggers = [CSVLogger(tmp_path / "csv"), TensorBoardLogger(tmp_path / "events")]
    fit(batches, all_callbacks(tmp_path / "out"), loggers, log_every_n_steps=1)
    page = (tmp_path / "out" / "report.html").read_text()
    record = read_run(tmp_path / "out")
    assert record.status == "finished"
    assert [value for _, value in record.series["train/loss"]] == [1, 2, 3, 4]
    assert record.load_unit == "patches or tokens"
    assert record.measured is None
    assert record.policies == {}
    assert "Variability" in page
    assert "Timeline" not in page
    # The same values are read from the CSV and from TensorBoard, once per step.
    for folder in ("csv", "events"):
        found = read_run(tmp_path / folder)
        for key in ("variability/llm_cv", "train/loss", "memory/max_peak_gib"):
            assert dict(found.series[key]) == pytest.approx(dict(record.series[key]), rel=1e-6)
    main([str(tmp_path / "csv"), str(tmp_path / "out"), "--output", str(tmp_path / "both.html")])
    assert capsys.readouterr().out.strip() == str(tmp_path / "both.html")
    assert "Runs compared" in (tmp_path / "both.html").read_text()


def test_files_go_where_the_first_logger_writes_and_it_is_told(fit, batches, tmp_path, caplog):
    logger, reports = CSVLogger(tmp_path / "logs"), [RunReport(), RunReport()]
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        fit(batches, [reports[0]], logger)
        fit(batches, [reports[1]], False)
    folders = [tmp_path / "logs" / "lightning_logs" / "version_0", tmp_path]
    assert [report.path.parent for report in reports] == folders
    for report in reports:
        assert f"RunReport: {report.path}" in caplog.text
        assert (report.path.parent / "run_record.json").exists()


class Stop(pl.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 2:
            raise RuntimeError("the third batch is <bad>")


def test_an_exception_leaves_a_report_of_what_was_done(fit, batches, tmp_path):
    with pytest.raises(RuntimeError, match="third batch"):
        fit(batches, [*all_callbacks(tmp_path), Stop()], False)
    record = read_run(tmp_path / "run_record.json")
    assert record.status == "ended by RuntimeError: the third batch is <bad>"
    assert record.num_steps == 2
    assert len(record.series["variability/encoder_cv"]) == 2
    assert "the third batch is &lt;bad&gt;" in (tmp_path / "report.html").read_text()


def test_a_folder_that_cannot_be_written_costs_a_warning(fit, batches, tmp_path):
    (tmp_path / "file").write_text("")
    report = RunReport(tmp_path / "file" / "below")
    with pytest.warns(UserWarning, match="report.html is not written"):
        trainer = fit(batches, [WorkloadVariabilityMonitor(), report], False)
    assert trainer.state.finished
    assert report.path is None
    assert report.record.num_steps == 4


def test_disabled_wandb_changes_nothing(fit, batches, tmp_path, monkeypatch):
    import wandb

    from lightning_entrain.loggers import make_wandb_logger

    monkeypatch.setenv("WANDB_MODE", "disabled")
    logger = make_wandb_logger(str(tmp_path))
    fit(batches, all_callbacks(tmp_path), logger, log_every_n_steps=1)
    wandb.finish()
    assert (tmp_path / "report.html").exists()
    assert not list(tmp_path.glob("**/*.wandb"))


def test_records_read_back_and_bad_files_are_refused(tmp_path, capsys):
    record = RunRecord(name="a", series={"x/y": [(0, 1.5)]}, policies={"fixed": {"step_ms": 2.0}})
    assert RunRecord.from_json(record.to_json()) == record
    cases = {"run_record.json": "{}", "metrics.csv": "a,b\n1,2\n", "x.wandb": "no"}
    for name, text in cases.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(SystemExit) as end:
            main([str(tmp_path / name)])
        assert end.value.code == 1
        assert "Remedy" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(tmp_path / "none")])


def test_a_csv_alone_gives_a_page(tmp_path):
    with open(tmp_path / "metrics.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "train/loss", "variability/encoder_cv"])
        writer.writerows([[0, 3.0, 0.5], [1, "", 0.25], [2, 2.0, ""]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        main([str(tmp_path)])
    page = (tmp_path / "report.html").read_text()
    assert "37.5%" in page
    assert "this run last 25" in page


def test_a_sweeps_folder_stands_for_its_runs(tmp_path, capsys):
    for number in (0, 2, 10):
        record = RunRecord(name=f"run {number}", series={"train/loss": [(0, 1.0), (1, 0.5)]})
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "run_record.json").write_text(record.to_json())
    (tmp_path / "multirun.yaml").write_text("")
    main([str(tmp_path), "--output", str(tmp_path / "all.html")])
    assert ">run 0, run 2, run 10<" in (tmp_path / "all.html").read_text()


def a_run(folder, name, **more):
    """Windows of one step: a slow one, 1 s for 100 tokens, 1 s for 100 and 3 s for 900."""
    spread = {"encoder_cv": 0.1, "llm_cv": 0.1}
    record = RunRecord(
        name=name,
        policy="fixed",
        environment={"processes": "2"},
        plan={"dp": 1, "encoder_layers": [[0, 2]], "llm_layers": [[0, 1], [1, 2]]},
        policies={
            "this run": {"step_ms": 2.0, "schedule": "zero bubble", **spread},
            "fixed": {"step_ms": 3.0, "schedule": "1F1B", **spread},
        },
        series={
            "throughput/tokens_per_sec": [(1, 5.0), (2, 100.0), (3, 100.0), (4, 300.0)],
            "throughput/step_seconds": [(1, 9.0), (2, 1.0), (3, 0.5), (4, 3.0)],
            "throughput/data_wait_share": [(1, 0.0), (2, 0.0), (3, 0.5), (4, 0.0)],
            "pipeline/bubble_ratio": [(1, 0.9), (3, 0.25)],
            "variability/encoder_cv": [(0, 0.5), (1, 0.25)],
            "val/loss": [(1, 1.25)],
        },
        **more,
    )
    folder.mkdir()
    (folder / "run_record.json").write_text(record.to_json())
    (folder / "report.html").write_text("its report")
    return record


def test_rates_are_the_same_everywhere_and_leave_out_warm_up(tmp_path, monkeypatch, capsys):
    record = a_run(tmp_path / "a", "a")
    a_run(tmp_path / "b c", "b")
    assert rate(record, "throughput/tokens_per_sec") == pytest.approx(1100 / 5)
    assert step_ms(record) == pytest.approx(5000 / 3)
    assert "<b>220</b>" in run_page(record)
    assert "measured at step 3<" in run_page(record)
    monkeypatch.chdir(tmp_path)
    main(["a", "b c"])
    page = (tmp_path / "comparison.html").read_text()
    cells = re.findall("<t[dh](?: [^>]*)?>(.*?)</t[dh]>", page.split("</table>")[0])
    columns = len(cells) // 3
    row = dict(zip(cells[:columns], cells[2 * columns :], strict=True))
    assert row == {
        "run": '<a href="b%20c/report.html">b</a>',
        "policy": "fixed",
        "schedule": "zero bubble",
        "stages": "1 encoder + 2 LLM",
        "processes": "2",
        "last validation loss": "1.25",
        "encoder spread": "37.5%",
        "bubble": "25%",
        "step, ms": "1,667",
        "tokens/s": "220",
        "gain, simulated": "+50%",
    }
    main(["a", "b c"])  # over its own page
    assert capsys.readouterr().out == "comparison.html\n" * 2
    (tmp_path / "comparison.html").write_text("mine")
    with pytest.raises(SystemExit):
        main(["a", "b c"])
    assert "comparison.html exists" in capsys.readouterr().err
    assert (tmp_path / "comparison.html").read_text() == "mine"


def test_the_documentation_names_every_monitor_and_its_example_runs(tmp_path):
    from lightning_entrain import callbacks

    text = (Path(__file__).parents[2] / "docs" / "observability.md").read_text()
    example = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    names = {}
    exec(example, names)
    used = {type(callback).__name__ for callback in names["trainer"].callbacks}
    assert set(callbacks.__all__) - {"RunCheckpoint"} <= used
    for name in callbacks.__all__:
        assert getattr(callbacks, name).__name__ == name
