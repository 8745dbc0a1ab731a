"""The program that runs as the first process inside a sandbox, in two variants.

`pid1.py` is for images with Python 3.6 or newer and uses only the standard library; `pid1.sh` is for other images. This
package is mounted read-only into the sandbox and imports nothing else of agentloop.
"""
