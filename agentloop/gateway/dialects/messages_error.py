"""The body of an error as the Anthropic messages API says it.

Source: platform.claude.com/docs/en/api/errors.
"""

from __future__ import annotations

from agentloop.gateway.dialects.dialect import Json

TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def error(status: int, message: str, kind: str | None = None) -> Json:
    """`type` follows the status; the SDK offers `details.error_code`, which is `kind`, as `error_code`."""
    named = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    said: Json = {"type": named, "message": message}
    if kind:
        said["details"] = {"error_code": kind}
    return {"type": "error", "error": said}
