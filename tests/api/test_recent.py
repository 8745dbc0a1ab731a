"""Views that pages keep for a few seconds."""

from __future__ import annotations

from itertools import count

from agentloop.api.pages import recent
from agentloop.api.pages.recent import RecentViews


def test_a_view_is_built_again_when_its_stamp_changes_or_it_is_old() -> None:
    now = [0.0]
    views: RecentViews[int] = RecentViews(10.0, lambda: now[0])
    build = count(1).__next__
    assert views.peek("a", 1) is None
    assert [views.get("a", 1, build), views.get("a", 1, build), views.peek("a", 1)] == [1, 1, 1]
    assert [views.get("b", 1, build), views.get("a", 2, build)] == [2, 3]
    now[0] = 10.0
    assert views.peek("a", 2) is None
    assert views.get("a", 2, build) == 4


def test_only_so_many_views_are_in_memory() -> None:
    views: RecentViews[int] = RecentViews()
    for n in range(recent.MAX_VIEWS + 1):
        views.get(n, 0, lambda: 1)
    assert views.peek(0, 0) is None
    assert views.peek(recent.MAX_VIEWS, 0) == 1
