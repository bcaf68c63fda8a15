"""What the tool server could serve: no engine may come near it, or the tool would be what is measured."""

from benchmarks.lab import Lab
from benchmarks.measuring import Row, Series

__all__ = ["ceiling"]

_SECONDS = 2.0


async def ceiling(lab: Lab) -> Row:
    """Requests without waiting for answers, from this process."""
    served: list[float] = []
    for _ in range(lab.sizes.rounds):
        await lab.tools.reset()
        served.append(await lab.tools.ceiling(_SECONDS))
    await lab.tools.reset()
    series = Series(label="tool server", unit="calls/s", values=served)
    return Row(title="The tool server's own ceiling", series=[series], rounds=lab.sizes.rounds)
