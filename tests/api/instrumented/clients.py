"""The clients of OpenAI and Anthropic, with what the two have different names for.

Each says `ask(messages)`: the text, the calls, and what to put into the messages of the next request.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import anthropic
import openai

MODEL = "scripted-1"
PARAMETERS = {
    "count": {"type": "object", "properties": {"animal": {"type": "string"}}, "required": ["animal"]},
    "ask_expert": {"type": "object", "properties": {"question": {"type": "string"}}, "required": ["question"]},
}
Failed = (openai.APIStatusError, anthropic.APIStatusError)
Messages = list[dict[str, Any]]


class Call(NamedTuple):
    """A tool call that the model made."""

    id: str
    name: str
    arguments: dict[str, Any]


Said = tuple[str, list[Call], Messages]


class Client:
    """What they share; one that failed is not asked again but by `patient`."""

    client: openai.OpenAI | anthropic.Anthropic

    def __init__(self, *, stream: bool) -> None:
        self.stream = stream

    def close(self) -> None:
        self.client.close()

    def ask(self, messages: Messages) -> Said:
        raise NotImplementedError

    def patient(self, messages: Messages) -> Said:
        """As `ask`, and again when there is no answer."""
        try:
            return self.ask(messages)
        except Failed:
            time.sleep(0.01)
            return self.ask(messages)

    def system(self, text: str) -> dict[str, Any]:
        return {"role": "system", "content": text}

    def user(self, text: str) -> dict[str, Any]:
        return {"role": "user", "content": text}


class Chat(Client):
    """OpenAI's chat completions."""

    def __init__(self, url: str, *, stream: bool) -> None:
        super().__init__(stream=stream)
        self.client = openai.OpenAI(api_key="none", base_url=f"{url}/v1", max_retries=0)
        self.create = self.client.chat.completions.create
        self.tools: Any = [
            {"type": "function", "function": {"name": name, "parameters": parameters}}
            for name, parameters in PARAMETERS.items()
        ]

    def ask(self, messages: Messages) -> Said:
        given: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": self.tools, "temperature": 0.5}
        if not self.stream:
            message = self.create(**given).choices[0].message
            text = message.content or ""
            calls = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()]
        else:
            text, calls = self._heard(self.create(**given, stream=True, stream_options={"include_usage": True}))
        said: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            said["tool_calls"] = [
                {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
                for id_, name, arguments in calls
            ]
        return text, [Call(id_, name, json.loads(arguments)) for id_, name, arguments in calls], [said]

    def _heard(self, chunks: Iterable[Any]) -> tuple[str, list[tuple[str, str, str]]]:
        text, calls = "", []
        for chunk in chunks:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                for call in choice.delta.tool_calls or ():
                    if call.id:
                        calls.append((call.id, call.function.name, ""))
                    id_, name, arguments = calls[-1]
                    calls[-1] = (id_, name, arguments + call.function.arguments)
        return text, calls

    def results(self, given: Iterable[tuple[Call, str]]) -> Messages:
        return [{"role": "tool", "tool_call_id": call.id, "content": result} for call, result in given]


class Responses(Client):
    """OpenAI's responses, with the whole conversation in each request."""

    def __init__(self, url: str, *, stream: bool) -> None:
        super().__init__(stream=stream)
        self.client = openai.OpenAI(api_key="none", base_url=f"{url}/v1", max_retries=0)
        self.create = self.client.responses.create
        self.tools: Any = [
            {"type": "function", "name": name, "parameters": parameters, "strict": False}
            for name, parameters in PARAMETERS.items()
        ]

    def ask(self, messages: Messages) -> Said:
        given: dict[str, Any] = {"model": MODEL, "input": messages, "tools": self.tools, "temperature": 0.5}
        if not self.stream:
            response = self.create(**given)
        else:
            for event in self.create(**given, stream=True):
                if event.type == "response.completed":
                    response = event.response
        said = [item.model_dump(exclude_none=True) for item in response.output]
        calls = [
            Call(item.call_id, item.name, json.loads(item.arguments))
            for item in response.output
            if item.type == "function_call"
        ]
        return response.output_text, calls, said

    def results(self, given: Iterable[tuple[Call, str]]) -> Messages:
        return [{"type": "function_call_output", "call_id": call.id, "output": result} for call, result in given]


class Claude(Client):
    """Anthropic's messages."""

    def __init__(self, url: str, *, stream: bool) -> None:
        super().__init__(stream=stream)
        self.client = anthropic.Anthropic(api_key="none", base_url=url, max_retries=0)
        self.messages = self.client.messages
        self.tools: Any = [{"name": name, "input_schema": parameters} for name, parameters in PARAMETERS.items()]

    def ask(self, messages: Messages) -> Said:
        given: dict[str, Any] = {"model": MODEL, "max_tokens": 100, "tools": self.tools}
        given["messages"] = [message for message in messages if message["role"] != "system"]
        if system := [message["content"] for message in messages if message["role"] == "system"]:
            given["system"] = system[0]
        if self.stream:
            with self.messages.stream(**given) as stream:
                content = stream.get_final_message().content
        else:
            content = self.messages.create(**given).content
        text = "".join(block.text for block in content if block.type == "text")
        calls = [Call(block.id, block.name, block.input) for block in content if block.type == "tool_use"]
        said = [block.model_dump(include={"type", "text", "id", "name", "input"}) for block in content]
        return text, calls, [{"role": "assistant", "content": said}]

    def results(self, given: Iterable[tuple[Call, str]]) -> Messages:
        content = [{"type": "tool_result", "tool_use_id": call.id, "content": result} for call, result in given]
        return [{"role": "user", "content": content}]


DIALECTS = {"chat": Chat, "responses": Responses, "messages": Claude}
