"""Exports stored traces as training rows for other trainers, one JSON object per line.

    {"input_ids": [...], "assistant_masks": [...], "logprobs": [...], "temperature": 1.0, "advantages": null,
     "reward": 1.0, "reward_state": "scored", "verdict": "...", "group": "...", "trajectory": "...", "task": "...",
     "pool": "...", "turns": [{...}]}

TRL's SFTTrainer reads the first two names. `logprobs` are the sampler's, 0 where the mask is 0. Rows of a trajectory
share its reward, the state of that reward, and the hash of its verdict; a group is one task under one version.
Advantages depend on the algorithm, so they are null unless they were computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import orjson

from agentloop.errors import ConfigError, extra
from agentloop.protocols import ExportedTrace
from agentloop.types import Judged, Split, Trace

if TYPE_CHECKING:
    from agentloop.train.data.row import Row

REFUSED = {Split.heldout: "held_out", Split.validation: "validation"}
"""Splits that never train -> the reason."""


class RowLines:
    """An Exporter. Needs the extra `train`. Also an `abilities.CountsExcluded` and an `abilities.WithholdsTasks`."""

    name = "rows"
    suffix = ".rows"
    media_type = "application/x-ndjson"
    one_each = False

    def __init__(self) -> None:
        """Raises ConfigError if numpy is not installed."""
        try:
            from agentloop.train.data.admission import Admission
            from agentloop.train.data.chains import rows_of
        except ImportError as error:
            raise ConfigError(f"rows need numpy; {extra('train')}") from error
        self._admission = Admission(reward=False)
        self._rows_of = rows_of
        self._is_held_out: Callable[[Trace], bool] = lambda trace: False
        self.excluded: Counter[str] = Counter()

    def withhold(self, is_held_out: Callable[[Trace], bool]) -> None:
        """See `abilities.WithholdsTasks`."""
        self._is_held_out = is_held_out

    def write(self, traces: Iterable[ExportedTrace]) -> Iterator[bytes]:
        """See `Exporter`."""
        for stored in traces:
            facts = stored.facts
            if facts["split"] in REFUSED:
                self.excluded[REFUSED[facts["split"]]] += 1
                continue
            if facts["split"] is None and self._is_held_out(stored.trace):
                self.excluded[REFUSED[Split.heldout]] += 1
                continue
            # Attempts of two versions at one task are not compared with each other.
            group = f"{facts['group']}/v{facts['policy_version']}" if facts["group"] else None
            judged = Judged(stored.trace, stored.verdict, None, group, facts["pool"] or "")
            cut = self._rows_of(judged, self._admission)
            self.excluded.update(cut.excluded)
            for row in cut.rows:
                yield orjson.dumps(document(row), option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"


def document(row: Row) -> dict[str, Any]:
    """The object of one line."""
    return {
        "input_ids": row.token_ids,
        "assistant_masks": row.action_mask.astype("uint8"),
        "logprobs": row.logprobs,
        "temperature": row.temperature,
        "advantages": row.advantages,
        "reward": row.reward,
        "reward_state": row.reward_state,
        "verdict": row.verdict,
        "group": row.group,
        "trajectory": row.trajectory,
        "task": row.task,
        "pool": row.pool,
        "turns": [turn._asdict() for turn in row.turns],
    }
