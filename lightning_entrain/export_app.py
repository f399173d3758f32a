"""The app `entrain-export`: writes a trained model as Hugging Face folders."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_entrain.errors import CheckpointError, EntrainError

if TYPE_CHECKING:
    from lightning_entrain.models.entrain_model import EntrainModel

_HYDRA_CONFIG = Path(".hydra") / "config.yaml"


def export_checkpoint(
    checkpoint: str | Path,
    folder: str | Path,
    *,
    config: str | Path | None = None,
    model: EntrainModel | None = None,
    tokenizer: str | Path | None = None,
) -> bool:
    """Write the model of a checkpoint with ``save_pretrained``: ``vision/``, ``llm/``, projector.

    The model is built from what the checkpoint tells of it; from ``config``; or from the Hydra
    config that lies in the run's folder. The whole model is held in memory. The folder appears
    when it is complete.

    Args:
        checkpoint: Consolidated or sharded checkpoint of any layout.
        folder: Where to write; must not exist.
        config: A run's ``.hydra/config.yaml``; goes before what the checkpoint tells.
        model: The model, whatever its weights; goes before both.
        tokenizer: Folder or `tokenizer.json` that is copied into ``llm/``; None takes the one that
            `entrain-train` left in the run's folder.

    Returns:
        Whether a tokenizer was written.

    Raises:
        CheckpointError: If the checkpoint does not fit the model, nothing tells what the model is,
            or the folder exists.
    """
    from lightning_entrain.checkpoint.files import written_whole
    from lightning_entrain.checkpoint.model_record import build_model, load_weights
    from lightning_entrain.models.pretrained import export_pretrained
    from lightning_entrain.tokenizer_files import add_tokenizer, tokenizer_of_run

    folder = Path(folder)
    if folder.exists():
        raise CheckpointError(f"{folder} exists", limit="a new folder", remedy="choose another")
    state, record = _read_weights(Path(checkpoint))
    prefix = None if record is None else str(record["prefix"])
    if model is None:
        found = _config_of(Path(checkpoint)) if config is None and record is None else config
        if found is not None:
            model = _model_of_run(Path(found), state)
        elif record is not None:
            model = build_model(record)
        else:
            raise CheckpointError(
                f"{checkpoint} does not tell what the model is",
                limit="a checkpoint of EntrainStrategy or EntrainLightningModule, or a config",
                remedy="pass --config RUN/.hydra/config.yaml, or call "
                "lightning_entrain.export_app.export_checkpoint(..., model=model)",
            )
    load_weights(model, state, prefix)
    source = tokenizer_of_run(Path(checkpoint)) if tokenizer is None else Path(tokenizer)
    with written_whole(folder) as partial:
        export_pretrained(model, partial)
        if source is not None:
            add_tokenizer(source, partial / "llm")
    return source is not None


def _read_weights(path: Path) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """State dict and the record of the model; optimizer state is not read if it can be spared."""
    from lightning_entrain.checkpoint.files import EntrainCheckpointIO, existing
    from lightning_entrain.checkpoint.sharded import MODEL, RECORD, is_sharded, read_sharded

    path = existing(path)
    if not path.exists():
        raise CheckpointError(f"There is no {path}", limit="an existing checkpoint")
    if is_sharded(path):
        checkpoint = read_sharded(path, lambda part, name: part == MODEL)
    else:
        checkpoint = EntrainCheckpointIO(memory_map=True).load_checkpoint(path)
    if "state_dict" not in checkpoint:
        raise CheckpointError(
            f"{path} has no state_dict", limit="a checkpoint of a Lightning Trainer"
        )
    return checkpoint["state_dict"], checkpoint.get(RECORD, {}).get("model")


def _config_of(checkpoint: Path) -> Path | None:
    """The Hydra config of the run in whose folder the checkpoint lies."""
    for parent in checkpoint.absolute().parents[:3]:
        if (parent / _HYDRA_CONFIG).is_file():
            return parent / _HYDRA_CONFIG
    return None


def _model_of_run(config: Path, state: Mapping[str, Any]) -> EntrainModel:
    """Build a run's model, with the vocabulary that the weights have."""
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    run = OmegaConf.load(config)
    node = OmegaConf.select(run, "model")
    if node is None or "_target_" not in node:
        raise CheckpointError(f"{config} has no model._target_", limit="a run's .hydra/config.yaml")
    options = {}
    if OmegaConf.is_missing(node, "vocab_size") or "vocab_size" not in node:
        rows = [t.shape[0] for n, t in state.items() if n.endswith("embed_tokens.weight")]
        if len(rows) != 1:
            raise CheckpointError(
                f"The checkpoint has {len(rows)} tensors embed_tokens.weight", limit="one"
            )
        options = {"vocab_size": rows[0], "image_token_id": 0}
    return instantiate(node, **options)


def main() -> None:
    """Entry point of `entrain-export`."""
    parser = argparse.ArgumentParser(
        prog="entrain-export",
        description="Write the model of a checkpoint as Hugging Face folders: vision/ and llm/.",
    )
    parser.add_argument("checkpoint", help="checkpoint file or folder, of any layout")
    parser.add_argument("folder", help="where to write; must not exist")
    parser.add_argument(
        "--config", help="the run's .hydra/config.yaml, if the checkpoint lies apart"
    )
    parser.add_argument(
        "--tokenizer", help="folder or tokenizer.json to put beside the LLM; default: the run's"
    )
    arguments = parser.parse_args()
    try:
        with_tokenizer = export_checkpoint(
            arguments.checkpoint,
            arguments.folder,
            config=arguments.config,
            tokenizer=arguments.tokenizer,
        )
    except (EntrainError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(1)
    print(f"Wrote {arguments.folder}: load llm/ with AutoModelForCausalLM.from_pretrained")
    if with_tokenizer:
        print("Its tokenizer lies there too: AutoTokenizer.from_pretrained")
    else:
        print("No tokenizer was found beside the checkpoint: --tokenizer names one")


if __name__ == "__main__":
    main()
