"""The loop: run, judge, train, gate, promote.

Read `project.py` (what is on disk), `turns.py` (what happens, in order), then what makes versions:
`warm_start.py` and `weights.py` for weights that are trained here, `fixed.py` for a policy that others serve.
`summary.py` says what came of it.
"""
