"""What a test tells a tool to do: a script of steps, one step per request, the last one for ever."""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from tests.tool_server.faults import FAULTS


def _known_fault(name: str) -> str:
    if name not in FAULTS:
        raise ValueError(f"no such fault: there are {', '.join(sorted(FAULTS))}")
    return name


class Step(BaseModel):
    """What one request meets, in this order: commit, delay, gate, then the answer or the fault.

    Attributes:
        commit: Whether the effect happens. By default for a 2xx status, unless the fault leaves the body unread.
        status: The answer's status.
        headers: The answer's headers; a list of values repeats the header.
        body: The answer's body, as JSON. The default for a tool is `{"id": "<name>-<n>", "key": key}`, where `n` is the
            number of the effect (the first is 1); for a reconcile script see `tells_truth`.
        raw_body: The answer's body as text, sent as it is.
        delay: Seconds between committing and answering.
        gate: Answer only once this gate has been opened.
        fault: A name of `faults.FAULTS`.
        size: How much of it, for the faults which have a size: bytes, or the depth of `deep_json`.
        rate: Bytes per second, for `slow_body`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    commit: bool | None = None
    status: int = Field(default=200, ge=200, le=999)
    headers: dict[str, str | list[str]] = {}
    body: Any = None
    raw_body: str | None = None
    delay: float = Field(default=0, ge=0)
    gate: str | None = None
    fault: Annotated[str, AfterValidator(_known_fault)] | None = None
    size: int = Field(default=1_000_000, ge=2)
    rate: float = Field(default=1_000, gt=0)

    @property
    def commits(self) -> bool:
        """Whether the effect happens."""
        if self.commit is not None:
            return self.commit
        reads_body = self.fault is None or FAULTS[self.fault].reads_body
        return reads_body and 200 <= self.status < 300

    @property
    def tells_truth(self) -> bool:
        """Whether a reconcile step with no answer of its own says what is committed (and is only late, or faulty)."""
        return self.model_fields_set.isdisjoint({"status", "body", "raw_body"})

    def content(self, default: object) -> tuple[Any, bool]:
        """The body, or `default` if the step has none, and whether it is raw text rather than JSON."""
        if self.raw_body is not None:
            return self.raw_body, True
        return (self.body if "body" in self.model_fields_set else default), False


class Script(BaseModel):
    """The steps of one tool, or of its reconcile route. No steps: plain success for ever.

    Attributes:
        steps: Taken in order, one per request; the last one repeats.
        dedupe: A second committing request with the same key is no second effect, and gets the first one's answer.
        key_header: The header which carries the key.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: tuple[Step, ...] = ()
    dedupe: bool = False
    key_header: str = "idempotency-key"

    def step(self, taken: int) -> tuple[int, Step]:
        """The step, and its index, of the request before which `taken` others have been."""
        if not self.steps:
            return 0, Step()
        index = min(taken, len(self.steps) - 1)
        return index, self.steps[index]
