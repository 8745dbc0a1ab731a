"""Agents as people write them with a framework; where their model is, OPENAI_BASE_URL alone says.

    python frameworks.py pydantic-ai|agents

Prints what the agent said last.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterable

MODEL = "scripted-1"
SYSTEM = "You count animals."
OWLS = 'call count {"animal": "owl"}\ncall count {"animal": "yeti"}'
EXPERT = "You know everything of owls."


def count(animal: str) -> str:
    """How many there are.

    Args:
        animal: Its name.
    """
    return f"seven of {animal}"


async def pydantic_ai() -> str:
    from pydantic_ai import Agent

    agent = Agent(f"openai:{MODEL}", system_prompt=SYSTEM, tools=[count])

    async def hear(_: object, events: AsyncIterable[object]) -> None:
        async for _ in events:
            continue

    first = await agent.run(OWLS, event_stream_handler=hear)
    done = await agent.run("say That is all.", message_history=first.all_messages())
    return str(done.output)


async def agents() -> str:
    from agents import Agent, Runner, function_tool

    expert = Agent(name="expert", instructions=EXPERT, model=MODEL)
    ask = expert.as_tool("ask_expert", "Ask somebody who knows.")
    agent = Agent(name="counter", instructions=SYSTEM, model=MODEL, tools=[function_tool(count), ask])
    first = Runner.run_streamed(agent, f'{OWLS}\ncall ask_expert {{"input": "say By day."}}')
    async for _ in first.stream_events():
        pass
    last = await Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": "say That is all."}])
    return str(last.final_output)


if __name__ == "__main__":
    print(asyncio.run({"pydantic-ai": pydantic_ai, "agents": agents}[sys.argv[1]]()))
