"""A judge model by litellm's name. Run by `policies/test_litellm.py`, in an environment that has litellm."""

from __future__ import annotations

import asyncio

import pytest

from agentloop.judge.verifiers.rubric import Rubric

from .model_server import ruling, serving
from .scenes import REFERENCE, shell, submit, trace

SEEN = trace([shell(REFERENCE, "the largest is 95"), submit("95")])


def test_a_model_by_litellms_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving(lambda system, user: ruling((True, "the largest is 95"))) as server:
        monkeypatch.setenv("OPENAI_API_BASE", server.url)
        verifier = Rubric("It is 95.", votes=1, model="openai/scripted", api_key="k", usd_per_million=(1.0, 2.0))
        found = asyncio.run(verifier.score(SEEN, None))
        schema = server.asked[0]["response_format"]["json_schema"]
    assert (found.value, found.n_prompt_tokens) == (1.0, 100), found.error
    assert found.cost_usd == pytest.approx(120e-6)
    assert schema["strict"] is True
