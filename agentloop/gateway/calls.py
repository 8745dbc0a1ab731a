"""One call through the gateway, from the client's request to the last byte of its answer.

    read ─▶ route ─▶ budget ─▶ ask the upstream ─▶ pass on ─▶ record, until it is on disk ─▶ the last byte

A client that hears the end knows that the call is recorded. One that goes away ends the call at the upstream, too,
and what there was is recorded with that reason; so is an upstream that refuses, hangs or breaks off.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from agentloop.errors import StoreError
from agentloop.gateway.budgets import Budgets, Exhausted, TooFast
from agentloop.gateway.contexts import Contexts
from agentloop.gateway.counting import n_tokens
from agentloop.gateway.dialects import chat, messages
from agentloop.gateway.dialects.completion import table_of, text_of
from agentloop.gateway.dialects.dialect import BadAnswer, BadRequest, Dialect
from agentloop.gateway.dialects.sse import Events
from agentloop.gateway.exchange import (
    Refused,
    Reply,
    Room,
    Who,
    body_of,
    disconnect,
    parsed,
    passed_on,
    refused_as,
    say,
)
from agentloop.gateway.failures import Refusal, UpstreamFailed
from agentloop.gateway.offered import Offered
from agentloop.gateway.passing import Passing
from agentloop.gateway.prices import Price, unknown
from agentloop.gateway.record import Call, RefusedCall, span_of_refused, spans_of_call
from agentloop.gateway.routes import NoRoute, Routes
from agentloop.gateway.upstreams import Said, Upstreams
from agentloop.policies.vllm import EXACT
from agentloop.store.keys import Spent
from agentloop.types import Span

RECORD_S = 30.0
"""Seconds that a commit may take."""
BUSY_S = 2
UNREADABLE = ("no_answer", "too_large")
"""Kinds of failure of an upstream that did answer."""
NOTED = (400, 402, 404)
"""Refusals of the gateway's own that are in the trace. Any other passes: the client asks again."""
ENDED, TOLD_S = "gateway_ended", 1.0
"""What became of a call that was cut; how long its client may take to hear of it."""
MAX_TOLD = 200
"""Bytes of what is no answer that are told."""

Put = Callable[[str, Sequence[Span], int, Mapping[str, Spent]], Awaitable[None]]
"""Returns once spans of a project, of so many bytes, and what keys have spent are on disk. Raises StoreError."""


class Calls:
    """Takes calls; for one event loop."""

    def __init__(
        self,
        routes: Routes,
        put: Put,
        *,
        price: Price = unknown,
    ) -> None:
        self.routes, self._put, self._price = routes, put, price
        self._budgets, self._room = Budgets(), Room()
        self._upstreams, self._contexts = Upstreams(), Contexts()
        self.offered = Offered(routes, self._upstreams)

    async def count(self, who: Who, scope: Scope, receive: Receive, send: Send) -> None:
        """How many tokens a request has, in the messages dialect."""
        reply = Reply(messages, send)
        try:
            raw = await body_of(receive, self._room)
            try:
                found = await n_tokens(self.routes, self._upstreams, who, parsed(raw), passed_on(scope))
            finally:
                self._room.give(len(raw))
        except NoRoute as error:
            await reply.refuse(Refused(404, await self.offered.instead(error)))
        except Refused as refused:
            await reply.refuse(refused)
        else:
            await say(send, 200, {"input_tokens": found})

    async def close(self) -> None:
        """End the connections to upstreams."""
        await self._upstreams.close()

    async def answer(self, dialect: Dialect, who: Who, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, whatever becomes of it."""
        reply = Reply(dialect, send)
        try:
            raw = await body_of(receive, self._room)
        except Refused as refused:
            await reply.refuse(refused)
            return
        try:
            await self._answered(dialect, who, raw, scope, receive, reply)
        finally:
            self._room.give(len(raw))

    async def _answered(
        self, dialect: Dialect, who: Who, raw: bytes, scope: Scope, receive: Receive, reply: Reply
    ) -> None:
        body: dict[str, Any] = {}
        now = time.time_ns()
        try:
            body = parsed(raw)
            call, sent = await self._begin(dialect, who, body)
        except Refused as refused:
            if refused.status in NOTED:
                about = (who.project, who.key, who.episode, dialect.name, body.get("model"))
                await self._note(RefusedCall(*about, refused.status, str(refused), now))
            await reply.refuse(refused)
            return
        work = asyncio.ensure_future(self._carry(dialect, call, body, sent, reply, passed_on(scope)))
        gone = asyncio.ensure_future(disconnect(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the task ends here: who cuts it waits for what is said and written below
            call.error = call.error or (ENDED, "cancelled: the gateway ended before the answer did")
        finally:
            gone.cancel()
            work.cancel()
            try:
                with suppress(asyncio.CancelledError):
                    await work
            finally:
                self._budgets.spend(who.key, call.spent)

    async def _begin(self, dialect: Dialect, who: Who, body: dict[str, Any]) -> tuple[Call, dict[str, Any]]:
        """The call, and what the upstream is sent. Raises Refused."""
        model = body.get("model")
        if not isinstance(model, str):
            raise Refused(400, "model: name one; `GET /v1/models` lists them")
        try:
            told = body if dialect is chat else dialect.to_chat(body, record=True)
            place = self._contexts.place(who.project, who.episode, chat.to_chat(told)["messages"])
            target = await self.routes.find(model, place.run.trace_id, who.episode)
            is_native = dialect.name in target.upstream.dialects
            asked = told if is_native or dialect is chat else dialect.to_chat(body)
            is_exact = (not is_native or dialect is chat) and await self._upstreams.gives_tokens(target.upstream)
            if is_exact and body.get("n") not in (None, 1) and target.settle is None:
                raise BadRequest("n", "exact tokens are kept of one answer; ask as many times")
            self._budgets.admit(who.key)  # the last that can fail: from here on `spend` follows
        except NoRoute as error:
            raise Refused(404, await self.offered.instead(error)) from None
        except BadRequest as error:
            raise Refused(400, str(error)) from None
        except Exhausted as error:
            raise Refused(402, str(error)) from None
        except TooFast as error:
            raise Refused(429, str(error), retry_after=str(error.retry_s)) from None
        except StoreError as error:
            raise Refused(503, str(error), retry_after=str(BUSY_S)) from None
        place.run.begin(who.task)
        key_id, now = who.key and who.key.id, time.time_ns()
        call = Call(who.project, key_id, who.episode, dialect.name, asked, target, place, now, is_exact=is_exact)
        sent = {**(body if is_native else asked), "model": target.model}
        return call, target.settle(sent) if target.settle else sent

    async def _carry(
        self,
        dialect: Dialect,
        call: Call,
        body: dict[str, Any],
        sent: dict[str, Any],
        reply: Reply,
        headers: dict[str, str],
    ) -> None:
        """From the upstream's answer to the end of ours; it is recorded whatever happens."""
        upstream = call.target.upstream
        spoken = dialect if dialect.name in upstream.dialects else chat
        is_streamed = bool(body.get("stream"))
        if spoken is chat:
            sent = _exact(sent, call.is_exact, is_streamed)
        passing = Passing(dialect, spoken, call, body)
        try:
            try:
                path = spoken.path.removeprefix("/v1")
                async with self._upstreams.ask(upstream, path, orjson.dumps(sent), headers) as answer:
                    if is_streamed:
                        await self._stream(answer, call, passing, reply)
                    else:
                        await self._whole(answer, call, passing, reply)
            except (Refusal, UpstreamFailed) as error:
                refused = _failed(call, error)
                call.answer = call.answer or passing.heard()
                await self._record(call)
                await reply.refuse(refused, passing.fail)
        except Refused as unrecorded:
            await reply.refuse(unrecorded, passing.fail)
        except asyncio.CancelledError:
            if not call.ended_ns:  # else it is on its way to the disk already
                call.error = call.error or ("client_disconnected", "cancelled: the client went away before the end")
                call.answer = call.answer or passing.heard()
                with suppress(Refused):
                    await asyncio.shield(self._record(call))
            if call.error and call.error[0] == ENDED:
                with suppress(TimeoutError, RuntimeError):  # a client that reads nothing, or has heard the end
                    async with asyncio.timeout(TOLD_S):
                        await reply.refuse(Refused(503, "the gateway is ending", retry_after=str(BUSY_S)), passing.fail)
            raise
        except Exception as error:  # the process edge: whatever an upstream sent that nobody thought of
            call.answer, call.error = None, ("gateway", f"{type(error).__name__}: {error}")
            with suppress(Refused):
                await self._record(call)
            await reply.refuse(Refused(500, "the gateway failed; its log says how"), passing.fail)
            raise

    async def _whole(self, answer: Said, call: Call, passing: Passing, reply: Reply) -> None:
        said = await answer.whole()
        try:
            ours = passing.whole(said)
        except (BadAnswer, ValueError) as error:
            words = said[:MAX_TOLD].decode(errors="replace")
            raise UpstreamFailed("no_answer", f"sent what is no answer ({error}): {words}") from None
        await self._record(call)
        await reply.whole(ours, call)

    async def _stream(self, answer: Said, call: Call, passing: Passing, reply: Reply) -> None:
        events = Events()
        async with aclosing(answer.pieces()) as pieces:
            async for piece in pieces:
                try:
                    passed = passing.feed(events.feed(piece))
                except (BadAnswer, ValueError) as error:
                    raise UpstreamFailed("no_answer", f"sent what is no answer: {error}") from None
                if passed:
                    call.first_ns = call.first_ns or time.time_ns()
                    await reply.piece(passed, call)
                if passing.is_done:
                    break  # whatever the upstream does with the connection
        call.answer = passing.heard()
        if not passing.is_whole:
            raise UpstreamFailed("broken_off", f"ended in the middle of its answer{passing.why}")
        await self._record(call)
        await reply.end(passing.end(), call)

    async def _note(self, call: RefusedCall) -> None:
        """Leave word of it in the trace; where the store cannot take that, its client is told all the same."""
        span = span_of_refused(call)
        with suppress(TimeoutError, StoreError):
            async with asyncio.timeout(RECORD_S):
                await self._put(call.project, [span], len(span.head), {})

    async def _record(self, call: Call) -> None:
        """Return once it is on disk. Raises Refused."""
        if call.is_recorded:
            return
        call.ended_ns = time.time_ns()
        if any(call.charged):
            n_prompt, n_completion = call.charged
            usage = {"prompt_tokens": n_prompt, "completion_tokens": n_completion}
            price, usage = call.target.price or self._price, {**table_of(call.answer or {}, "usage"), **usage}
            names = dict.fromkeys((call.target.model, text_of(call.answer or {}, "model")))
            call.cost_usd = next((usd for name in names if (usd := price(name, usage)) is not None), None)
        if call.message and call.error is None:
            prompt, sampled, _ = call.tokens
            tokens = [*prompt, *sampled] if prompt and sampled else []
            call.extends = self._contexts.answered(call.place, call.project, call.episode, call.message, tokens)
            for message in call.alternatives:
                self._contexts.remember(call.place, call.project, call.episode, message, ())
        else:
            self._contexts.failed(call.place)
        spans = spans_of_call(call)
        spent = {call.key: call.spent} if call.key else {}
        try:
            async with asyncio.timeout(RECORD_S):
                await self._put(call.project, spans, sum(map(len, spans[-1].bodies)), spent)
            call.is_recorded = True
            if (run := call.place.run).parent:
                run.is_told = run.parent.is_told = True
        except TimeoutError:
            raise Refused(503, f"the store has not taken the call within {RECORD_S:g} s; send it again") from None
        except StoreError as error:
            raise Refused(503, f"the call was not recorded: {error}", retry_after=str(BUSY_S)) from None


def _failed(call: Call, error: Refusal | UpstreamFailed) -> Refused:
    """What the client is told; noted for the record in words by which `judge.failures` knows whose fault it was."""
    upstream = call.target.upstream.name
    if isinstance(error, UpstreamFailed):
        what = "answer" if error.kind in UNREADABLE else "connection"
        call.error = (error.kind, f"API {what} error: upstream {upstream!r} {error}")
    else:
        kind = "rate_limit" if error.status == 429 else f"http_{error.status}"
        call.error = (kind, f"API status error: upstream {upstream!r} answered {error.status}: {error}")
    return refused_as(upstream, error)


def _exact(sent: dict[str, Any], gives_tokens: bool, is_streamed: bool) -> dict[str, Any]:
    """`sent` with what the record needs asked for, too."""
    if is_streamed:
        sent["stream_options"] = {**table_of(sent, "stream_options"), "include_usage": True}
    if gives_tokens:
        alternatives = sent.get("top_logprobs") if sent.get("logprobs") else None
        sent |= EXACT if alternatives is None else {**EXACT, "top_logprobs": alternatives}
        sent.pop("include_reasoning", None)  # without it vLLM gives no tokens
    return sent
