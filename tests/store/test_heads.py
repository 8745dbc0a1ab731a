"""The head of an imported trace: three lines, or one as older versions wrote it."""

from __future__ import annotations

import orjson
from views.stored import step, trace

from agentloop.store import documents
from agentloop.types import Imported, Score


def test_a_head_on_one_line_is_read_like_one_on_three() -> None:
    scores = (Score(verifier="v", version="1", value=0.5),)
    imported = Imported(trace=trace("a", step(0, "words")), scores=scores, raw={"note": "a\nb"})
    head, bodies = documents.split(imported)
    lines = head.split(b"\n")
    assert len(lines) == 3
    old = orjson.dumps({name: value for line in lines for name, value in orjson.loads(line).items()})
    for each in (head, old):
        assert documents.join(each, tuple(bodies)) == imported
        assert documents.trace_of(each)["steps"][0]["completion"]["message"] == {"$": 1}
        assert documents.worth_of(each)["scores"][0]["value"] == 0.5
