#!/bin/sh
cat > /app/pages.py <<'PY'
"""Dividing lists into pages."""


def pages(items, size):
    """`items` in lists of `size`; the last one may be shorter. Raises ValueError for a size below 1."""
    if size < 1:
        raise ValueError(f"a page of {size} items holds nothing")
    return [items[start : start + size] for start in range(0, len(items), size)]
PY
