"""`python -m agentloop_cli`, the same as `agentloop`."""

from agentloop_cli.main import main

main()
