"""``python -m benchmarks [ROW…]``: measures, prints the table, and keeps it where it is asked to."""

import argparse
import asyncio
import dataclasses
import gc
import importlib.util
import json
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.lab import Lab, Sizes
from benchmarks.processes import program
from benchmarks.report import DOCUMENT, RESULTS, Results, kept, render, save, write_table
from benchmarks.rows import ROWS
from benchmarks.tool_server import ToolServer

_OTHERS: Final = ("http_layer", "ledger_cost")
"""Programs that measure a part of Redrive by itself; each writes what it finds to the file named by ``--json``."""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join([*ROWS, *_OTHERS])}; all by default")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, only to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures")
    parser.add_argument(
        "--write", action="store_true", help=f"keep them in {RESULTS.name}, and the table in {DOCUMENT.name}"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="of engines that are compared, those named so")
    parser.add_argument("--keep", action="store_true", help="keep logs and databases, and say where")
    for size in dataclasses.fields(Sizes):
        option = f"--{size.name.replace('_', '-')}"
        parser.add_argument(option, type=type(size.default), metavar="N", help=f"by default {size.default}")
    arguments = parser.parse_args()
    if unknown := set(arguments.rows) - {*ROWS, *_OTHERS}:
        parser.error(f"no such row: {', '.join(sorted(unknown))}")
    if arguments.write and arguments.quick:
        print("--quick measures nothing, and so it is not written", file=sys.stderr)
        arguments.write = False
    return arguments


def _sizes(arguments: argparse.Namespace) -> Sizes:
    asked = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(Sizes)}
    usual = Sizes.quick() if arguments.quick else Sizes()
    return dataclasses.replace(usual, **{name: value for name, value in asked.items() if value is not None})


async def _measure(arguments: argparse.Namespace, root: Path) -> bool:
    sizes = _sizes(arguments)
    results = kept(RESULTS) if arguments.write else Results(quick=arguments.quick)
    failed: list[str] = []
    async with ToolServer.running(root) as tools:
        for name in arguments.rows or [*ROWS, *_OTHERS]:
            print(f"{name} …", file=sys.stderr, flush=True)
            began = time.monotonic()
            try:
                if name in ROWS:
                    results.rows[name] = await ROWS[name](Lab(tools, root, sizes, arguments.only))
                    results.rows[name].seconds = time.monotonic() - began
                elif importlib.util.find_spec(f"benchmarks.{name}"):
                    results.others[name] = await _other(name, root, arguments.quick)
            except Exception as error:  # noqa: BLE001 - the other rows are worth having
                failed.append(name)
                print(f"{name} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            _keep(arguments, results)
    print(render(results))
    return not failed


def _keep(arguments: argparse.Namespace, results: Results) -> None:
    if arguments.json is not None:
        save(results, arguments.json)
    if arguments.write:
        results.rows = {name: results.rows[name] for name in ROWS if name in results.rows}
        save(results, RESULTS)
        write_table(results, DOCUMENT)


async def _other(name: str, root: Path, quick: bool) -> Any:
    found = root / f"{name}.json"
    flags: Sequence[str] = ["--quick"] if quick else []
    command = (sys.executable, "-m", f"benchmarks.{name}", "--json", str(found), *flags)
    async with program(*command, log=root / f"{name}.log") as measuring:
        await measuring.done()
    return json.loads(found.read_text())


def main() -> int:
    """Reads the command line and measures."""
    arguments = _arguments()
    logging.basicConfig(level=logging.WARNING)
    root = Path(tempfile.mkdtemp(prefix="redrive-bench-"))
    try:
        well = asyncio.run(_measure(arguments, root))
    finally:
        if arguments.keep:
            print(f"everything is kept in {root}", file=sys.stderr)
        else:
            shutil.rmtree(root)
    gc.collect()  # lets the SDK's threads go before the interpreter does
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
