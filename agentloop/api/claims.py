"""What a span claims: a reward, which is a judgement, or to be a call through our gateway, which names a run's task.

From a sender who may not judge, the attribute is stored under another name, such as `agentloop.claimed_reward`. No
reader takes that for a reward or a call, neither here nor after an export.
"""

from __future__ import annotations

from typing import Any

import orjson

from agentloop.errors import counted
from agentloop.otel.attributes import REWARD
from agentloop.otel.otlp import OtlpBatch
from agentloop.store.spans import DIALECT
from agentloop.types import Span

CLAIMS = {REWARD: "agentloop.claimed_reward", DIALECT: "agentloop.claimed_dialect"}
"""Attributes that count only from those who may judge -> their names from everybody else."""
_MARK = f'"{DIALECT}"'.encode()


def without_claims(batch: OtlpBatch) -> OtlpBatch:
    """The batch with claims in place of rewards and of marks of our gateway; `problem` says how many."""
    n = {
        REWARD: sum(span.reward is not None for span in batch.spans),
        DIALECT: sum(_MARK in span.head for span in batch.spans),
    }
    if not any(n.values()):
        return batch
    spans = [span if span.reward is None and _MARK not in span.head else _claimed(span) for span in batch.spans]
    why = [
        f"{name} of {counted(many, 'span')} does not count: it takes a key with the scope 'judge'"
        for name, many in n.items()
        if many
    ]
    return batch._replace(spans=spans, problem="; ".join(filter(None, (batch.problem, *why))))


def _claimed(span: Span) -> Span:
    head: dict[str, Any] = orjson.loads(span.head)
    for place in (head, head["resource"], head["scope"]):
        attributes = place["attributes"]
        for name, claim in CLAIMS.items():
            if name in attributes:
                attributes[claim] = attributes.pop(name)
    return span._replace(reward=None, head=orjson.dumps(head))
