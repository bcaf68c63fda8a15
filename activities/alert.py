"""``alert``: tells people about a dead letter, once."""

import asyncio
import uuid
from http import HTTPStatus
from typing import Final

import aiohttp
import structlog
from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.wire import proxy_for, tls_context, wire_url
from contracts.dead_letters import Entry
from contracts.identity import KEY_NAMESPACE, dead_letter_workflow_id

__all__ = ["Alert"]

_TIMEOUT_SECONDS: Final = 10.0
_log = structlog.get_logger("redrive.dead_letter")


class Alert:
    """The activity that announces a dead letter: an ERROR log line, a metric, and the webhook if there is one."""

    def __init__(self, webhook: str | None) -> None:
        self._webhook = webhook
        self._tls = tls_context() if webhook is not None else None

    @activity.defn(name="alert")
    async def alert(self, entry: Entry) -> None:
        """Announces a dead letter; repeated (with the same key) only while its answer is lost.

        Raises:
            ApplicationError: the webhook did not take it; its URL is a secret and is not repeated.
        """
        if activity.info().attempt == 1:
            _announce(entry)
        if self._webhook is None or self._tls is None:
            return
        body = entry.model_dump(mode="json", exclude={"input"}) | {
            "dead_letter": dead_letter_workflow_id(entry.run_id, entry.node_id)
        }
        key = uuid.uuid5(KEY_NAMESPACE, f"{entry.operation_id}/alert/{entry.redrives}")
        try:
            # Its body is nobody's business, and may be as large and as slow as it likes.
            url = wire_url(self._webhook)
            async with (
                asyncio.timeout(_TIMEOUT_SECONDS),
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self._tls)) as session,
                session.post(
                    url,
                    json=body,
                    headers={"Idempotency-Key": str(key)},
                    allow_redirects=False,
                    proxy=proxy_for(url),
                ) as answer,
            ):
                status = answer.status
        except (aiohttp.ClientError, TimeoutError) as error:
            # `from None`: the exception's own text may hold the URL.
            raise ApplicationError(
                f"the webhook could not be reached: {type(error).__name__}", type="AlertFailed"
            ) from None
        if not HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
            raise ApplicationError(f"the webhook answered {status}", type="AlertFailed")


def _announce(entry: Entry) -> None:
    _log.error(
        "dead letter",
        dead_letter=dead_letter_workflow_id(entry.run_id, entry.node_id),
        tool=entry.tool.name,
        category=entry.error.category,
        code=entry.error.code,
        message=entry.error.message,
        side_effect=entry.side_effect,
        failure_fingerprint=entry.failure_fingerprint,
        correlation_id=entry.correlation_id,
        trace_id=entry.trace_id,
    )
    meter = activity.metric_meter().with_additional_attributes(
        {"tool": entry.tool.name, "category": str(entry.error.category)}
    )
    meter.create_counter("redrive_dead_letters", "Dead letters opened").add(1)
