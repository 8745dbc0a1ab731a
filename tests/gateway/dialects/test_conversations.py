"""A conversation that goes to and fro through a dialect is the conversation that the model had.

What the model sees of its own turn must be what it said, or its next prompt does not extend the last one.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentloop.gateway.dialects import messages, responses
from agentloop.gateway.dialects.dialect import Dialect
from tests.gateway.dialects.chats import WORDS, Json, answers

pytestmark = pytest.mark.slow

TURNS = st.lists(st.tuples(answers(), st.lists(WORDS, min_size=3, max_size=3), WORDS), min_size=1, max_size=4)


def asked(dialect: Dialect, turns: list[tuple[Json, list[str], str]]) -> Json:
    """The next request of an agent that keeps what it was answered, as its API tells it to."""
    said: list[Json] = [{"role": "user", "content": "begin"}]
    for answer, results, more in turns:
        calls = answer["choices"][0]["message"].get("tool_calls") or ()
        whole = dialect.from_chat(answer, {})
        told = list(zip(calls, results, strict=False))
        if dialect is messages:
            blocks = [{"type": "tool_result", "tool_use_id": call["id"], "content": result} for call, result in told]
            said.append({"role": "assistant", "content": whole["content"]})
            said.append({"role": "user", "content": [*blocks, {"type": "text", "text": more}]})
        else:
            said += whole["output"]
            said += [{"type": "function_call_output", "call_id": call["id"], "output": out} for call, out in told]
            said.append({"role": "user", "content": more})
    return {"model": "m", "messages" if dialect is messages else "input": said}


@pytest.mark.parametrize("dialect", [messages, responses], ids=["messages", "responses"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(turns=TURNS)
def test_the_model_sees_what_it_said(dialect: Dialect, turns: list[tuple[Json, list[str], str]]) -> None:
    expected: list[Json] = [{"role": "user", "content": "begin"}]
    for answer, results, more in turns:
        message = answer["choices"][0]["message"]
        expected.append(message)
        for call, result in zip(message.get("tool_calls") or (), results, strict=False):
            expected.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        expected.append({"role": "user", "content": more})
    assert dialect.to_chat(asked(dialect, turns))["messages"] == expected
