"""Secrets come from the environment, go out in a header, and are in nothing else."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.http import parse_json
from activities.secrets import REDACTED, Secrets
from contracts.base import Json
from contracts.tools import Auth, Catalog, CatalogError, Tool

SECRET = 'sk_live/4&<b>"x\\y+z=='


def catalog(**auths: Auth | None) -> Catalog:
    return Catalog(
        tools={name: Tool(name=name, url="https://tool.example/", auth=auth) for name, auth in auths.items()}
    )


BEARER = Auth(bearer_env="TOKEN")
HEADER = Auth(header="x-api-key", env="OTHER_TOKEN")


def test_a_secret_goes_out_in_its_header() -> None:
    tools = catalog(a=BEARER, b=HEADER, c=None)
    secrets = Secrets.read(tools, {"TOKEN": "abcd", "OTHER_TOKEN": "efgh"})
    assert secrets.headers(tools.tools["a"]) == {"authorization": "Bearer abcd"}
    assert secrets.headers(tools.tools["b"]) == {"x-api-key": "efgh"}
    assert secrets.headers(tools.tools["c"]) == {}


def test_every_missing_variable_is_named_with_its_tool() -> None:
    with pytest.raises(CatalogError) as caught:
        Secrets.read(catalog(a=BEARER, b=HEADER), {"TOKEN": ""})
    assert caught.value.problems == [
        'tools."a".auth: the environment variable TOKEN is not set',
        'tools."b".auth: the environment variable OTHER_TOKEN is not set',
    ]


@pytest.mark.parametrize(
    "value", ["abc", "tokenü", "line\nbreak", "tab\there", "trailing\r", "x\x00yz", "\x7f\x7f\x7f\x7f"]
)
def test_what_cannot_be_a_secret_is_refused_without_being_repeated(value: str) -> None:
    with pytest.raises(CatalogError, match="TOKEN does not hold a secret") as caught:
        Secrets.read(catalog(a=BEARER), {"TOKEN": value})
    assert value not in str(caught.value)


@pytest.mark.parametrize("value", [" abcd", "abcd ", "    "])
def test_blanks_around_a_secret_are_refused_they_would_not_arrive(value: str) -> None:
    with pytest.raises(CatalogError, match="TOKEN does not hold a secret"):
        Secrets.read(catalog(a=BEARER), {"TOKEN": value})


def test_no_secret_is_in_a_secrets_representation() -> None:
    secrets = Secrets({"payments.charge": SECRET})
    assert repr(secrets) == "Secrets(payments.charge)"
    assert SECRET not in str(secrets)
    assert SECRET not in f"{secrets!r}{vars(secrets).keys()}"


ESCAPED = {
    "as it is": SECRET,
    "by Python": json.dumps(SECRET)[1:-1],
    "by PHP": json.dumps(SECRET)[1:-1].replace("/", "\\/"),
    "by Go": json.dumps(SECRET)[1:-1].replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"),
    "in capitals": json.dumps(SECRET)[1:-1].replace("<", "\\u003C").replace(">", "\\u003E"),
    "all of it": "".join(f"\\u{ord(character):04x}" for character in SECRET),
}


@pytest.mark.parametrize("spelling", ESCAPED.values(), ids=ESCAPED)
def test_a_secret_is_redacted_however_json_spells_it(spelling: str) -> None:
    text = Secrets({"a": SECRET}).redact(f'{{"echo": "Bearer {spelling}, you said"}}')
    assert text == f'{{"echo": "Bearer {REDACTED}, you said"}}'


@given(
    st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=4, max_size=40),
    st.text(max_size=10),
    st.text(max_size=10),
    st.randoms(use_true_random=False),
)
def test_whatever_a_tool_echoes_has_no_secret_in_it(
    secret: str, before: str, after: str, spelling: random.Random
) -> None:
    if secret in REDACTED or secret in before or secret in after:
        return
    secrets = Secrets({"a": secret})
    spelt = "".join(
        f"\\u{ord(character):04{spelling.choice('xX')}}" if character in '"\\' or spelling.random() < 0.5 else character
        for character in secret
    )
    body = f'{{"echo": {json.dumps(before)[:-1]}{spelt}{json.dumps(after)[1:]}}}'
    value = parse_json(body.encode())
    assert isinstance(value, dict)
    assert value["echo"] == before + secret + after
    clean = secrets.redact_json(value)
    assert isinstance(clean, dict)
    assert clean["echo"] == before + REDACTED + after
    assert spelt not in secrets.redact(body)


def test_every_string_and_name_of_a_value_is_redacted_and_nothing_else_is_touched() -> None:
    secrets = Secrets({"a": "hunter22", "b": "1234"})
    value: Json = {"hunter22": ["hunter22", {"x": "my hunter22!"}], "n": 1234, "f": 1.5, "b": True, "z": None, "e": {}}
    assert secrets.redact_json(value) == {
        REDACTED: [REDACTED, {"x": f"my {REDACTED}!"}],
        "n": 1234,
        "f": 1.5,
        "b": True,
        "z": None,
        "e": {},
    }


def test_a_secret_inside_another_leaves_no_rest() -> None:
    secrets = Secrets({"a": "hunter22", "b": "hunter22-and-more"})
    assert secrets.redact("hunter22-and-more, hunter22") == f"{REDACTED}, {REDACTED}"


@pytest.mark.parametrize("text", ["", "plain", "()[]*+?{}|^$.\\"])
def test_without_a_secret_nothing_is_redacted(text: str) -> None:
    assert Secrets({}).redact(text) == text
    assert Secrets({"a": "(x)*+?"}).redact(text) == text
    assert Secrets({}).redact_json({text: [text]}) == {text: [text]}
