"""`python -m agentloop_cli`, the same as `agentloop`."""

from agentloop_cli.start import run

run()
