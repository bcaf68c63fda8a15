"""How workflows call activities: timeouts, retries, and what a person reads beside them in the UI."""

from datetime import timedelta
from typing import Final

from temporalio.common import RetryPolicy

__all__ = [
    "ASK_AGAIN",
    "COMMIT_TIMEOUT",
    "HEARTBEAT_TIMEOUT",
    "LONGEST_PATIENCE",
    "MARGIN",
    "NODE_CANCELLED",
    "NODE_DISCARDED",
    "PATIENT_RETRY",
    "QUICK_RETRY",
    "RECONCILE_RETRY",
]

NODE_CANCELLED: Final = "NodeCancelled"
NODE_DISCARDED: Final = "NodeDiscarded"
"""Error types of nodes that ended without a result."""

ASK_AGAIN: Final = timedelta(minutes=10)
LONGEST_PATIENCE: Final = timedelta(days=1)
"""How long one waits for a workflow that was found open before asking again (it may have been terminated), and the
longest that this becomes, doubling: a history must not fill up with questions."""

MARGIN: Final = timedelta(seconds=60)
"""What an activity has beyond its tool's timeout: to claim, and to keep an answer until the ledger takes it."""

HEARTBEAT_TIMEOUT: Final = timedelta(seconds=15)
"""How soon a lost worker is noticed."""

COMMIT_TIMEOUT: Final = timedelta(seconds=30)
"""For activities that only talk to the ledger and to Temporal."""

RECONCILE_RETRY: Final = RetryPolicy(initial_interval=timedelta(seconds=1), maximum_interval=timedelta(seconds=30))

PATIENT_RETRY: Final = RetryPolicy(initial_interval=timedelta(seconds=0.5), maximum_interval=timedelta(seconds=10))
"""For what must be done in the end, such as committing a decision: the ledger will be back."""

QUICK_RETRY: Final = RetryPolicy(initial_interval=timedelta(seconds=0.5), maximum_attempts=4)
"""For what can be done without."""
