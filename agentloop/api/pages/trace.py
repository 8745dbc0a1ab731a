"""The page of one trace: its failures in place, its outline, its conversation, a call's messages, and a search."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlencode

import orjson
from fastapi import APIRouter, Query, Request
from starlette.responses import RedirectResponse, Response

from agentloop.api.pages.site import PageSite, Viewer
from agentloop.api.parameters import TraceId
from agentloop.api.trace_views import MAX_INT, ItemId, Place, Words
from agentloop.errors import NoSuchTrace, StoreError
from agentloop.formats.export import load_exporter
from agentloop.loop.held_out import withhold
from agentloop.loop.project import EVALS
from agentloop.otel.stored_trace import StoredTrace
from agentloop.store.store import Store
from agentloop.store.tables import TraceRow
from agentloop.views.item_contents import ItemContent, TraceContents, text_at
from agentloop.views.outline import OUTLINES, Outline
from agentloop.views.trace_page import MAX_ITEMS, MAX_ROWS, TracePlace, TraceView, call_context, summary_of, trace_view
from agentloop.views.trace_search import nearest, positions_of_errors, positions_of_tool, search

SEE_OTHER = 303
KINDS = (
    ("tools", "Tools"),
    ("reasoning", "Reasoning"),
    ("messages", "Messages"),
    ("metadata", "Metadata"),
)
"""What can be hidden: word in the address, label."""
EXPORTS = ("html", "jsonl", "atif", "otlp")
"""Formats in which the page offers its trace."""
PLAIN = "text/plain; charset=utf-8"
Part = Annotated[str, Query(max_length=200)]


class PageAddress(NamedTuple):
    """The address of a state of the page, and of states like it."""

    path: str
    query: dict[str, Any]

    def to(self, fragment: str = "", **changes: Any) -> str:
        """The address with some parameters changed; None or an empty value removes one. fragment: after `#`."""
        merged = {**self.query, **changes}
        filled = [(name, value) for name, value in merged.items() if value not in (None, "", [], ())]
        query = f"?{urlencode(filled, doseq=True)}" if filled else ""
        return f"{self.path}{query}{f'#{fragment}' if fragment else ''}"

    def place(self, fragment: str = "", **place: Any) -> str:
        """The address of another place in the trace: without the one that was asked for."""
        return self.to(fragment, **{"start": None, "step": None, "at": None, "failure": None, **place})

    def whole(self, item_id: str) -> Callable[[str], str]:
        """A function from the name of a text of an item to the address of that text, whole."""
        return lambda part: self.part("text", at=item_id, part=part)

    def part(self, name: str, **query: Any) -> str:
        """The address of something below the page."""
        return f"{self.path}/{name}?{urlencode(query)}"


def trace_page_routes(site: PageSite) -> APIRouter:
    """The page, and what it links to."""
    routes = APIRouter(include_in_schema=False)

    @routes.get("/traces/{trace_id}")
    def show(
        request: Request,
        viewer: Viewer,
        trace_id: TraceId,
        start: Place = None,
        step: Place = None,
        at: ItemId = "",
        failure: Place = None,
        q: Words = "",
        tool: Words = "",
        tab: Annotated[str, Query(pattern="^(|tree|call)$")] = "",
        hide: Annotated[list[str] | None, Query(max_length=10)] = None,
    ) -> Response:
        limit = MAX_ROWS if tab == "tree" else MAX_ITEMS
        place = TracePlace(failure=failure, step=step, at=at, start=start, limit=limit, q=q)
        view = trace_view(site.store, viewer.project, trace_id, place)
        hidden = [name for name, _ in KINDS if name in (hide or ())]
        query = {
            "start": start,
            "step": step,
            "at": at,
            "failure": failure,
            "q": q,
            "tool": tool,
            "tab": tab,
            "hide": hidden,
        }
        values: dict[str, Any] = {
            "view": view,
            "place": place,
            "address": PageAddress(f"/traces/{trace_id}", query),
            "kinds": KINDS,
            "hidden": hidden,
            "exports": EXPORTS,
            "tab": tab,
            "tool": tool,
            "hits": _hits(site.store, viewer.project, view, q, tool),
            "call": call_context(site.store, viewer.project, trace_id, view.target or "") if tab == "call" else None,
        }
        if not site.is_read_only:
            with suppress(StoreError):  # a store that cannot be written can still be read
                site.store.put_visit(viewer.project, trace_id, viewer.by)
        return site.draw(request, "trace.html.j2", **values)

    @routes.get("/traces/{trace_id}/next")
    def go_on(
        viewer: Viewer,
        trace_id: TraceId,
        position: Annotated[int, Query(alias="from", ge=0, le=MAX_INT)],
        what: Annotated[str, Query(pattern="^(error|tool)$")],
        tool: Words = "",
        back: bool = False,
    ) -> Response:
        row, outline = _read(site.store, viewer.project, trace_id)
        contents = TraceContents(site.store, row, outline)
        if what == "error":
            positions = positions_of_errors(site.store, row, outline, contents)
        else:
            positions = positions_of_tool(site.store, row, outline, contents, tool)
        target = nearest(positions, position, is_back=back)
        if target is None:
            which = "error" if what == "error" else f"call of {tool!r}"
            side = "before" if back else "after"
            raise NoSuchTrace(f"no {which} {side} this place; go back to the trace, which has {len(positions)} of them")
        item = outline.items[target]
        return RedirectResponse(f"/traces/{trace_id}?{urlencode({'at': item.id})}#{anchor(item)}", SEE_OTHER)

    @routes.get("/traces/{trace_id}/text")
    def send_text(viewer: Viewer, trace_id: TraceId, at: ItemId, part: Part) -> Response:
        row, outline = _read(site.store, viewer.project, trace_id)
        position = outline.position(at, trace_id)
        contents = TraceContents(site.store, row, outline)
        kind, _, name = part.partition(".")
        content = contents.read([position])[0]
        if kind == "context":
            content = ItemContent(heard=tuple(contents.context(position)[0]))
            part = f"heard.{name}"
        text = text_at(content, part)
        if text is None:
            raise NoSuchTrace(f"part {at!r} of trace {trace_id!r} has no text {part!r}; its page lists what it has")
        return _attachment(text.encode(errors="replace"), f"trace-{position}-{part}.txt")

    @routes.get("/traces/{trace_id}/raw")
    def send_raw(viewer: Viewer, trace_id: TraceId, at: ItemId) -> Response:
        row, outline = _read(site.store, viewer.project, trace_id)
        position = outline.position(at, trace_id)
        contents = TraceContents(site.store, row, outline)
        value = contents.span(at) if outline.is_spans else contents.step(position)
        options = orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS
        return _attachment(orjson.dumps(value, default=str, option=options), f"trace-{position}.txt")

    @routes.get("/traces/{trace_id}/export")
    def send_export(viewer: Viewer, trace_id: TraceId, format: Part = "jsonl") -> Response:
        exporter = load_exporter(format)
        if site.folder is not None:
            withhold(exporter, site.folder / EVALS)
        row = site.store.row(viewer.project, trace_id)
        data = b"".join(exporter.write([StoredTrace(site.store, summary_of(row))]))
        return _attachment(data, f"trace.{format}.txt")

    return routes


def anchor(item: Any) -> str:
    """The id of an item's element, which is part of addresses: `step-N` for a step of the trace itself."""
    return f"step-{item.step}" if item.step is not None else f"at-{item.id}"


def _read(store: Store, project: str, trace_id: str) -> tuple[TraceRow, Outline]:
    row = store.row(project, trace_id)
    return row, OUTLINES.get(store, row)


def _hits(store: Store, project: str, view: TraceView, q: str, tool: str) -> Any:
    if not q and not tool:
        return None
    row, outline = _read(store, project, view.summary.id)
    return search(store, row, outline, q, tool)


def _attachment(data: bytes, name: str) -> Response:
    """Text of a trace as a file, which no browser shows as a page."""
    return Response(data, media_type=PLAIN, headers={"Content-Disposition": f'attachment; filename="{name}"'})
