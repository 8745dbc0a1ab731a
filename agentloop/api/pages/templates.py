"""The template environment of the pages: the reports' one, with their macros, filters and escaping."""

from __future__ import annotations

from collections.abc import Mapping

from jinja2 import ChoiceLoader, Environment, PackageLoader

from agentloop.api.pages.figures import FILTERS
from agentloop.reports.loop import environment


def page_environment(definitions: Mapping[str, str]) -> Environment:
    """Templates of `templates/`, then those of the reports. definitions: of failure types, by name."""
    templates = environment(definitions)
    templates.filters.update(FILTERS)
    reports = templates.loader
    assert reports is not None  # noqa: S101
    templates.loader = ChoiceLoader([PackageLoader("agentloop.api.pages", "templates"), reports])
    return templates
