"""Agents as people write them with a framework; where their model is, OPENAI_BASE_URL alone says.

    python frameworks.py pydantic-ai|agents|langgraph|mcp

Prints what the agent said last. `mcp` is the agents library, with tools of a public server that it starts itself.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterable

MODEL = "scripted-1"
SYSTEM = "You count animals."
OWLS = 'call count {"animal": "owl"}\ncall count {"animal": "yeti"}'
EXPERT = "You know everything of owls."
TOKYO = """\
call convert_time {"source_timezone": "UTC", "time": "03:30", "target_timezone": "Asia/Tokyo"}
call get_current_time {"timezone": "Nowhere/Else"}"""


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


async def langgraph() -> str:
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    model = ChatOpenAI(model=MODEL).bind_tools([count])

    async def think(state: MessagesState) -> MessagesState:
        return {"messages": [await model.ainvoke([{"role": "system", "content": SYSTEM}, *state["messages"]])]}

    made = StateGraph(MessagesState).add_node("model", think).add_node("tools", ToolNode([count]))
    made.add_edge(START, "model").add_conditional_edges("model", tools_condition).add_edge("tools", "model")
    graph = made.compile()
    said: MessagesState = {"messages": [{"role": "user", "content": OWLS}]}
    async for kind, part in graph.astream(said, stream_mode=["messages", "values"]):
        said = part if kind == "values" else said
    last = {"role": "user", "content": "say That is all."}
    done = await graph.ainvoke({"messages": [*said["messages"], last]})
    return str(done["messages"][-1].content)


async def mcp() -> str:
    from agents import Agent, Runner
    from agents.mcp import MCPServerStdio

    started = {"command": sys.executable, "args": ["-m", "mcp_server_time", "--local-timezone", "UTC"]}
    async with MCPServerStdio({**started, "env": dict(os.environ)}, client_session_timeout_seconds=60) as server:
        agent = Agent(name="clock", instructions=SYSTEM, model=MODEL, mcp_servers=[server])
        return str((await Runner.run(agent, TOKYO)).final_output)


if __name__ == "__main__":
    known = {"pydantic-ai": pydantic_ai, "agents": agents, "langgraph": langgraph, "mcp": mcp}
    print(asyncio.run(known[sys.argv[1]]()))
