"""``redrive dev``, ``worker`` and ``setup``: what stands behind runs."""

import asyncio
from typing import Annotated

import typer

from cli.output import AsJson, print_json, say
from cli.running import run_async

__all__ = ["dev", "setup", "worker"]


def dev(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where Temporal listens; 0 takes a free one.")] = 7233,
    ui_port: Annotated[int, typer.Option(min=0, max=65535, help="Where its UI listens; 0 takes a free one.")] = 8233,
) -> None:
    """Run an embedded Temporal server and a worker, until Ctrl-C; what they know is kept in REDRIVE_DATA."""

    async def work() -> None:
        from contracts.tools import load_catalog
        from workers.embedded import embedded_server
        from workers.logs import configure_logs
        from workers.schedules import schedule_sweep
        from workers.settings import load_settings
        from workers.stopping import until_stopped
        from workers.worker import running_worker

        configure_logs()
        settings = load_settings()
        # A bad catalog is told before a server starts for nothing.
        load_catalog(settings.tools)
        with until_stopped():
            async with (
                embedded_server(settings.data, port, ui_port, storage=settings.storage) as server,
                running_worker(server.client, settings),
            ):
                await schedule_sweep(server.client, settings.task_queue)
                say(f"Temporal  {server.address}   (TEMPORAL_ADDRESS={server.address})")
                say(f"UI        {server.ui_url}")
                say(f"worker    task queue {settings.task_queue}, tools from {settings.tools}; stop with Ctrl-C")
                await asyncio.Event().wait()

    run_async(work())


def worker() -> None:
    """Run a worker against the configured Temporal, until Ctrl-C or SIGTERM; calls in flight are finished first."""

    async def work() -> None:
        from workers.client import connect
        from workers.logs import configure_logs
        from workers.settings import load_settings
        from workers.worker import serve

        configure_logs()
        settings = load_settings()
        await serve(await connect(), settings)

    run_async(work())


def setup(as_json: AsJson = False) -> None:
    """Register the search attributes and the schedule of Sweep in the namespace; safe to repeat."""

    async def work() -> None:
        from workers.client import connect, register_search_attributes
        from workers.schedules import schedule_sweep
        from workers.settings import load_settings
        from workflows.attributes import SEARCH_ATTRIBUTES

        settings = load_settings()
        client = await connect()
        await register_search_attributes(client)
        schedule = await schedule_sweep(client, settings.task_queue)
        names = [key.name for key in SEARCH_ATTRIBUTES]
        if as_json:
            print_json({"namespace": client.namespace, "search_attributes": names, "schedules": [schedule]})
        else:
            say(f"namespace {client.namespace} knows the search attributes {', '.join(names)}")
            say(f"schedule {schedule} sweeps task queue {settings.task_queue} every minute")

    run_async(work())
