"""``redrive storage``: payloads that are too large for Temporal itself."""

from typing import Annotated

import typer

from cli.documents import read_duration
from cli.errors import UsageError
from cli.output import AsJson, note, print_json, say
from cli.running import run_async

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Payloads that are too large for Temporal itself: see REDRIVE_STORAGE.")


@app.callback()
def _storage() -> None:
    pass


@app.command()
def prune(
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="DURATION", help="Only what was stored longer ago, such as 30d.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete payloads that were stored long ago, of runs that Temporal has forgotten.

    As long as it knows a run, a node or a dead letter of it, open or closed, all of the run's payloads stay.
    """
    duration = read_duration(older_than, "--older-than")

    async def work() -> None:
        from workers.client import connect
        from workers.settings import load_settings
        from workers.storage import open_storage
        from workers.storage.retention import prune as prune_storage

        settings = load_settings()
        if settings.storage is None:
            raise UsageError("REDRIVE_STORAGE names no storage: there is nothing to delete")
        report = await prune_storage(await connect(), open_storage(settings.storage), duration, dry_run)
        if as_json:
            print_json(report.model_dump(mode="json"))
            return
        say(
            "would delete " if dry_run else "deleted ",
            f"{report.payloads} payloads of {report.runs} runs, {report.bytes / 1_000_000:.1f} MB",
        )
        if report.kept:
            note(f"those of {report.kept} more runs are kept: Temporal still knows them")

    run_async(work())
