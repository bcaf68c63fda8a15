"""What holds of a node holds of a fast one: each of these tests runs in both modes."""

from dataclasses import replace

import pytest

from tests.lab import NODE_MODES, Bench


@pytest.fixture(params=NODE_MODES)
def bench(bench: Bench, request: pytest.FixtureRequest) -> Bench:
    """The test's own tools, catalog, ledger and task queue."""
    return replace(bench, node_mode=request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out of fast mode what is not about it."""
    items[:] = [item for item in items if not (item.get_closest_marker("workflow_mode") and _is_fast(item))]


def _is_fast(item: pytest.Item) -> bool:
    # By the parameter itself, wherever it stands among others in the test's name.
    callspec = getattr(item, "callspec", None)
    return callspec is not None and callspec.params.get("bench") == "fast"
