"""Every test here has the package of research formats installed, and its modules import it when they are collected."""

from __future__ import annotations

import sys

import pytest
from outside import RESEARCH_FORMATS

sys.path.append(str(RESEARCH_FORMATS))


@pytest.fixture(autouse=True)
def installed(research_formats: None) -> None:
    """See `research_formats`."""
