"""Makes ``Trainer(strategy="entrain")`` work without importing Lightning before it is needed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_LIGHTNING = "lightning.pytorch.strategies"


def register_when_lightning_is_there() -> None:
    """Register now if Lightning is imported, else as soon as it is."""
    if _LIGHTNING in sys.modules:
        _register(sys.modules[_LIGHTNING])
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _register(strategies: ModuleType) -> None:
    registry = strategies.StrategyRegistry
    if "entrain" not in registry:
        registry.register("entrain", _make, description="Pipeline for multimodal models")


def _make(**options: Any) -> Any:
    from lightning_entrain.strategy import EntrainStrategy

    return EntrainStrategy(**options)


class _AfterImport:
    """Finds Lightning's strategies as usual and registers ours once they are loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _LIGHTNING:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_register(module: ModuleType) -> None:
            load(module)
            _register(module)

        spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec
