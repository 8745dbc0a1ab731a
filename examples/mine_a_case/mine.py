"""Turn a failed attempt into a must-pass case, which every later version has to pass.

    cd mine_a_case && python mine.py

A case is admitted when it fails again with the agent that failed, passes with another (here: the task's solution), has
verifiers that no known cheat can fool, is new, and holds no secret.
"""

from __future__ import annotations

import agentloop as al

FAULTY = "scripted:agent.py:faulty"

if __name__ == "__main__":
    results = al.run(al.load_suite("evals/sums"), FAULTY)
    print("mean reward", results.mean_reward)
    for case in al.mine("reward<1", policy=FAULTY, fixed="oracle"):
        print(case.case.id, "admitted to" if case.folder else "not admitted:", case.folder or case.why)
