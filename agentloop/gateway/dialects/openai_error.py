"""The body of an error as OpenAI's endpoints say it, chat completions and responses alike."""

from __future__ import annotations

from agentloop.gateway.dialects.dialect import Json

TYPES = {
    401: "authentication_error",
    402: "insufficient_quota",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def error(status: int, message: str, kind: str | None = None) -> Json:
    """`type` follows the status; `code`, which programs look at, is `kind`."""
    named = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": named, "param": None, "code": kind}}
