"""An agent with LangGraph: a graph of a model and its tools."""

from __future__ import annotations

from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from zoo import DESCRIPTION, MODEL, SYSTEM, count

TOOLS = [StructuredTool.from_function(count, description=DESCRIPTION)]


def run(question: str) -> str:
    """Its answer."""
    model = ChatOpenAI(model=MODEL).bind_tools(TOOLS)

    def think(state: MessagesState) -> MessagesState:
        return {"messages": [model.invoke([{"role": "system", "content": SYSTEM}, *state["messages"]])]}

    graph = StateGraph(MessagesState).add_node("model", think).add_node("tools", ToolNode(TOOLS))
    graph.add_edge(START, "model").add_conditional_edges("model", tools_condition).add_edge("tools", "model")
    done = graph.compile().invoke({"messages": [{"role": "user", "content": question}]})
    return str(done["messages"][-1].content)
