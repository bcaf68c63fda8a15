"""The sandbox that workflows run in."""

from typing import Any

from temporalio.bridge.proto.workflow_activation import WorkflowActivation
from temporalio.bridge.proto.workflow_completion import WorkflowActivationCompletion
from temporalio.converter import (
    DataConverter,
    SerializationContext,
    StorageDriverStoreContext,
    WithSerializationContext,
)
from temporalio.worker import WorkflowInstance, WorkflowInstanceDetails, WorkflowRunner
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions
from temporalio.workflow import Info

__all__ = ["workflow_runner"]

_RESTRICTIONS = SandboxRestrictions.default.with_passthrough_modules(
    # Our modules hold no state. Importing them anew for each workflow costs a third of a worker's CPU, and most of an
    # open workflow's memory. The replay tests run the same workflows under all of the sandbox's rules.
    *("workflows", "contracts", "activities", "pydantic", "jsonpointer")
)


def workflow_runner(converter: DataConverter) -> WorkflowRunner:
    """The runner for a worker whose client has this converter: the SDK's sandbox.

    Every payload of a workflow passes the codec and the external storage in six steps, before each of which the SDK
    enters the sandbox to ask what the payload belongs to. Where neither is there to use the answer, that would be a
    fifth of the worker's CPU in a fast run.
    """
    indifferent = converter.external_storage is None and not isinstance(
        converter.payload_codec, WithSerializationContext
    )
    return _Runner(_RESTRICTIONS) if indifferent else SandboxedWorkflowRunner(_RESTRICTIONS)


class _Runner(SandboxedWorkflowRunner):
    def create_instance(self, det: WorkflowInstanceDetails) -> WorkflowInstance:
        return _Instance(super().create_instance(det))


class _Instance(WorkflowInstance):
    """A workflow whose payloads belong to nothing in particular."""

    def __init__(self, inner: WorkflowInstance) -> None:
        self._inner = inner

    def activate(self, act: WorkflowActivation) -> WorkflowActivationCompletion:
        return self._inner.activate(act)

    def get_info(self) -> Info:
        return self._inner.get_info()

    def get_thread_id(self) -> int | None:
        return self._inner.get_thread_id()

    def get_serialization_context(self, command_info: Any) -> SerializationContext | None:  # noqa: ARG002
        return None

    def get_external_store_context(self, command_info: Any) -> StorageDriverStoreContext:  # noqa: ARG002
        return StorageDriverStoreContext(target=None)
