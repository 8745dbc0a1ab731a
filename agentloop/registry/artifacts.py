"""A version's files: where its weights are, and the hash that says which they are."""

from __future__ import annotations

import hashlib
from pathlib import Path

WEIGHTS = "weights"
"""Folder of the weights within a version's own."""


def folder_hash(folder: Path) -> str:
    """SHA-256 over names and contents of the files in `folder`, in name order."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()
