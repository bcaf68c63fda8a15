"""The model of the protocol, checked exhaustively by spin; see ``docs/protocol.md``."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(1800)]

MODEL = Path(__file__).parent / "protocol.pml"
PARTS = {
    "redrives": (),
    "cancelled": ("CANCELS=1", "REDRIVES=0"),
    "reset": ("RESETS=1", "REDRIVES=0"),
    "cancelled-and-redriven": ("CANCELS=1", "DELIVERIES=1"),
    "reset-and-redriven": ("RESETS=1", "DELIVERIES=1"),
}
"""What happens to the node, besides crashes, frozen workers and redeliveries, which always do."""

RULES = [
    ("NO_FENCING", "RECON", ()),
    ("NO_PRESEND_COMMIT", "BARE", ()),
    ("NO_HORIZON", "RECON", ()),
    ("NO_STALE_FENCE", "BARE", ()),
    ("NO_LEASE_CHECK", "RECON", ()),
    ("NO_CANCEL_CHECK", "BARE", ("CANCELS=1",)),
    ("NO_CANCEL_FIRST", "BARE", ("CANCELS=1",)),
    ("NO_END_OF_LEASE", "RECON", ()),
    ("NO_EVIDENCE_CHECK", "BARE", ()),
    ("NO_CURRENT_OPERATION", "RECON", ()),
    ("NO_END_CHECK", "RECON", ("RESETS=1", "REDRIVES=0")),
    ("NO_OVERRIDE_NEEDED", "WINDOW", ()),
]

STATES = [
    ("SUCCESS", "BARE", ()),
    ("RECONCILED", "RECON", ()),
    ("DEAD_LETTER", "BARE", ()),
    ("REDRIVEN", "BARE", ()),
    ("NEW_OPERATION", "BARE", ()),
    ("RISK_TAKEN", "BARE", ()),
    ("SECOND_EFFECT", "BARE", ()),
    ("RESENT", "KEY", ()),
    ("FENCED", "BARE", ()),
    ("CANCELLED_END", "BARE", ("CANCELS=1",)),
    ("DISCARDED_END", "BARE", ()),
    ("RESOLVED_END", "BARE", ()),
    ("RESET_MOVED", "BARE", ("RESETS=1",)),
    ("STALE_SEEN", "BARE", ()),
    ("LEASE_LOST", "BARE", ()),
    ("OUTLIVED", "BARE", ("CANCELS=1",)),
    ("REPLAYED", "BARE", ()),
    ("EVIDENCE", "BARE", ()),
]


def check(folder: Path, *definitions: str, optimize: str = "-O0") -> str:
    """Searches all of the model's states, or up to its first error; answers what spin's checker says."""
    for program, package in (("spin", "spin"), ("gcc", "gcc")):
        if shutil.which(program) is None:
            pytest.fail(f"{program} is missing: the protocol's model needs Debian's packages spin and gcc ({package})")
    flags = [f"-D{definition}" for definition in definitions]
    subprocess.run(["spin", *flags, "-a", MODEL], cwd=folder, check=True, capture_output=True, timeout=60)
    # No approximation: every state is stored as it is. 3 GB is far beyond what is needed.
    compiler = ["gcc", optimize, "-w", "-DSAFETY", "-DMEMLIM=3000", "-o", "pan", "pan.c"]
    subprocess.run(compiler, cwd=folder, check=True, capture_output=True, timeout=600)
    done = subprocess.run(["./pan", "-w22", "-m10000"], cwd=folder, check=False, capture_output=True, timeout=1500)
    said = done.stdout.decode() + done.stderr.decode()
    assert "max search depth too small" not in said, said
    assert "out of memory" not in said, said
    assert "Bit statespace" not in said, said
    return said


def assert_holds(said: str) -> None:
    assert "Full statespace search" in said, said
    assert "Search not completed" not in said, said
    assert re.search(r"\berrors: 0\b", said), said


def assert_violated(said: str) -> None:
    assert "assertion violated" in said, said
    assert re.search(r"\berrors: 1\b", said), said


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", ["READ", "KEY", "WINDOW", "RECON", "BARE"])
def test_the_promises_hold_in_every_state(tmp_path: Path, kind: str, part: str) -> None:
    assert_holds(check(tmp_path, f"KIND={kind}", *PARTS[part], optimize="-O1"))


@pytest.mark.parametrize(("rule", "kind", "part"), RULES, ids=[rule for rule, _, _ in RULES])
def test_no_rule_can_be_taken_out(tmp_path: Path, rule: str, kind: str, part: tuple[str, ...]) -> None:
    assert_violated(check(tmp_path, rule, f"KIND={kind}", *part))


def test_what_passes_the_last_check_and_is_then_frozen_can_act_late_where_the_tool_has_no_key(tmp_path: Path) -> None:
    assert_violated(check(tmp_path, "GAP", "KIND=RECON"))


def test_the_key_closes_that_gap(tmp_path: Path) -> None:
    assert_holds(check(tmp_path, "GAP", "KIND=KEY", optimize="-O1"))


@pytest.mark.parametrize(("state", "kind", "part"), STATES, ids=[state for state, _, _ in STATES])
def test_the_model_is_not_vacuous(tmp_path: Path, state: str, kind: str, part: tuple[str, ...]) -> None:
    assert_violated(check(tmp_path, f"REACH={state}", f"KIND={kind}", *part))
