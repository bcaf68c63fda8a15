"""All that a program needs to work with Redrive is a Temporal client: nothing of Redrive is imported here.

    python examples/raw_client.py start order-7 examples/order.json
    python examples/raw_client.py status order-7
    python examples/raw_client.py entry order-7 charge
    python examples/raw_client.py redrive order-7 charge "card limit raised"
    python examples/raw_client.py result order-7

TEMPORAL_ADDRESS says where Temporal is. The same calls work from any language: fixed names, plain JSON.
"""

import asyncio
import gc
import getpass
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import ApplicationError, WorkflowAlreadyStartedError


async def start(client: Client, run_id: str, file: str) -> str:
    """Starts a run; its id is the workflow's id, so that Temporal refuses a second start while the first one runs."""
    spec = await asyncio.to_thread(Path(file).read_text)
    try:
        await client.start_workflow("Run", json.loads(spec), id=run_id, task_queue="redrive")
    except WorkflowAlreadyStartedError:
        return f"{run_id} is running already"
    return f"started {run_id}"


async def status(client: Client, run_id: str) -> Any:
    """How the run is doing, and what it waits for."""
    return await client.get_workflow_handle(run_id).query("status")


async def entry(client: Client, run_id: str, node_id: str) -> Any:
    """The evidence of a node's dead letter."""
    return await client.get_workflow_handle(f"{run_id}/{node_id}/dead-letter").query("entry")


async def redrive(client: Client, run_id: str, node_id: str, reason: str) -> Any:
    """Decides a dead letter. An update answers with the decision's record; a signal sends the same without waiting."""
    handle = client.get_workflow_handle(f"{run_id}/{node_id}/dead-letter")
    return await handle.execute_update("redrive", {"decided_by": getpass.getuser(), "reason": reason})


async def result(client: Client, run_id: str) -> Any:
    """Waits for the end of the run; a failed one has the same document in its error's details."""
    try:
        return await client.get_workflow_handle(run_id).result()
    except WorkflowFailureError as error:
        if isinstance(error.cause, ApplicationError) and error.cause.type == "RunFailed":
            return error.cause.details[0]
        raise


COMMANDS: dict[str, Callable[..., Awaitable[Any]]] = {
    "start": start,
    "status": status,
    "entry": entry,
    "redrive": redrive,
    "result": result,
}


async def main(name: str, *arguments: str) -> None:
    client = await Client.connect(os.environ.get("TEMPORAL_ADDRESS", "localhost:7233"))
    answer = await COMMANDS[name](client, *arguments)
    print(answer if isinstance(answer, str) else json.dumps(answer, indent=2))


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in COMMANDS:
        sys.exit(__doc__)
    asyncio.run(main(*sys.argv[1:]))
    # Lets the SDK's threads let go of what they hold before the interpreter ends.
    gc.collect()
