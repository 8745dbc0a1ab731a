"""Rows of episodes that a real vLLM server sampled through the gateway: no token lost, each as it was sampled."""

from __future__ import annotations

import json

import pytest

from benchmarks import rows_vllm

from . import tiny_model
from .conftest import Running

pytestmark = pytest.mark.slow

N_EPISODES = 12


def test_every_sampled_token_is_in_one_row_with_its_log_probability(
    vllm: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    server = vllm.url.removesuffix("/v1")
    given = ["--server", server, "--name", tiny_model.NAME, "--model", str(vllm.model)]
    code = rows_vllm.main([*given, "--episodes", str(N_EPISODES), "--temperature", "1.4"])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["episodes"] == N_EPISODES
    assert figures["masked"] == figures["sampled"] > 3 * N_EPISODES
    assert figures["turns"] == 3 * N_EPISODES
    assert figures["turns_in_two_rows"] == figures["episodes_lost"] == figures["counted"] == 0
    assert figures["worst_against_torch"] < rows_vllm.TOLERANCE
    assert code == 0
