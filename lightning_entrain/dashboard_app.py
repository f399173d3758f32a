"""The app `entrain-dashboard`: panels in a W&B project, for users with an account."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from lightning_entrain.errors import ConfigError, EntrainError
from lightning_entrain.loggers import wandb_key_is_configured
from lightning_entrain.observe.dashboard import build_report, build_workspace


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `entrain-dashboard`."""
    parser = argparse.ArgumentParser(
        prog="entrain-dashboard",
        description="Creates or updates a W&B workspace with this package's panels, and a report "
        "that compares runs.",
        epilog="Example: entrain-dashboard --entity me --project lightning-entrain --group sweep-1",
    )
    parser.add_argument("--entity", required=True, help="W&B user or team")
    parser.add_argument("--project", default="lightning-entrain", help="W&B project")
    parser.add_argument("--group", help="compare the runs of this group only")
    parser.add_argument("--runs", nargs="*", default=[], help="compare runs of these names only")
    parser.add_argument("--no-report", action="store_true", help="only the workspace")
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be saved; needs no account"
    )
    options = parser.parse_args(arguments)
    try:
        pages = [build_workspace(options.entity, options.project)]
        if not options.no_report:
            pages.append(
                build_report(
                    options.entity, options.project, group=options.group, runs=options.runs
                )
            )
        if options.dry_run:
            print(json.dumps([serialised(page) for page in pages], indent=2))
            return
        if not wandb_key_is_configured():
            raise ConfigError(
                "No W&B key is configured",
                limit="workspaces and reports live in an account",
                remedy="run `wandb login`, or pass --dry-run",
            )
        for page in pages:
            page.save()
            print(page.url)
    except EntrainError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(1)


def serialised(page: Any) -> Any:
    """What W&B would store of a workspace or a report, as plain values."""
    return json.loads(page._to_model().model_dump_json(by_alias=True))


if __name__ == "__main__":
    main()
