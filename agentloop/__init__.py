"""agentloop: an experience loop for tool-using agents.

Read in this order: `types/` (the nouns), `protocols.py` (the seams), `rollout/episode.py` (one attempt),
`loop/turns.py` (one turn: run, judge, train, gate, promote).
"""

__version__ = "0.1.0"
