"""Files and folders of checkpoints: converting, exporting, appearing whole."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_entrain import convert_checkpoint as convert_app
from lightning_entrain import export_app
from lightning_entrain.checkpoint import files
from lightning_entrain.checkpoint.files import EntrainCheckpointIO, existing, written_whole
from lightning_entrain.config import register_configs
from lightning_entrain.convert_checkpoint import convert_checkpoint
from lightning_entrain.errors import CheckpointError
from lightning_entrain.models.pretrained import vlm_from_pretrained
from tests.distributed.checkpoint_runs import Run, fit
from tests.distributed.ranks import run_ranks


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same training, saved as shards and as a file by pipelines, and by one process."""
    found = {}
    for name, devices, strategy in (
        ("sharded", 3, {"llm_stages": 2, "checkpoint": "sharded"}),
        ("consolidated", 2, {}),
        ("one", 1, None),
    ):
        root = tmp_path_factory.mktemp(name)
        run = Run(root, devices=devices, strategy=strategy, num_steps=2, save_every=2)
        run.data().prepare_data()
        [fit(run)] if strategy is None else run_ranks(devices, fit, run)
        found[name] = root / "step=2.ckpt"
    return found


def read(path: Path) -> dict[str, Any]:
    return EntrainCheckpointIO().load_checkpoint(path)


def assert_same_training(found: dict[str, Any], expected: dict[str, Any], rtol: float) -> None:
    assert list(found["state_dict"]) == list(expected["state_dict"])
    [saved], [wanted] = found["optimizer_states"], expected["optimizer_states"]
    assert saved["param_groups"] == wanted["param_groups"]
    assert list(saved["state"]) == list(wanted["state"])
    assert found["lr_schedulers"] == expected["lr_schedulers"]
    for one, other in (
        (dict(found["state_dict"]), dict(expected["state_dict"])),
        (saved["state"], wanted["state"]),
    ):
        torch.testing.assert_close(one, other, rtol=rtol, atol=1e-5 * (rtol > 0))


def test_there_and_back(
    both: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    convert_checkpoint(both["sharded"], tmp_path / "file.ckpt")
    plain = torch.load(tmp_path / "file.ckpt", weights_only=True)
    assert type(plain["state_dict"]) is dict
    assert_same_training(plain, read(both["one"]), rtol=1e-3)
    paths = [str(tmp_path / "file.ckpt"), str(tmp_path / "folder.ckpt")]
    monkeypatch.setattr("sys.argv", ["convert_checkpoint", *paths])
    convert_app.main()
    assert_same_training(read(tmp_path / "folder.ckpt"), read(both["sharded"]), rtol=0)
    with pytest.raises(SystemExit, match="1"):
        convert_app.main()
    assert "Error: " in (error := capsys.readouterr().err)
    assert "exists. Limit: a new name" in error


def test_a_file_without_names_of_parameters(both: dict[str, Path], tmp_path: Path) -> None:
    convert_checkpoint(both["one"], tmp_path / "folder.ckpt")
    assert_same_training(read(tmp_path / "folder.ckpt"), read(both["one"]), rtol=0)


def test_the_consolidation_tool_of_lightning(
    both: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = "lightning.fabric.utilities.consolidate_checkpoint"
    target = tmp_path / "tool.ckpt"
    monkeypatch.setattr("sys.argv", ["x", str(both["sharded"]), "--output_file", str(target)])
    runpy.run_module(tool, run_name="__main__")
    assert set(torch.load(target, weights_only=True)) >= {"model", "optimizer_0"}
    assert_same_training(read(target), read(both["sharded"]), rtol=0)
    convert_checkpoint(target, tmp_path / "folder.ckpt")
    assert_same_training(read(tmp_path / "folder.ckpt"), read(both["sharded"]), rtol=0)


@pytest.mark.parametrize("kind", ["sharded", "consolidated", "one"])
def test_export_gives_the_trained_model(
    kind: str, both: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "exported"
    monkeypatch.setattr("sys.argv", ["entrain-export", str(both[kind]), str(folder)])
    export_app.main()
    trained = Run(tmp_path).module()
    trained.load_state_dict(read(both[kind])["state_dict"])
    llm = AutoModelForCausalLM.from_pretrained(folder / "llm")
    ids = torch.arange(1, 13)[None]
    with torch.no_grad():
        expected = trained.model.llm.hugging_face_model(input_ids=ids).logits
        torch.testing.assert_close(llm(input_ids=ids).logits, expected, rtol=1e-6, atol=1e-6)
    whole = vlm_from_pretrained(str(folder / "vision"), str(folder / "llm"), image_token_id=0)
    for name, tensor in trained.model.state_dict().items():
        assert torch.equal(whole.state_dict()[name], tensor), name


def test_export_from_the_config_of_a_run(both: dict[str, Path], tmp_path: Path) -> None:
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from lightning_entrain.conf_path import conf_dir

    checkpoint = read(both["one"])
    checkpoint.pop("entrain")
    path = tmp_path / "checkpoints" / "last.ckpt"
    EntrainCheckpointIO().save_checkpoint(checkpoint, path)
    with pytest.raises(CheckpointError, match=r"does not tell what the model is.*--config"):
        export_app.export_checkpoint(path, tmp_path / "exported")
    register_configs()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        run = compose("train", overrides=["model=nano_vlm"])
    (tmp_path / ".hydra").mkdir()
    OmegaConf.save(run, tmp_path / ".hydra" / "config.yaml")
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    assert export_app.export_checkpoint(path, tmp_path / "exported")
    assert (tmp_path / "exported" / "llm" / "tokenizer.json").is_file()
    config = json.loads((tmp_path / "exported" / "llm" / "config.json").read_text())
    assert config["vocab_size"] == 260
    with pytest.raises(CheckpointError, match="no tensor for the model's"):
        export_app.export_checkpoint(
            path, tmp_path / "other", model=Run(tmp_path).module().model.__class__(*other_parts())
        )
    assert not (tmp_path / "other").exists()


def other_parts() -> tuple[Any, Any]:
    from lightning_entrain.models.tiny import nano_vlm

    model = nano_vlm(llm_layers=4)
    return model.encoder, model.llm


def test_damaged_checkpoints_are_refused(both: dict[str, Path], tmp_path: Path) -> None:
    cut = tmp_path / "cut.ckpt"
    content = both["consolidated"].read_bytes()
    cut.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="is cut off"):
        read(cut)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "__0_0.distcp").touch()
    with pytest.raises(CheckpointError, match="holds no whole checkpoint"):
        read(tmp_path / "half")


@pytest.mark.parametrize("can_exchange", [True, False])
def test_folders_are_replaced_in_one_step(
    can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:
        monkeypatch.setattr(files, "_exchange", lambda first, second: False)
    path = tmp_path / "last.ckpt"

    def write(text: str) -> None:
        with written_whole(path) as partial:
            partial.mkdir()
            (partial / "text").write_text(text)
            if text == "failing":
                raise OSError("full")

    write("first")
    with pytest.raises(OSError, match="full"):
        write("failing")
    assert (path / "text").read_text() == "first"
    rename = files.os.rename

    def die(source: Any, target: Any) -> None:
        if Path(target) == path:
            raise KeyboardInterrupt
        rename(source, target)

    if not can_exchange:  # the process dies between its two steps
        with monkeypatch.context() as patch:
            patch.setattr(files.os, "rename", die)
            with pytest.raises(KeyboardInterrupt):
                write("second")
        assert not path.exists()
        assert (existing(path) / "text").read_text() == "first"
    write("third")
    assert (existing(path) / "text").read_text() == "third"
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]
