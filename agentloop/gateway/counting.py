"""How many tokens a request of the messages dialect has, said by whoever would answer it; nothing is recorded.

An upstream that speaks messages counts itself; vLLM tokenises what it would be asked.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

import orjson

from agentloop.gateway.contexts import trace_id_of
from agentloop.gateway.dialects import messages
from agentloop.gateway.dialects.dialect import BadRequest
from agentloop.gateway.exchange import Refused, Who, refused_as
from agentloop.gateway.failures import Refusal, UpstreamFailed
from agentloop.gateway.routes import Routes
from agentloop.gateway.upstreams import Upstreams

NO_SUCH = (404, 405, 501)


async def n_tokens(
    routes: Routes, upstreams: Upstreams, who: Who, body: dict[str, Any], headers: dict[str, str]
) -> int:
    """Raises Refused, and NoRoute."""
    model = body.get("model")
    if not isinstance(model, str):
        raise Refused(400, "model: name one; `GET /v1/models` lists them")
    sticky = trace_id_of(who.project, who.episode) if who.episode else secrets.token_hex(16)
    target = await routes.find(model, sticky, who.episode)
    upstream, sent = target.upstream, {**body, "model": target.model}
    if messages.name in upstream.dialects:
        path, key = f"{messages.path.removeprefix('/v1')}/count_tokens", "input_tokens"
    elif await upstreams.gives_tokens(upstream) and upstream.via == "http":
        path, key = "/tokenize", "count"
        try:
            asked = messages.to_chat(sent)
        except BadRequest as error:
            raise Refused(400, str(error)) from None
        sent = {name: asked[name] for name in ("model", "messages", "tools") if name in asked}
        upstream = replace(upstream, base_url=upstream.base_url.removesuffix("/v1"))
    else:
        raise _nobody(upstream.name)
    try:
        async with upstreams.ask(upstream, path, orjson.dumps(sent), headers) as answer:
            found = orjson.loads(await answer.whole())[key]
    except Refusal as error:
        raise (_nobody(upstream.name) if error.status in NO_SUCH else refused_as(upstream.name, error)) from None
    except UpstreamFailed as error:
        raise refused_as(upstream.name, error) from None
    except (ValueError, LookupError, TypeError):
        found = None
    if type(found) is not int:
        raise Refused(502, f"upstream {upstream.name!r} sent no count of tokens")
    return found


def _nobody(upstream: str) -> Refused:
    return Refused(404, f"upstream {upstream!r} counts no tokens; an answer's usage says them")
