"""Record an agent that agentloop does not run: say what happens, and the trace is stored.

python record_your_agent.py
"""

from __future__ import annotations

import agentloop as al

BOOKINGS = {"Ada": "12:30", "Grace": "18:00"}


def answer(question: str, trace: object) -> str:
    """An agent of your own: one look-up, one answer. It tells the recorder what it does."""
    name = question.rstrip("?").split()[-1]
    time = BOOKINGS.get(name)
    trace.tool("bookings", {"name": name}, time or "no booking", ok=time is not None)  # type: ignore[attr-defined]
    return f"{name} has a table at {time}." if time else f"{name} has a table at noon."


if __name__ == "__main__":
    for name in ("Ada", "Grace", "Alan"):
        question = f"When is the table of {name}?"
        with al.record("bookings-agent", task=f"table-{name}", session="evening") as trace:
            trace.user(question)
            reply = answer(question, trace)
            trace.assistant(reply, model="rules")
            trace.answer(reply)
            trace.score(1.0 if name in BOOKINGS else 0.0)
    rows = al.load("session:evening")
    print(len(rows), "traces stored; next: agentloop failures 'session:evening'")
