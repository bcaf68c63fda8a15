"""Settings come from the environment; what is wrong is named by its variable, and no secret is ever shown."""

import json
import pickle
import traceback
from pathlib import Path

import pytest

from contracts.limits import BY_REFERENCE, INLINE
from workers.settings import Settings, SettingsError, load_settings

VARIABLES = ("TOOLS", "LEDGER", "TASK_QUEUE", "ALERT_WEBHOOK", "DATA", "STORAGE")
PASSWORD = "hunter2secret"


@pytest.fixture(autouse=True)
def an_empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(f"REDRIVE_{name}", raising=False)


def loaded(monkeypatch: pytest.MonkeyPatch, **values: str) -> Settings:
    for name, value in values.items():
        monkeypatch.setenv(f"REDRIVE_{name}", value)
    return load_settings()


def test_without_any_variable_everything_has_its_default() -> None:
    settings = load_settings()
    assert settings.tools == Path("tools.toml")
    assert settings.ledger.get_secret_value() == "sqlite:///.redrive/ledger.db"
    assert settings.task_queue == "redrive"
    assert settings.alert_webhook is None
    assert settings.data == Path(".redrive")


def test_every_variable_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = loaded(
        monkeypatch,
        TOOLS="/etc/tools.toml",
        LEDGER="postgresql://me@db/redrive",
        TASK_QUEUE="other",
        ALERT_WEBHOOK="https://hooks.example/x",
        DATA="/var/lib/redrive",
    )
    assert settings.tools == Path("/etc/tools.toml")
    assert settings.ledger.get_secret_value() == "postgresql://me@db/redrive"
    assert settings.task_queue == "other"
    assert settings.alert_webhook is not None
    assert settings.alert_webhook.get_secret_value() == "https://hooks.example/x"
    assert settings.data == Path("/var/lib/redrive")


@pytest.mark.parametrize("url", ["file:///var/lib/redrive/payloads", "s3://bucket", "s3://bucket/a/prefix"])
def test_a_storage_raises_the_limits(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    settings = loaded(monkeypatch, STORAGE=url)
    assert settings.storage == url
    assert settings.limits == BY_REFERENCE
    assert loaded(monkeypatch, STORAGE="").limits == INLINE


def test_an_empty_webhook_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loaded(monkeypatch, ALERT_WEBHOOK="").alert_webhook is None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"TASK_QUEUE": ""}, ["REDRIVE_TASK_QUEUE: "]),
        *(
            ({"STORAGE": url}, ["REDRIVE_STORAGE: write file:///ABSOLUTE/FOLDER or s3://BUCKET/PREFIX"])
            for url in (
                "payloads",
                "file://payloads",
                "file:///",
                "s3://",
                f"s3://me:{PASSWORD}@b",
                "gs://b",
                "s3://b?x",
            )
        ),
        ({"TASK_QUEUE": "x" * 201}, ["REDRIVE_TASK_QUEUE: "]),
        ({"LEDGER": ""}, ["REDRIVE_LEDGER: write sqlite:///PATH or postgresql://"]),
        ({"LEDGER": "ledger.db"}, ["REDRIVE_LEDGER: write sqlite:///PATH or postgresql://"]),
        ({"LEDGER": f"mysql://me:{PASSWORD}@db/x"}, ["REDRIVE_LEDGER: write sqlite:///PATH or postgresql://"]),
        ({"ALERT_WEBHOOK": "hooks.example"}, ["REDRIVE_ALERT_WEBHOOK: not an http:// or https:// URL"]),
        ({"ALERT_WEBHOOK": f"ftp://hooks.example/{PASSWORD}"}, ["REDRIVE_ALERT_WEBHOOK: not an http:// or https://"]),
        ({"ALERT_WEBHOOK": f"https://:99999/{PASSWORD}"}, ["REDRIVE_ALERT_WEBHOOK: not an http:// or https:// URL"]),
        (
            {"TASK_QUEUE": "", "LEDGER": PASSWORD, "ALERT_WEBHOOK": PASSWORD},
            ["REDRIVE_LEDGER: ", "REDRIVE_TASK_QUEUE: ", "REDRIVE_ALERT_WEBHOOK: "],
        ),
    ],
)
def test_what_is_wrong_is_named_by_its_variable_and_never_repeated(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, str], expected: list[str]
) -> None:
    with pytest.raises(SettingsError) as caught:
        loaded(monkeypatch, **values)
    problems = str(caught.value).splitlines()
    assert len(problems) == len(expected)
    assert all(problem.startswith(beginning) for problem, beginning in zip(problems, expected, strict=True))
    assert PASSWORD not in "".join(traceback.format_exception(caught.value))


def test_no_representation_of_the_settings_shows_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = loaded(
        monkeypatch,
        LEDGER=f"postgresql://me:{PASSWORD}@db/redrive",
        ALERT_WEBHOOK=f"https://hooks.example/{PASSWORD}",
    )
    shown = [repr(settings), str(settings), f"{settings.model_dump()}", settings.model_dump_json()]
    assert PASSWORD not in "".join(shown)
    assert json.loads(settings.model_dump_json())["task_queue"] == "redrive"
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_settings_do_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings()
    with pytest.raises(ValueError, match="frozen"):
        setattr(settings, "task_queue", "other")  # noqa: B010 - what the types forbid is tried
