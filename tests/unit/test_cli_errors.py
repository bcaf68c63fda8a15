"""What a user is told, and with which exit code."""

import pytest
from temporalio.client import WorkflowUpdateRPCTimeoutOrCancelledError
from temporalio.service import RPCError, RPCStatusCode

from activities.ledger import LedgerUnavailableError
from cli.errors import CommandError, UsageError, explain
from contracts.dead_letters import MalformedDecisionError
from contracts.runs import InvalidRunError
from contracts.tools import CatalogError
from workers.client import TemporalUnavailableError
from workers.dead_letters import DeadLetterNotFoundError
from workers.embedded import EmbeddedServerError
from workers.executions import NoAnswerError
from workers.runs import OtherSpecError, RunNotFoundError
from workers.settings import SettingsError


def rpc(status: RPCStatusCode, message: str) -> RPCError:
    return RPCError(message, status, b"")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CommandError("no"), 1),
        (RunNotFoundError("no"), 1),
        (OtherSpecError("no"), 1),
        (DeadLetterNotFoundError("no"), 1),
        (rpc(RPCStatusCode.NOT_FOUND, "workflow not found for ID: x"), 1),
        (rpc(RPCStatusCode.INVALID_ARGUMENT, "invalid search attribute: RedriveStatus"), 1),
        (rpc(RPCStatusCode.INTERNAL, "broken"), 1),
        (UsageError("bad"), 2),
        (InvalidRunError(["nodes[0].id: bad"]), 2),
        (MalformedDecisionError("bad"), 2),
        (CatalogError("tools.toml", ["bad"]), 2),
        (SettingsError("REDRIVE_LEDGER: bad"), 2),
        (TemporalUnavailableError("gone"), 3),
        (LedgerUnavailableError("gone"), 3),
        (EmbeddedServerError("taken"), 3),
        (NoAnswerError("nobody"), 3),
        (WorkflowUpdateRPCTimeoutOrCancelledError(), 3),
        (rpc(RPCStatusCode.UNAVAILABLE, "tcp connect error"), 3),
        (rpc(RPCStatusCode.DEADLINE_EXCEEDED, "late"), 3),
        (rpc(RPCStatusCode.CANCELLED, "Timeout expired"), 3),
        (rpc(RPCStatusCode.RESOURCE_EXHAUSTED, "busy"), 3),
        (rpc(RPCStatusCode.PERMISSION_DENIED, "no"), 3),
        (rpc(RPCStatusCode.UNAUTHENTICATED, "who"), 3),
        (rpc(RPCStatusCode.NOT_FOUND, "Namespace x is not found."), 3),
    ],
    ids=lambda value: f"{type(value).__name__}-{value}" if isinstance(value, Exception) else str(value),
)
def test_every_error_of_a_user_has_its_exit_code_and_a_message(error: Exception, code: int) -> None:
    explanation = explain(error)
    assert explanation is not None
    assert explanation.code == code
    assert explanation.message


@pytest.mark.parametrize("bug", [KeyError("x"), AssertionError(), RuntimeError("x"), ValueError("x")])
def test_a_bug_is_not_explained_away(bug: Exception) -> None:
    assert explain(bug) is None


def test_every_problem_is_listed() -> None:
    for error in (InvalidRunError(["one: bad", "two: worse"]), CatalogError("t.toml", ["one: bad", "two: worse"])):
        explanation = explain(error)
        assert explanation is not None
        assert explanation.message.splitlines()[1:] == ["  one: bad", "  two: worse"]


def test_a_missing_search_attribute_names_its_cure() -> None:
    explanation = explain(rpc(RPCStatusCode.INVALID_ARGUMENT, "invalid search attribute: RedriveStatus"))
    assert explanation is not None
    assert "redrive setup" in explanation.message
