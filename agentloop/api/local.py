"""The token with which this machine's user can judge without a key: a file that only this user can read.

It protects against other users and agents in sandboxes, which cannot read the file. It does not protect against a
program of the same user outside a sandbox, which can read both this file and the store.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
from pathlib import Path

TOKEN = re.compile(r"al_local_[A-Za-z0-9_-]{43}")


def token_file(store: Path) -> Path:
    """The token's file, next to the store: `traces/store.token` for `traces/store.db`."""
    return store.with_suffix(".token")


def rotate(path: Path) -> None:
    """Create or replace the token. Raises OSError."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    # A killed process with the same id may have left one.
    draft.unlink(missing_ok=True)
    # Created with this mode: after a later chmod, others could have opened the file in between.
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"al_local_{secrets.token_urlsafe(32)}\n")
    draft.replace(path)


class LocalToken:
    """The token in `path`; creates the file if it is missing. Raises OSError on failure."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            rotate(path)
        path.chmod(0o600)

    def matches(self, words: str) -> bool:
        """Whether `words` equal the token in the file; the file is read each time, so a new token is valid at once."""
        try:
            token = self.path.read_text().strip()
        except (OSError, UnicodeDecodeError):
            return False
        return bool(TOKEN.fullmatch(token)) and hmac.compare_digest(words.encode(), token.encode())
