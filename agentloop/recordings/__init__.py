"""What models answered and what sandboxes returned, kept so that it need not be asked again: one mechanism for both.

An exchange (`exchanges.py`) is a request and its reply. A reply is found by the hash of everything that decides it, and
the n-th equal request gets the n-th reply. `answers.py` and `traces.py` have models, `sandboxes.py` has sandboxes.
"""
