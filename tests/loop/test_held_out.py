"""Tasks that no trainer may see, however their instruction is wrapped."""

from __future__ import annotations

import json

import pytest

from agentloop.loop.held_out import HeldOut, normalised

TEXT = "Count the lines of notes/may.txt and submit them."
HELD_OUT = HeldOut(frozenset({"h1"}), frozenset({normalised(TEXT), "sort it"}))


@pytest.mark.parametrize(
    "instruction",
    [
        TEXT,
        f"Task: {TEXT}",
        f"You are a clerk.\n\n{TEXT}\n\nBegin.",
        TEXT.upper(),
        TEXT.replace(" ", "\n  "),
        f'"{TEXT}"',
        f"`{TEXT}`, please",
        json.dumps({"task": TEXT}),
        json.dumps({"task": f"Dear clerk,\n{TEXT}\nThanks"}),
        json.dumps({"task": TEXT.replace(" ", "\n", 1)}),
    ],
)
def test_a_held_out_instruction_is_recognised_with_other_text_around_it(instruction: str) -> None:
    assert HELD_OUT.has(None, instruction)
    assert HELD_OUT.has("h1", "anything")


@pytest.mark.parametrize(
    "instruction",
    [
        "Count the lines of notes/june.txt and submit them.",
        "Recount the lines of notes/may.txt and submit them.",  # another word
        f"Do not re_{TEXT}",
        "Read the list and sort it by name.",  # two words stand in many texts by chance
    ],
)
def test_another_instruction_is_none(instruction: str) -> None:
    assert not HELD_OUT.has("t1", instruction)


@pytest.mark.parametrize(
    "text", ["Zähle die Zeilen von notes/mai.txt und gib sie ab.", "It’s May 🎲: count the lines — all."]
)
def test_a_held_out_instruction_is_recognised_in_escaped_json(text: str) -> None:
    instruction = json.dumps({"task": f"Clerk,\n{text}"})
    assert text not in instruction
    assert HeldOut(frozenset(), frozenset({normalised(text)})).has(None, instruction)
