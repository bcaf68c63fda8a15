"""What a user is told when something is wrong, and the exit code: 1 refused or failed, 2 bad input, 3 cannot reach."""

from collections.abc import Mapping
from typing import Final, NamedTuple

__all__ = ["BAD_INPUT", "CANNOT_REACH", "REFUSED", "CommandError", "Explanation", "UsageError", "explain"]

REFUSED: Final = 1
BAD_INPUT: Final = 2
CANNOT_REACH: Final = 3


class CommandError(Exception):
    """The command was refused or has failed; the message says why."""


class UsageError(Exception):
    """What the user gave is not usable; the message says what is."""


class Explanation(NamedTuple):
    """What is printed on standard error, and the exit code."""

    code: int
    message: str


def explain(error: Exception) -> Explanation | None:
    """What to tell a user; None for what no user can cause: a bug, which shows itself with a traceback."""
    if isinstance(error, UsageError):
        return Explanation(BAD_INPUT, str(error))
    if isinstance(error, CommandError):
        return Explanation(REFUSED, str(error))
    # Only now, and only if something is wrong: the imports take longer than most commands' own work.
    from activities.ledger import LedgerUnavailableError
    from contracts.dead_letters import MalformedDecisionError
    from contracts.runs import InvalidRunError
    from contracts.tools import CatalogError
    from workers.client import TemporalUnavailableError
    from workers.dead_letters import DeadLetterNotFoundError
    from workers.embedded import EmbeddedServerError
    from workers.executions import NoAnswerError
    from workers.runs import OtherSpecError, RunNotFoundError
    from workers.settings import SettingsError
    from workers.storage import StorageError, foreign_reference

    match error:
        case InvalidRunError():
            return Explanation(BAD_INPUT, _listed("the run is not usable; nothing was started", error.problems))
        case CatalogError():
            return Explanation(BAD_INPUT, _listed(f"{error.source} is not usable", error.problems))
        case MalformedDecisionError():
            return Explanation(BAD_INPUT, f"the decision is not usable: {error}")
        case SettingsError():
            return Explanation(BAD_INPUT, str(error))
        case RunNotFoundError() | OtherSpecError() | DeadLetterNotFoundError():
            return Explanation(REFUSED, str(error))
        case TemporalUnavailableError() | LedgerUnavailableError() | StorageError():
            return Explanation(CANNOT_REACH, str(error))
        case EmbeddedServerError() | NoAnswerError():
            return Explanation(CANNOT_REACH, str(error))
        case RuntimeError() | ValueError() if (cure := foreign_reference(error)) is not None:
            return Explanation(BAD_INPUT, cure)
        case _:
            return _explain_rpc(error)


def _listed(title: str, problems: list[str]) -> str:
    return "\n".join([f"{title}:", *(f"  {problem}" for problem in problems)])


def _explain_rpc(error: Exception) -> Explanation | None:
    """What Temporal's own answers mean here."""
    from temporalio.client import RPCTimeoutOrCancelledError
    from temporalio.service import RPCError, RPCStatusCode

    if isinstance(error, RPCTimeoutOrCancelledError):
        return Explanation(CANNOT_REACH, "Temporal has not answered in time")
    if not isinstance(error, RPCError):
        return None
    unreachable: Mapping[RPCStatusCode, str] = {
        RPCStatusCode.UNAVAILABLE: "cannot reach Temporal",
        RPCStatusCode.DEADLINE_EXCEEDED: "Temporal has not answered in time",
        RPCStatusCode.CANCELLED: "Temporal has not answered in time",
        RPCStatusCode.RESOURCE_EXHAUSTED: "Temporal is busy",
        RPCStatusCode.PERMISSION_DENIED: "Temporal does not let us in",
        RPCStatusCode.UNAUTHENTICATED: "Temporal does not let us in",
    }
    if error.status in unreachable:
        return Explanation(CANNOT_REACH, f"{unreachable[error.status]}: {error.message}")
    if error.status is RPCStatusCode.NOT_FOUND and error.message.startswith("Namespace "):
        return Explanation(CANNOT_REACH, f"{error.message} Set TEMPORAL_NAMESPACE to yours.")
    if error.status is RPCStatusCode.INVALID_ARGUMENT and "search attribute" in error.message:
        return Explanation(REFUSED, f"{error.message}: run `redrive setup` first")
    return Explanation(REFUSED, f"Temporal refuses: {error.message}")
