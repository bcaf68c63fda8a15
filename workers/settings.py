"""Redrive's own settings, from the environment; `workers.client` reads Temporal's own by ``temporalio.envconfig``."""

from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from pydantic import AnyHttpUrl, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from contracts.base import problems_of
from contracts.limits import BY_REFERENCE, INLINE, Limits

__all__ = ["Settings", "SettingsError", "load_settings"]

_SCHEMES: Final = ("sqlite:///", "postgresql://")


class SettingsError(Exception):
    """A setting is not usable; the message names the variable and the cure."""


class Settings(BaseSettings):
    """Every ``REDRIVE_`` variable; ``CONTRACT.md`` explains each."""

    model_config = SettingsConfigDict(env_prefix="REDRIVE_", frozen=True, hide_input_in_errors=True)

    tools: Path = Path("tools.toml")
    ledger: SecretStr = SecretStr("sqlite:///.redrive/ledger.db")
    task_queue: str = Field(default="redrive", min_length=1, max_length=200)
    alert_webhook: SecretStr | None = None
    data: Path = Path(".redrive")
    storage: str | None = None

    @property
    def limits(self) -> Limits:
        """How large things may be."""
        return INLINE if self.storage is None else BY_REFERENCE

    @field_validator("ledger")
    @classmethod
    def _ledger(cls, url: SecretStr) -> SecretStr:
        if not url.get_secret_value().startswith(_SCHEMES):
            raise ValueError("write sqlite:///PATH or postgresql://USER@HOST/DATABASE")
        return url

    @field_validator("alert_webhook")
    @classmethod
    def _alert_webhook(cls, url: SecretStr | None) -> SecretStr | None:
        if url is None or not url.get_secret_value():
            return None
        try:
            AnyHttpUrl(url.get_secret_value())
        except ValueError:
            # The URL of a webhook is a secret by itself: it is never repeated.
            raise ValueError("not an http:// or https:// URL") from None
        return url

    @field_validator("storage")
    @classmethod
    def _storage(cls, url: str | None) -> str | None:
        if not url:
            return None
        if not _is_storage(url):
            raise ValueError("write file:///ABSOLUTE/FOLDER or s3://BUCKET/PREFIX")
        return url


def _is_storage(url: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    is_folder = parts.scheme == "file" and not parts.netloc and len(parts.path) > 1
    is_bucket = parts.scheme == "s3" and bool(parts.netloc) and "@" not in parts.netloc
    return (is_folder or is_bucket) and not parts.query and not parts.fragment


def load_settings() -> Settings:
    """Reads the settings from the environment.

    Raises:
        SettingsError: with every problem.
    """
    try:
        return Settings()
    except ValidationError as error:
        problems = [f"REDRIVE_{problem[0].upper()}{problem[1]}" for problem in map(_split, problems_of(error))]
        raise SettingsError("\n".join(problems)) from None


def _split(problem: str) -> tuple[str, str]:
    name, colon, rest = problem.partition(":")
    return name, colon + rest
