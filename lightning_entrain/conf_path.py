"""Where the shipped configuration files lie: in the wheel, or beside the package in a clone."""

from __future__ import annotations

from pathlib import Path

from lightning_entrain.errors import ConfigError


def conf_dir(package: Path | None = None) -> Path:
    """Folder of the shipped configs, absolute.

    In a clone (also when installed with `pip install -e`) it is `conf/` beside the package, so
    edits there take effect; in an installed wheel it is `conf/` inside the package.

    Args:
        package: Folder of the package; that of this module if None.

    Raises:
        ConfigError: If neither place has it.
    """
    package = (package or Path(__file__).parent).resolve()
    clone = package.parent / "conf"
    wheel = package / "conf"
    if (package.parent / "pyproject.toml").is_file() and (clone / "train.yaml").is_file():
        return clone
    if (wheel / "train.yaml").is_file():
        return wheel
    raise ConfigError(
        f"No configs found in {wheel} or {clone}",
        limit="the package brings its conf folder",
        remedy="install it again with pip",
    )
