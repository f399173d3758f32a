"""All options of `entrain-train` in one list: for docs/configuration.md and for suggestions.

`python -m lightning_entrain.config_reference > docs/configuration.md` writes the page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

from omegaconf import OmegaConf

from lightning_entrain.conf_path import conf_dir
from lightning_entrain.config import GROUPS, ModuleConf, TrainConf, TrainerConf, describe_range

_INTRO = """# Options of entrain-train

Each is set on the command line as `NAME=VALUE`, a group's choice as `GROUP=CHOICE`. A wrong name
or type is an error, and so is a value out of range. `entrain-train --cfg job` prints the values
that a command would use. Own config files go into a folder given with `--config-dir`.

The defaults below are those of each option; a group's choice may set some of them, as the list of
groups says.
"""

GROUP_NAMES = ("data", "model", "strategy", "trainer", "logger", "callbacks", "experiment")
"""Groups of conf/, in the order in which conf/train.yaml chooses from them."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option.

    Attributes:
        name: Dotted name, as on the command line.
        default: Its default as YAML would show it.
        meaning: What it does.
        range: Allowed values; empty for any of the type.
    """

    name: str
    default: str
    meaning: str
    range: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """Options that stand together: of a group's choice, or of one part of the config.

    Attributes:
        title: Heading.
        about: One sentence.
        options: The options.
    """

    title: str
    about: str
    options: tuple[Option, ...]


def sections() -> Iterator[Section]:
    """All sections in the order of the page."""
    yield _section("Top level", "", TrainConf)
    yield _section("module", "module.", ModuleConf)
    yield _section("trainer", "trainer.", TrainerConf)
    for group, schemas in GROUPS.items():
        for name, schema in schemas.items():
            prefix, title = f"{group}.", f"{group}={name}"
            if group in ("logger", "callbacks"):
                prefix, title = f"{group}.{name}.", f"{group}.{name}"
            elif group == "data":
                title = "data"
            elif group == "source":
                prefix, title = "data.source.", f"data={name}"
            yield _section(title, prefix, schema)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One file of a group.

    Attributes:
        group: The group.
        name: The file's name without its ending.
        about: What its first line says.
        sets: Options that it sets, as on the command line.
        is_default: Whether it is taken where the user chooses nothing.
    """

    group: str
    name: str
    about: str
    sets: tuple[str, ...]
    is_default: bool


def choices() -> Iterator[Choice]:
    """All choices of all groups."""
    shipped = OmegaConf.load(conf_dir() / "train.yaml").defaults
    taken = {
        key: value for entry in shipped if OmegaConf.is_dict(entry) for key, value in entry.items()
    }
    for group in GROUP_NAMES:
        for path in sorted((conf_dir() / group).glob("*.yaml")):
            lines = path.read_text(encoding="utf-8").splitlines()
            about = next(line for line in lines if not line.startswith("# @package"))
            yield Choice(
                group=group,
                name=path.stem,
                about=about.removeprefix("#").strip(),
                sets=tuple(_set_options(group, OmegaConf.load(path))),
                is_default=taken.get(group) == path.stem,
            )


def _set_options(group: str, content: Any) -> Iterator[str]:
    """What a config file sets: other groups' choices, then values."""
    plain = OmegaConf.to_container(content, resolve=False)
    assert isinstance(plain, dict)
    for entry in plain.pop("defaults", []):
        for key, value in entry.items() if isinstance(entry, dict) else ():
            if str(key).startswith("override /"):
                yield f"{str(key).removeprefix('override /')}={value}"
    yield from _flat("" if group == "experiment" else f"{group}.", plain)


def _flat(prefix: str, values: dict[Any, Any]) -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}={value}"


def _choices_markdown() -> str:
    lines = ["\n## Groups", "", "| choice | what | sets |", "| --- | --- | --- |"]
    for choice in choices():
        default = " (default)" if choice.is_default else ""
        sets = ", ".join(f"`{text}`" for text in choice.sets)
        lines.append(f"| `{choice.group}={choice.name}`{default} | {choice.about} | {sets} |")
    return "\n".join(lines) + "\n"


def reference_markdown() -> str:
    """The page docs/configuration.md."""
    parts = [_INTRO, _choices_markdown()]
    for section in sections():
        parts.append(f"\n## {section.title}\n\n{section.about}\n")
        if not section.options:
            continue
        parts.append("\n| option | default | range | meaning |\n| --- | --- | --- | --- |\n")
        for option in section.options:
            cells = (f"`{option.name}`", f"`{option.default}`", option.range, option.meaning)
            parts.append(f"| {' | '.join(cells)} |\n")
    return "".join(parts)


def known_names() -> list[str]:
    """Dotted names of all options, and the names of the groups."""
    return [*GROUP_NAMES] + [option.name for section in sections() for option in section.options]


def _section(title: str, prefix: str, schema: type) -> Section:
    options = tuple(_option(prefix, entry) for entry in fields(schema) if _is_option(entry))
    return Section(title=title, about=(schema.__doc__ or "").strip(), options=options)


def _is_option(entry: Field) -> bool:
    return bool(entry.metadata) and not entry.metadata["meaning"].startswith("Group")


def _option(prefix: str, entry: Field) -> Option:
    default = entry.default
    if default is MISSING:
        assert entry.default_factory is not MISSING, "options have a default"
        default = entry.default_factory()
    if default is None or isinstance(default, bool):
        default = {None: "null", True: "true", False: "false"}[default]
    return Option(
        name=prefix + entry.name,
        default=str(default),
        meaning=entry.metadata["meaning"],
        range=describe_range(dict(entry.metadata)),
    )


if __name__ == "__main__":
    print(reference_markdown(), end="")
