"""Any JSON there is: also what a JSON text can say and few can carry."""

from hypothesis import strategies as st

from contracts.base import Json

SCALARS: st.SearchStrategy[Json] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.text(st.characters(codec=None), max_size=20),
)
"""With infinities, which ``1e400`` is read as, and halves of surrogate pairs."""


def any_json(*likely: str, max_leaves: int = 30) -> st.SearchStrategy[Json]:
    """Any JSON; objects often have fields of the given names."""
    names: st.SearchStrategy[str] = st.text(st.characters(codec=None), max_size=8)
    if likely:
        names = st.sampled_from(likely) | names
    scalars = SCALARS | st.sampled_from(likely) if likely else SCALARS
    return st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=6) | st.dictionaries(names, inner, max_size=8),
        max_leaves=max_leaves,
    )


PLAIN: st.SearchStrategy[Json] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(codec="utf-8"), max_size=10),
)


def plain_json(max_leaves: int = 15) -> st.SearchStrategy[Json]:
    """Any JSON that can be carried."""
    return st.recursive(
        PLAIN,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
        max_leaves=max_leaves,
    )


def nested(levels: int) -> Json:
    """A list in a list in a list."""
    value: Json = None
    for _ in range(levels):
        value = [value]
    return value
