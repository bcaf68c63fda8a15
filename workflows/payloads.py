"""Reading what somebody sent by hand.

Arguments arrive un-annotated and are checked here, because a typed handler that cannot decode its argument wedges the
workflow in task failures instead of telling the sender.
"""

from typing import Any, TypeVar

from pydantic import ValidationError
from temporalio import workflow
from temporalio.exceptions import ApplicationError

with workflow.unsafe.imports_passed_through():
    from contracts.base import Model, problems_of, tell
    from contracts.canonical import MAX_DEPTH, json_problem

__all__ = ["read_one", "read_signal"]

_OUR_OWN_LEVELS = 10
"""What our own messages add around a value that is as deep as it may be."""

_M = TypeVar("_M", bound=Model)


def read_one(kind: type[_M], payloads: tuple[Any, ...], error_type: str) -> _M:
    """The one argument that a workflow takes.

    Raises:
        ApplicationError: of the given type, naming every problem.
    """
    problem: str
    if len(payloads) != 1:
        problem = f"takes one argument; {len(payloads)} were sent"
    elif unreadable := json_problem(payloads[0], MAX_DEPTH + _OUR_OWN_LEVELS):
        problem = f"cannot be read: {unreadable}"
    elif not isinstance(payloads[0], dict):
        problem = f"takes a JSON object, not {tell(payloads[0])}"
    else:
        try:
            return kind.model_validate(payloads[0])
        except ValidationError as error:
            problem = "; ".join(problems_of(error))
    raise ApplicationError(f"{kind.__name__}: {problem}", type=error_type, non_retryable=True)


def read_signal(kind: type[_M], payloads: tuple[Any, ...]) -> _M | None:
    """The one argument of a signal; a malformed one is logged, and None: a signal has nobody to answer."""
    try:
        return read_one(kind, payloads, "InvalidSignal")
    except ApplicationError as error:
        workflow.logger.warning("a malformed signal was ignored: %s", error.message)
        return None
