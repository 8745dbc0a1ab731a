"""Agents as people write them, each a target of `[agent] kind = "python"`: the SDK finds the gateway by itself."""

from __future__ import annotations

from typing import Any

SYSTEM = "You count animals."


def count(animal: str) -> str:
    """How many there are.

    Args:
        animal: Its name.
    """
    return f"seven of {animal}"


async def pydantic_ai(task: Any) -> str:
    from pydantic_ai import Agent

    agent = Agent(f"openai:{task.model}", system_prompt=SYSTEM, tools=[count])
    return str((await agent.run(task.instruction)).output)


def openai_agents(task: Any) -> str:
    from agents import Agent, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    agent = Agent(name="counter", instructions=SYSTEM, model=task.model, tools=[function_tool(count)])
    return str(Runner.run_sync(agent, task.instruction).final_output)


def langgraph(task: Any) -> str:
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    model = ChatOpenAI(model=task.model).bind_tools([count])

    def think(state: MessagesState) -> MessagesState:
        return {"messages": [model.invoke([{"role": "system", "content": SYSTEM}, *state["messages"]])]}

    made = StateGraph(MessagesState).add_node("model", think).add_node("tools", ToolNode([count]))
    made.add_edge(START, "model").add_conditional_edges("model", tools_condition).add_edge("tools", "model")
    done = made.compile().invoke({"messages": [{"role": "user", "content": task.instruction}]})
    return str(done["messages"][-1].content)


def openai_sdk(task: Any) -> str:
    import openai

    client = openai.OpenAI()
    messages: list[Any] = [{"role": "user", "content": task.instruction}]
    said = client.chat.completions.create(model=task.model, messages=messages).choices[0].message
    return str(said.content or said.tool_calls)


def anthropic_sdk(task: Any) -> str:
    import anthropic

    messages: list[Any] = [{"role": "user", "content": task.instruction}]
    said = anthropic.Anthropic().messages.create(model=task.model, max_tokens=64, messages=messages)
    return "".join(block.text for block in said.content if block.type == "text")
