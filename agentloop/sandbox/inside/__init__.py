"""What runs inside a sandbox as its first process: one program, two variants.

`pid1.py` for images with Python 3.6 or newer, standard library alone, and `pid1.sh` for the others.
This package is mounted into the sandbox, read-only; of agentloop it imports nothing but itself.
"""
