"""The parser against the standard's own examples and the SDKs' parsers, however the bytes are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai._streaming import SSEDecoder

from agentloop.gateway.dialects.sse import Event, Events, data, named

# The examples of WHATWG HTML §9.2.6, with what the standard says of them.
STANDARD = [
    (b"data: YHOO\ndata: +2\ndata: 10\n\n", [b"YHOO\n+2\n10"]),
    (
        b": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event",
        [b"first event", b"second event"],
    ),
    (b"data\n\ndata\ndata\n\ndata:", [b"", b"\n"]),
    (b"data:test\n\ndata: test\n\n", [b"test", b"test"]),
]
LINES = st.lists(
    st.sampled_from([b"data: a", b"data:b", b": ping", b"event: x", b"event:y", b"", b"", b"data:  c:d"]), max_size=12
)


@pytest.mark.parametrize(("stream", "said"), STANDARD)
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_the_standards_examples(stream: bytes, said: list[bytes], end: bytes, size: int) -> None:
    # A lone carriage return at the very end may be half of an end of line: one more byte tells.
    stream = b"\xef\xbb\xbf" + stream.replace(b"\n", end) + b":"
    parser = Events()
    found = [event for at in range(0, len(stream), size) for event in parser.feed(stream[at : at + size])]
    assert [event.data for event in found] == said


@given(LINES, st.sampled_from([b"\n", b"\r\n"]), st.lists(st.integers(0, 200), max_size=6))
def test_cuts_do_not_matter_and_openai_reads_the_same(lines: list[bytes], end: bytes, cuts: list[int]) -> None:
    stream = end.join([*lines, b"", b""])
    parser, found = Events(), []
    ends = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    for a, b in pairwise(ends):
        found += parser.feed(stream[a:b])
    read = [Event(sse.event or "message", sse.data.encode()) for sse in SSEDecoder().iter_bytes(iter([stream]))]
    assert found == [event for event in read if event.data]  # the standard drops an event without data


def test_an_event_larger_than_the_limit_is_refused_while_it_comes() -> None:
    parser = Events(limit_bytes=1000)
    parser.feed(b"data: " + b"x" * 900 + b"\n\n")
    parser.feed(b"data: " + b"x" * 900)
    with pytest.raises(ValueError, match="an event of more than 1000 bytes"):
        parser.feed(b"x" * 100)
    with pytest.raises(ValueError, match="more than 1000"):
        Events(limit_bytes=1000).feed(b"data: " + b"x" * 1001 + b"\n\n")


def test_what_is_written_is_read() -> None:
    written = data({"a": "b\n\nc"}) + named({"type": "message_stop", "ü": 1})
    assert Events().feed(written) == [
        Event("message", b'{"a":"b\\n\\nc"}'),
        Event("message_stop", '{"type":"message_stop","ü":1}'.encode()),
    ]
