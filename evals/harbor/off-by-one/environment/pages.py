"""Dividing lists into pages."""


def pages(items, size):
    """`items` in lists of `size`."""
    found = []
    start = 0
    while start + size <= len(items):
        found.append(items[start : start + size])
        start += size
    return found
