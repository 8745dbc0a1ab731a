"""The error body of each API.

Source: platform.claude.com/docs/en/api/errors; platform.openai.com/docs/guides/error-codes.
"""

from __future__ import annotations

from agentloop.gateway.dialects.dialect import Json

OPENAI_TYPES = {
    401: "authentication_error",
    402: "insufficient_quota",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
ANTHROPIC_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def openai_error(status: int, message: str, kind: str | None = None) -> Json:
    """Chat completions and responses: `type` follows from the status; `code`, which programs read, is `kind`."""
    named = OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": named, "param": None, "code": kind}}


def anthropic_error(status: int, message: str, kind: str | None = None) -> Json:
    """Messages: `type` follows from the status; `details.error_code` is `kind`; the SDK exposes it as `error_code`."""
    named = ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    body: Json = {"type": named, "message": message}
    if kind:
        body["details"] = {"error_code": kind}
    return {"type": "error", "error": body}
