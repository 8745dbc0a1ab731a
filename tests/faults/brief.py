"""`agentloop` with a warm start of few steps: tests that cut a run short need its stages and not its skill."""

from agentloop_cli.main import main

from agentloop.loop import control, warm_start

N_STEPS = 20

if __name__ == "__main__":
    warm_start.CHECK_EVERY = warm_start.SETTLE_STEPS = control.SETTLE_STEPS = N_STEPS
    main()
