"""The one HTTP call that every contender but Redrive makes, as anyone would write it with httpx."""

from typing import Any, Final

import httpx
from httpx_aiohttp import HttpxAiohttpClient

__all__ = ["CONNECTIONS", "call", "call_blocking", "http_client"]

CONNECTIONS: Final = 50


def http_client() -> httpx.AsyncClient:
    """httpx with its aiohttp transport: its own pool would be what is measured, it slows with every connection."""
    limits = httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS)
    return HttpxAiohttpClient(limits=limits, timeout=httpx.Timeout(30, pool=None))


async def call(client: httpx.AsyncClient, url: str, key: str) -> Any:
    """One node's work: a POST with an idempotency key, its JSON answer."""
    response = await client.post(url, json={"key": key}, headers={"idempotency-key": key})
    response.raise_for_status()
    return response.json()


def call_blocking(client: httpx.Client, url: str, key: str) -> Any:
    """The same for an engine whose tasks are plain functions."""
    response = client.post(url, json={"key": key}, headers={"idempotency-key": key})
    response.raise_for_status()
    return response.json()
