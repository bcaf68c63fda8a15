"""The short form of `make chaos`: a few runs, a few kills, and nothing twice, lost, forgotten or stuck."""

from pathlib import Path

import pytest

from tests.chaos.campaign import Campaign, run_campaign
from tests.chaos.schedule import DATABASE


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "campaign",
    [
        Campaign(seed=46, operations=80, kills=6, at_once=16, patience=600, ledger=DATABASE),
        Campaign(seed=37, operations=40, kills=4, at_once=16, patience=600, ledger="sqlite"),
    ],
    ids=lambda campaign: campaign.ledger,
)
async def test_nothing_is_lost_or_done_twice_while_everything_is_killed_and_frozen(
    campaign: Campaign, tmp_path: Path
) -> None:
    said: list[str] = []
    report = await run_campaign(campaign, tmp_path, said.append)
    assert report.violations == [], "\n".join([*said, report.text()])
    assert report.kills == campaign.kills
    assert report.operations == campaign.operations
    # What was never called is the dependants of what was discarded or cancelled.
    assert report.called > campaign.operations / 2
    assert 0 < report.effects <= report.calls
