"""What episodes cost, against sums that were made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from agentloop_cli.main import app
from agentloop_cli.render import stdout
from store.span_rows import span
from typer.testing import CliRunner

from agentloop.config.sections import PriceSection
from agentloop.costs.totals import EpisodeCost, price, shares, spent, tabulate
from agentloop.progress import Silent
from agentloop.rollout.plan import stable_id
from agentloop.store import usage
from agentloop.store.store import Store
from agentloop.store.tables import StageRow
from agentloop.types import (
    BROKEN,
    Attempt,
    Completion,
    Episode,
    Imported,
    Message,
    Purpose,
    RewardState,
    Score,
    Step,
    StopReason,
    SubTrace,
    Task,
    Trace,
    Verdict,
)
from agentloop.views.costs import stored_costs

MINE = PriceSection(model="mine-*", input=2.0, output=10.0, cached=0.5)


def answer(n_in: int = 100, n_out: int = 10, *, model: str | None = "mine-1", **more: Any) -> Completion:
    said = Message(role="assistant", content="a")
    return Completion(
        message=said, finish_reason=more.pop("finish_reason", "stop"), model=model, n_prompt_tokens=n_in,
        n_completion_tokens=n_out, **more,
    )  # fmt: skip


def trace(*answers: Completion, task: str = "t", version: int | None = 1, duration_s: float = 1.0, k: int = 0) -> Trace:
    return Trace(
        id=stable_id(task, version, k), episode_id=stable_id("e", task, version, k), task_id=task,
        policy_version=version, messages=(Message(role="user", content="do"),), stop_reason=StopReason.submitted,
        steps=tuple(Step(index=n, completion=each) for n, each in enumerate(answers)), duration_s=duration_s,
    )  # fmt: skip


def verdict(known: Trace, reward: float | None = 1.0, *scores: Score) -> Verdict:
    state = RewardState.scored if reward is not None else RewardState.unscored
    return Verdict(trace_id=known.id, state=state, reward=reward, scores=scores)


@pytest.mark.parametrize(
    ("completion", "usd"),
    [
        (answer(), (100 * 2 + 10 * 10) / 1e6),
        (answer(n_cached_tokens=40), (60 * 2 + 40 * 0.5 + 10 * 10) / 1e6),
        (answer(cost_usd=9.0), (100 * 2 + 10 * 10) / 1e6),
        (answer(model="other", cost_usd=9.0), 9.0),
        (answer(model="other", cost_usd=0.0), 0.0),
        (answer(model="listed"), 7.0),
        (answer(model="other"), None),
        (answer(model=None), None),
        (answer(0, 0), None),
        (answer(0, 0, model=None, finish_reason="context"), 0.0),
    ],
)
def test_ones_own_prices_count_first_then_what_was_recorded_then_a_list(
    completion: Completion, usd: float | None
) -> None:
    known = price([MINE], lambda completion: 7.0 if completion.model == "listed" else None)
    assert known(completion) == (None if usd is None else pytest.approx(usd))


def test_cached_tokens_cost_what_others_do_unless_it_is_said() -> None:
    known = price([PriceSection(model="*", input=1.0, output=0.0)])
    assert known(answer(100, 5, n_cached_tokens=30)) == pytest.approx(100e-6)


def test_one_unknown_price_makes_the_sum_unknown_and_never_0() -> None:
    both = [trace(answer()), trace(answer(), answer(model="other"), k=1)]
    rows = tabulate([spent(each, verdict(each)) for each in both], "version", price([MINE]))
    assert rows["1"]["usd"] is None
    assert rows["1"]["usd_per_solved"] is None
    assert (rows["1"]["prompt_tokens"], rows["1"]["episodes"]) == (300, 2)
    alone = tabulate([spent(both[0], verdict(both[0]))], "version", price([MINE]))
    assert alone["1"]["usd"] == pytest.approx(300e-6)


def test_sub_agents_are_paid_for_and_copied_turns_were_paid_for_elsewhere() -> None:
    copied = Step(index=0, completion=answer(5000, 5000), copied=True)
    whole = trace(answer()).model_copy(update={"children": (SubTrace(trace=trace(answer(50, 0))),)})
    whole = whole.model_copy(update={"steps": (copied, *whole.steps)})
    [row] = tabulate([spent(whole, verdict(whole))], "task", price([MINE])).values()
    assert (row["prompt_tokens"], row["completion_tokens"]) == (150, 10)
    assert row["usd"] == pytest.approx(400e-6)


def test_by_version_task_and_model() -> None:
    episodes = [
        (trace(answer(), answer(1000, 0, model="mine-2"), task="a", version=1), 1.0),
        (trace(answer(), task="b", version=1), 0.0),
        (trace(answer(), task="b", version=2), 1.0),
        (trace(answer(model=None), task="c", version=None), None),
    ]
    rows = [spent(each, verdict(each, reward)) for each, reward in episodes]
    by = {name: tabulate(rows, name, price([MINE])) for name in ("version", "task", "model")}
    assert list(by["version"]) == ["1", "2", "-"]
    assert (by["version"]["1"]["episodes"], by["version"]["1"]["solved"]) == (2, 1)
    assert by["version"]["1"]["usd"] == pytest.approx(2600e-6)
    assert by["version"]["1"]["usd_per_solved"] == pytest.approx(2600e-6)
    assert by["version"]["1"]["usd_per_episode"] == pytest.approx(1300e-6)
    assert by["version"]["-"]["usd"] is None
    assert [(name, row["episodes"], row["solved"]) for name, row in by["task"].items()] == [
        ("a", 1, 1), ("b", 2, 1), ("c", 1, 0),
    ]  # fmt: skip
    assert by["model"]["mine-1"]["usd"] == pytest.approx(900e-6)
    assert by["model"]["mine-2"]["usd"] == pytest.approx(2000e-6)
    assert by["task"]["c"]["usd_per_solved"] is None, "nobody solved it"


def test_judge_models_are_told_apart() -> None:
    known = trace(answer())
    asked = Score(verifier="rubric", version="1", value=1.0, n_prompt_tokens=9, cost_usd=0.25)
    free = Score(verifier="exact", version="1", value=1.0)
    unknown = asked.model_copy(update={"cost_usd": None})
    for scores, usd in (((asked, asked, free), 0.5), ((free,), 0), ((asked, unknown), None)):
        assert spent(known, verdict(known, 1.0, *scores)).judging_usd == usd


def test_energy_is_shared_by_wall_time() -> None:
    stage = {"joules": 60.0, "gpu_s": 12.0, "validation": 0.5}
    assert shares(stage, 3, 1.0, 6.0) == {"joules": 10.0, "gpu_s": 2.0}
    assert shares({"validation": 0.5}, 3, 1.0, 6.0) == {}
    assert shares(stage, 3, 0.0, 0.0) == {"joules": 20.0, "gpu_s": 4.0}
    known, unknown = (EpisodeCost(1, "t", True, (), 0, joules=joules) for joules in (5.0, None))
    assert tabulate([known, known], "task", price([]))["t"]["joules_per_solved"] == 5.0
    assert tabulate([known, unknown], "task", price([]))["t"]["joules"] is None


# ------------------------------------------------------------------------------------- the command


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Two versions: the first solves one of two tasks, the second was measured."""
    (tmp_path / "agentloop.toml").write_text(
        '[[prices]]\nmodel = "mine-*"\ninput = 2\noutput = 10\n[project]\nsuite = "evals/x"\n'
    )
    store = Store(tmp_path / "traces" / "store.db")
    for version, rewards in ((1, (1.0, 0.0)), (2, (1.0, 1.0))):
        judged = []
        for k, reward in enumerate(rewards):
            known = trace(answer(), task=f"t{k}", version=version, duration_s=1.0 + 2 * k)
            task = Task(id=f"t{k}", instruction="do")
            episode = Episode(
                id=known.episode_id or "", task_id=task.id, group="g", purpose=Purpose.evaluate,
                policy_version=version, seed=1,
            )  # fmt: skip
            attempt = Attempt(task=task, episode=episode, trace=known, verdict=verdict(known, reward))
            judged.append(attempt)
        store.put_attempts(f"gate-v{version}.ab", judged)
        metrics = {"joules": 400.0, "gpu_s": 8.0} if version == 2 else {}
        store.put_stage(StageRow(name=f"gate-v{version}.ab", metrics=metrics))
    store.close()
    return tmp_path


def told(project: Path, *more: str) -> Any:
    done = CliRunner().invoke(app, ["costs", "-p", str(project), "--json", *more])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.slow
def test_costs_of_versions_and_of_what_was_measured(project: Path) -> None:
    rows = told(project)["rows"]
    assert rows["1"]["usd"] == pytest.approx(600e-6)
    assert rows["1"]["usd_per_solved"] == pytest.approx(600e-6)
    assert rows["2"]["usd_per_solved"] == pytest.approx(300e-6)
    assert (rows["1"]["joules"], rows["1"]["gpu_s"]) == (None, None)
    assert (rows["2"]["joules"], rows["2"]["gpu_s"], rows["2"]["joules_per_solved"]) == (400.0, 8.0, 200.0)


@pytest.mark.slow
def test_a_filter_leaves_each_episode_its_share(project: Path) -> None:
    """A quarter of the stage's wall time is a quarter of its joules, whoever else is listed."""
    found = told(project, "version:2", "--by", "task")
    assert (found["by"], found["rows"]["t0"]["joules"], found["rows"]["t1"]["joules"]) == ("task", 100.0, 300.0)
    assert told(project, "version:2", "task:t0", "--by", "task")["rows"]["t0"]["joules"] == 100.0


@pytest.mark.slow
def test_by_episode(project: Path) -> None:
    rows = told(project, "version:1", "--by", "episode")["rows"]
    assert {name: (row["episodes"], row["solved"]) for name, row in rows.items()} == {
        stable_id("e", "t0", 1, 0): (1, 1),
        stable_id("e", "t1", 1, 0): (1, 0),
    }


@pytest.mark.slow
def test_the_table_says_unknown_by_a_dash(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdout, "width", 160)
    shown = CliRunner().invoke(app, ["costs", "-p", str(project)]).stdout.splitlines()
    assert shown[0].split() == [
        "version",
        "episodes",
        "solved",
        "tokens",
        "in",
        "out",
        "USD",
        "USD",
        "per",
        "solved",
        "GPU",
        "s",
        "joules",
        "J",
        "per",
        "solved",
    ]
    assert shown[1].split() == ["v1", "2", "1", "200", "20", "0.0006", "0.0006", "-", "-", "-"]
    assert shown[2].split() == ["v2", "2", "2", "200", "20", "0.0006", "0.0003", "8.0", "400", "200"]


def test_nothing_to_show_and_nothing_there(project: Path, tmp_path: Path) -> None:
    empty = CliRunner().invoke(app, ["costs", "version:9", "-p", str(project)])
    assert (empty.exit_code, empty.stdout) == (0, "")
    assert "no trace matches" in empty.stderr


# ------------------------------------------------------------------ stored in every form, against sums by hand


def test_costs_of_stored_traces_of_every_form(either: Store) -> None:
    """An attempt with a sub-agent, a copied turn, a failed call and a judge; an imported log; a trace of spans."""
    helper = trace(answer(50, 5, model="other", cost_usd=0.5), k=7)
    own = trace(answer(100, 10, n_cached_tokens=40), answer(5000, 5000), answer(0, 0, finish_reason=BROKEN))
    copied = own.steps[1].model_copy(update={"copied": True})
    own = own.model_copy(
        update={"steps": (own.steps[0], copied, own.steps[2]), "children": (SubTrace(trace=helper, step=0),)}
    )
    rubric = Score(verifier="rubric", version="1", value=1.0, n_prompt_tokens=9, cost_usd=0.25)
    episode = Episode(
        id=own.episode_id or "", task_id="t", group="g", purpose=Purpose.evaluate, policy_version=1, seed=1
    )
    task = Task(id="t", instruction="do")
    either.put_attempts("run", [Attempt(task=task, episode=episode, trace=own, verdict=verdict(own, 1.0, rubric))])
    log = trace(answer(200, 20, model="mine-2"), task="u", version=2).model_copy(update={"source": "jsonl"})
    either.put_imported(either.project, [Imported(trace=log)])
    head = b'{"attributes": {"gen_ai.operation.name": "chat"}, "resource": {}, "scope": {}, "status": {}}'
    call = span(1, 2, model="mine-3", policy_version=3, task_id="w", parent_id=None, head=head)
    either.put_spans(either.project, [call])

    costs = list(stored_costs(either, "", either.project, Silent()))
    rows = tabulate(costs, "version", price([MINE]))

    assert [(row["episodes"], row["prompt_tokens"], row["cached_tokens"]) for row in rows.values()] == [
        (1, 100 + 50, 40), (1, 200, 0), (1, 100, 0),
    ]  # fmt: skip
    assert [row["completion_tokens"] for row in rows.values()] == [10 + 5, 20, 10]
    assert rows["1"]["usd"] == pytest.approx((60 * 2 + 40 * 0.5 + 10 * 10) / 1e6 + 0.5)
    assert rows["2"]["usd"] == pytest.approx((200 * 2 + 20 * 10) / 1e6)
    assert rows["3"]["usd"] == pytest.approx((100 * 2 + 10 * 10) / 1e6)
    assert [(row["solved"], row["judging_usd"]) for row in rows.values()] == [(1, 0.25), (0, 0), (0, 0)]
    assert sorted(each.task or "" for each in costs) == ["t", "u", "w"]


def test_the_pages_of_a_long_list_have_each_trace_once(either: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "PAGE", 2)
    for n in range(5):
        either.put_imported(either.project, [Imported(trace=trace(answer(n, 0), task=f"t{n}", k=n))])
    rows = tabulate(stored_costs(either, "", either.project, Silent()), "task", price([]))
    assert {name: row["prompt_tokens"] for name, row in rows.items()} == {f"t{n}": n for n in range(5)}
