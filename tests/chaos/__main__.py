"""`python -m tests.chaos --seed N --operations 10000 --kills 200`: exits 1 on any violation."""

import argparse
import asyncio
import gc
import random
import shutil
import signal
import sys
from pathlib import Path

from tests.chaos.campaign import Campaign, new_folder, run_campaign
from tests.chaos.schedule import DATABASE


def main() -> int:
    """Reads the command line and runs a campaign."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, help="all that is random follows from it; without one, a new one")
    parser.add_argument("--operations", type=int, default=300)
    parser.add_argument("--kills", type=int, help="without a number, one for each 50 operations")
    parser.add_argument("--ledger", choices=(DATABASE, "sqlite"), default=DATABASE)
    parser.add_argument("--at-once", type=int, default=24, help="runs that are open at once")
    parser.add_argument("--patience", type=float, default=900, help="seconds before a run counts as stuck")
    parser.add_argument("--report", type=Path, help="where to write the report, as JSON")
    parser.add_argument("--folder", type=Path, help="where to keep every log (without one, only on a violation)")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(10**6)
    campaign = Campaign(
        seed=seed,
        operations=arguments.operations,
        kills=arguments.kills if arguments.kills is not None else -(-arguments.operations // 50),
        ledger=arguments.ledger,
        at_once=arguments.at_once,
        patience=arguments.patience,
    )
    _say(f"seed {campaign.seed}, {campaign.operations} operations, {campaign.kills} kills, ledger {campaign.ledger}")
    folder: Path = arguments.folder or new_folder()
    folder.mkdir(parents=True, exist_ok=True)
    # As Ctrl-C: what was started is ended first.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    report = asyncio.run(run_campaign(campaign, folder, _say))
    gc.collect()  # lets the SDK's threads go before the interpreter does
    _say(report.text())
    if arguments.report is not None:
        arguments.report.write_text(report.json())
    if report.violations:
        _say(f"again with --seed {campaign.seed}; the logs are in {folder}")
        return 1
    if arguments.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _say(what: str) -> None:
    sys.stdout.write(what + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
