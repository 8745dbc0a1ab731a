"""What the agents of this folder have in common: a zoo, and its one tool."""

from __future__ import annotations

MODEL = "zoo-model"
SYSTEM = """\
You answer questions about a zoo.

Ask `count` before you answer.

Be friendly and write whole sentences."""
DESCRIPTION = "How many animals of a kind the zoo has."
SCHEMA = {"type": "object", "properties": {"animal": {"type": "string"}}, "required": ["animal"]}
ANIMALS = {"owl": 8, "yeti": 2, "lynx": 14, "heron": 40, "tapir": 6, "okapi": 4, "otter": 22, "ibis": 36}
MAX_TURNS = 4


def count(animal: str) -> str:
    """The tool: it knows kinds by their singular, in lower case."""
    number = ANIMALS.get(animal)
    return f"error: no kind {animal!r} in this zoo" if number is None else str(number)
