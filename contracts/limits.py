"""How large things may be: what Temporal carries itself, and what it carries by reference to an external storage."""

from typing import Final

from contracts.base import Model

__all__ = ["BY_REFERENCE", "INLINE", "Limits"]

_KIB: Final = 1024
_MIB: Final = 1024 * _KIB
_UNBOUNDED: Final = 1 << 40
"""The history itself ends sooner."""


class Limits(Model):
    """In bytes of compact JSON. By default what fits into Temporal's own payloads, which end at 2 MiB.

    A run gets them from `admit` and hands them on to its nodes, and they to their dead letters: what a workflow does
    must follow from its history alone, whatever the settings of the worker that replays it.

    Attributes:
        spec: A run's specification.
        input: A node's input, references resolved.
        output: A node's output.
        run_outputs: The outputs in a run's result, all together.
        at_once: What the nodes at work may come to in large outputs: all of them may arrive in one workflow task.
        taken: What a run takes in, inputs and outputs, before it starts nothing more: whoever replays it reads all of
            it, and what was at work then, within the ten seconds of a workflow task.
    """

    spec: int = _MIB
    input: int = 512 * _KIB
    output: int = _MIB
    run_outputs: int = _MIB
    at_once: int = _UNBOUNDED
    taken: int = _UNBOUNDED

    def is_large(self, size: int) -> bool:
        """Whether an output of so many bytes is one that only an external storage allows."""
        return size > INLINE.output


INLINE: Final = Limits()
"""Without an external storage."""

BY_REFERENCE: Final = Limits(
    spec=8 * _MIB,
    input=8 * _MIB,
    output=8 * _MIB,
    run_outputs=8 * _MIB,
    at_once=16 * _MIB,
    taken=8 * _MIB,
)
"""With an external storage. What ends here is not Temporal's room but its time: a run reads, checks and writes 6.6 MiB
of small records (1.2 million values) in one second of CPU, and all that one execution takes in has to be read again
within ten; what an activity takes is read on the loop that renews leases."""
