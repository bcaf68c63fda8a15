"""The one place that builds a Temporal client and its data converter."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import ValidationError
from temporalio.api.common.v1 import Payload
from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
from temporalio.client import Client
from temporalio.contrib.pydantic import PydanticPayloadConverter
from temporalio.converter import DataConverter, ExternalStorage
from temporalio.envconfig import ClientConfig
from temporalio.service import RPCError, RPCStatusCode

from contracts.base import Unreadable
from workers.settings import load_settings
from workers.storage import open_storage
from workflows.attributes import SEARCH_ATTRIBUTES

__all__ = ["DATA_CONVERTER", "TemporalUnavailableError", "connect", "converter_with", "register_search_attributes"]

_DEFAULT_ADDRESS: Final = "localhost:7233"
_LONGEST_REASON: Final = 200


class _TolerantPayloadConverter(PydanticPayloadConverter):
    """The pydantic converter, which for an argument of no type never fails: what cannot be read says so instead.

    Decoding happens inside the workflow task. If it raised there, one bad payload from anybody would leave the workflow
    in task failures for ever; as a value it is refused by the same checks that refuse every other malformed argument.
    """

    def from_payloads(self, payloads: Sequence[Payload], type_hints: list[type] | None = None) -> list[Any]:
        values: list[Any] = []
        hints: list[type | None] = [*(type_hints or [])]
        for index, payload in enumerate(payloads):
            hint = hints[index] if index < len(hints) else None
            try:
                values += super().from_payloads([payload], [hint] if hint is not None else None)
            except (KeyError, RuntimeError, ValueError) as error:
                if hint not in (None, Any):
                    raise
                values.append(Unreadable(f"not JSON that can be read: {_reason(error)}"))
        return values


def _reason(error: Exception) -> str:
    """Why, without the value: it may be secret."""
    if isinstance(error, ValidationError):
        return error.errors(include_url=False, include_input=False, include_context=False)[0]["msg"][:_LONGEST_REASON]
    return "unknown encoding" if isinstance(error, KeyError) else type(error).__name__


DATA_CONVERTER: Final = DataConverter(payload_converter_class=_TolerantPayloadConverter)
"""Plain JSON on the wire, pydantic models in the code."""


def converter_with(storage: str | None) -> DataConverter:
    """The data converter, with the storage that ``REDRIVE_STORAGE`` names for what is too large for Temporal.

    What is larger than the SDK's threshold, 256 KiB, is kept there, and a reference to it in Temporal.

    Raises:
        StorageError: it needs an extra that is not installed.
    """
    if storage is None:
        return DATA_CONVERTER
    return dataclasses.replace(DATA_CONVERTER, external_storage=ExternalStorage(drivers=[open_storage(storage).driver]))


class TemporalUnavailableError(Exception):
    """Temporal cannot be reached, or does not let us in; the message names the address and the cure."""


async def connect(overrides: Mapping[str, str] | None = None) -> Client:
    """Connects as Temporal's own environment configuration says: ``TEMPORAL_ADDRESS``, ``TEMPORAL_PROFILE`` and so on.

    Args:
        overrides: Takes the place of the process's environment, where it is given.

    Raises:
        TemporalUnavailableError: there is no answer, or the configuration is not usable.
        StorageError: the storage of ``REDRIVE_STORAGE`` needs an extra that is not installed.
        SettingsError: a setting is not usable.
    """
    converter = converter_with(load_settings().storage)
    config: dict[str, Any] = {}
    try:
        config |= ClientConfig.load_client_connect_config(override_env_vars=overrides)
    except (RuntimeError, ValueError) as error:
        raise TemporalUnavailableError(
            f"Temporal's client configuration is not usable: {error} (check TEMPORAL_PROFILE and its file)"
        ) from error
    address = config.setdefault("target_host", _DEFAULT_ADDRESS)
    try:
        return await Client.connect(**config, data_converter=converter)
    except (RuntimeError, RPCError, ValueError) as error:
        raise TemporalUnavailableError(
            f"cannot reach Temporal at {address}: {error}\n"
            "Start one with `redrive dev`, or set TEMPORAL_ADDRESS (and TEMPORAL_NAMESPACE) to yours."
        ) from error


async def register_search_attributes(client: Client) -> None:
    """Makes sure that the namespace knows the search attributes; safe to repeat.

    An unknown one would leave workflows in workflow-task failures, so nothing polls before.

    Raises:
        TemporalUnavailableError: they are missing and may not be added from here.
    """
    wanted = {key.name for key in SEARCH_ATTRIBUTES}
    try:
        known = await client.operator_service.list_search_attributes(
            ListSearchAttributesRequest(namespace=client.namespace)
        )
        wrong = [
            name
            for name in wanted & known.custom_attributes.keys()
            if known.custom_attributes[name] != IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD
        ]
        if wrong:
            raise TemporalUnavailableError(
                f"the search attributes {', '.join(sorted(wrong))} exist in namespace {client.namespace!r} with "
                "another type than Keyword; remove them with `temporal operator search-attribute remove`"
            )
        missing = sorted(wanted - known.custom_attributes.keys())
        if missing:
            await client.operator_service.add_search_attributes(
                AddSearchAttributesRequest(
                    namespace=client.namespace,
                    search_attributes=dict.fromkeys(missing, IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD),
                )
            )
    except RPCError as error:
        if error.status is RPCStatusCode.ALREADY_EXISTS:
            return
        raise TemporalUnavailableError(
            f"cannot register the search attributes {', '.join(sorted(wanted))} in namespace {client.namespace!r}: "
            f"{error.message}\nHave somebody who may run `redrive setup` (on Temporal Cloud: add them as Keyword)."
        ) from error
