"""Whatever workers, askers and people do, in any order: units move as their table says, and have their effects once."""

from __future__ import annotations

from collections import Counter
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentloop.store.claims import MAX_DEATHS, Claimed, Claims, Effect, Finished, HandBack, Returned
from agentloop.store.store import Store
from agentloop.types import Unit, UnitState
from agentloop.types.unit import UNIT_MOVES

from .test_units import card, pass_time

KEYS = ("a", "b")
MAX_LOST = 2
_folder = TemporaryDirectory()
_numbers = count()


class Moves(RuleBasedStateMachine):
    """Two workers, two keys, one run; the store keeps the projects of all examples."""

    @initialize()
    def begin(self) -> None:
        self.project = f"p{next(_numbers)}"
        self.store = Store(Path(_folder.name) / "store.db", project=self.project)
        self.run = self.store.begin_run("loop", "loop").number
        self.workers = [self.worker(n) for n in range(2)]
        self.hands: list[list[Claimed]] = [[], []]
        self.before: dict[str, UnitState] = {}
        self.n_counted: Counter[str] = Counter()
        self.ask(set(KEYS), again=False)

    def worker(self, n: int) -> Claims:
        made = self.store.claims(card(f"{self.project}-{n}", projects=(self.project,)), max_lost=MAX_LOST)
        made.begin()
        return made

    def teardown(self) -> None:
        if hasattr(self, "store"):
            for worker in self.workers:
                worker.end()
            self.store.close()

    @rule(keys=st.sets(st.sampled_from(KEYS), min_size=1), again=st.booleans())
    def ask(self, keys: set[str], again: bool) -> None:
        self.store.put_units(self.run, [Unit(key=key, kind="rollout") for key in sorted(keys)], again=again)

    @rule(n=st.integers(0, 1), k=st.integers(1, 2))
    def claim(self, n: int, k: int) -> None:
        claimed = self.workers[n].claim(k)
        assert len(claimed) <= k
        self.hands[n] += claimed

    @precondition(lambda self: any(self.hands))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        n = data.draw(st.sampled_from([n for n in range(2) if self.hands[n]]))
        chosen = data.draw(st.lists(st.sampled_from(self.hands[n]), min_size=1, unique_by=lambda one: one.number))
        finished = []
        for one in chosen:
            effect = Unit(key=f"effect-{one.unit.key}-{one.epoch}-{n}", kind="effect")
            finished.append(Finished(one, Effect(units=(effect,))))
        epochs = {one.unit.key: self.store.unit(one.unit.key).epoch for one in chosen}
        for one, counts in zip(chosen, self.workers[n].finish(finished), strict=True):
            self.n_counted[one.unit.key] += counts
            assert not counts or epochs[one.unit.key] == one.epoch, "another worker has it by now"

    @precondition(lambda self: any(self.hands))
    @rule(data=st.data(), why=st.sampled_from(HandBack))
    def hand_back(self, data: st.DataObject, why: HandBack) -> None:
        n = data.draw(st.sampled_from([n for n in range(2) if self.hands[n]]))
        one = data.draw(st.sampled_from(self.hands[n]))
        self.workers[n].hand_back([Returned(one, why, "it failed")])
        self.hands[n].remove(one)

    @rule(alive=st.sampled_from([{0}, {1}, {0, 1}]))
    def pass_time(self, alive: set[int]) -> None:
        """The workers that are alive give their heartbeat afterwards. One of them takes a unit of the dead."""
        pass_time(self.store, 20)
        for n in alive:
            lost = self.workers[n].beat(self.hands[n]).lost
            self.hands[n] = [one for one in self.hands[n] if one.number not in lost]
        n = min(alive)
        if self.workers[n].reap():
            self.hands[n] += self.workers[n].claim(1)

    @rule(keys=st.sets(st.sampled_from(KEYS)))
    def cancel(self, keys: set[str]) -> None:
        self.store.cancel_units(keys)

    @precondition(lambda self: UnitState.dead in self.before.values())
    @rule()
    def retry(self) -> None:
        self.store.retry_unit(next(key for key in KEYS if self.before.get(key) is UnitState.dead))

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "store"):
            return
        found = [unit for state in UnitState for unit in self.store.units(self.run, state=state)]
        effects = Counter(unit.key.split("-")[1] for unit in found if unit.kind == "effect")
        for unit in found:
            if unit.kind == "effect":
                continue
            before = self.before.get(unit.key, UnitState.ready)
            assert unit.state is before or unit.state in UNIT_MOVES[before], f"{before} became {unit.state}"
            self.before[unit.key] = unit.state
            is_done = unit.state is UnitState.done
            assert effects[unit.key] == self.n_counted[unit.key] == is_done, unit
            assert unit.n_deaths <= MAX_DEATHS
            assert unit.n_lost <= MAX_LOST


Moves.TestCase.settings = settings(settings.default, stateful_step_count=30, deadline=None)
TestMoves = Moves.TestCase
