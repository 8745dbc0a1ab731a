"""A failed run through the gateway becomes a case, when another run passed the task that both name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from parts import Run

from agentloop.gateway.routes import Upstream
from tests.gateway.serving import Gateway, gateway_here
from tests.gateway.upstream import ModelServer

pytestmark = pytest.mark.slow
CHAT = "/v1/chat/completions"
Messages = list[dict[str, Any]]


def attempt(gateway: Gateway, episode: str, task: str, arguments: str, result: str) -> None:
    """One call of a tool, and what came back."""
    messages: Messages = [{"role": "user", "content": f"call count {arguments}"}]
    path = f"/e/{episode}/t/{task}{CHAT}"
    said = gateway.post(path, {"model": "m", "messages": messages}).json()["choices"][0]["message"]
    messages += [said, {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": result}]
    assert gateway.post(path, {"model": "m", "messages": messages}).status_code == 200


@pytest.mark.parametrize("passes", [True, False])
def test_a_failed_run_is_mined_where_another_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: ModelServer, agentloop: Run, passes: bool
) -> None:
    with gateway_here(tmp_path / "traces" / "store.db", Upstream(name="up", base_url=model.url)) as gateway:
        attempt(gateway, "bad", "owls", '{"animal": "owll"}', "Error: no such animal 'owll'")
        attempt(gateway, "good", "owls" if passes else "wolves", '{"animal": "owl"}', "7")
    monkeypatch.chdir(tmp_path)
    for episode, reward in (("bad", "0"), ("good", "1")):
        done = agentloop("judge", "resolve", episode, "--reward", reward, "--why", "checked", "--by", "ann")
        assert done.returncode == 0, done.stderr
    assert agentloop("judge").returncode == 0
    done = agentloop("mine", "--filter", "source:gateway", "--keep-rejected", "rejected")
    assert done.returncode == (0 if passes else 5), done.stdout + done.stderr
    assert ("1 case admitted" in done.stdout) is passes, done.stdout
