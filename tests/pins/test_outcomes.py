"""`gate --replay` decides 50 stored outcome files as it did; see `outcomes.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from .compare import assert_same, read
from .outcome_files import OutcomeFile
from .outcomes import PIN, PYTHON, replay, stored_files

FILES = dict(stored_files())
PINS = read(PIN)


@pytest.mark.parametrize("name", PINS)
def test_a_stored_outcome_file_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    pin = PINS[name]
    one = OutcomeFile(name, FILES[name], tuple(pin["options"]))
    actual = replay(tmp_path, one, html=pin["html"])
    if PYTHON not in pin.get("sha256", {}):  # recorded by another version of Python: the last bits may differ
        actual.pop("sha256", None)
        pin = {key: value for key, value in pin.items() if key != "sha256"}
    assert_same(pin, actual, f"gate --replay {name}.jsonl {' '.join(pin['options'])}")


def test_there_are_50_files_and_every_verdict_among_them() -> None:
    assert FILES.keys() == PINS.keys()
    assert len(FILES) == 50
    verdicts = [each["document"]["verdict"] for each in PINS.values() if "document" in each]
    n_of_each = {verdict: verdicts.count(verdict) for verdict in {*verdicts}}
    assert n_of_each.keys() == {"PASS", "FAIL", "INCONCLUSIVE", "INFRA"}
    assert min(n_of_each.values()) >= 5
    assert {each["exit_code"] for each in PINS.values()} == {0, 1, 2, 3, 4, 5}
