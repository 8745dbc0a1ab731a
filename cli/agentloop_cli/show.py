"""`agentloop traces show`: one trace, whatever it came as."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from agentloop.errors import counted
from agentloop.printable import clean, on_one_line
from agentloop_cli.render import AsJson, print_block, print_json, stdout
from agentloop_cli.stores import ProjectFolder, Tenant, Where, opened_store
from agentloop_cli.traces import GAP

if TYPE_CHECKING:
    from agentloop.otel.stored_trace import StoredTrace
    from agentloop.store.tables import TraceSummary
    from agentloop.types import Failure, Step, SubTrace, ToolCall, Trace, Verdict

NO_MARGIN = Text()
OURS = "agentloop"
ENDS = {"submitted": "ended by itself", "no_tool_call": "ended without a further call", "unknown": "ended"}
"""What a stop reason says of a run that handed nothing in."""
MAX_LAST = 300
"""Characters of the last words."""
INDENT = "    "
"""Of a sub-agent's run within its parent's."""


def show_trace(
    trace_id: Annotated[str, typer.Argument(help="The id, or a unique beginning of it.")],
    project: ProjectFolder = Path(),
    where: Where = None,
    tenant: Tenant = None,
    as_json: AsJson = False,
) -> None:
    """Show one trace: the task, every step, and why it failed."""
    from agentloop.formats.jsonl import document
    from agentloop.otel.stored_trace import StoredTrace

    with opened_store(where, project=project) as store:
        stored = StoredTrace(store, store.named(trace_id, project=tenant))
        trace, verdict = stored.trace, stored.verdict
    if as_json:
        print_json(document(stored))
    else:
        _print(stored, trace, verdict)


def _print(stored: StoredTrace, trace: Trace, verdict: Verdict) -> None:
    print_block(NO_MARGIN, Text(trace.id, style="bold"))
    for facts in _facts(stored.row, trace):
        if facts:
            print_block(NO_MARGIN, Text(on_one_line(facts)))
    stdout.print()
    _print_run(trace, verdict.failures, NO_MARGIN)
    stdout.print()
    _print_end(trace, verdict)
    if stored.raw:
        print_block(
            Text(INDENT), Text(f"{counted(len(stored.raw), 'field')} of its source kept raw: --json shows them")
        )


def _facts(row: TraceSummary, trace: Trace) -> tuple[str, str]:
    """Whose it is and how long it took; when it was and what it used, of one that others told us of."""
    version = None if trace.policy_version is None else f"policy v{trace.policy_version}"
    episode = None if row.stage or trace.episode_id is None else f"episode {trace.episode_id}"
    stage = row.stage or (f"superseded in {row.superseded}" if row.superseded else trace.source)
    first = (trace.task_id, episode, version, stage, trace.isolation, f"{trace.duration_s:.2f} s")
    used = (
        f"{row.n_prompt_tokens:,} + {row.n_completion_tokens:,} tokens",
        row.n_prompt_tokens + row.n_completion_tokens,
    )
    second = (
        None if trace.agent is None else f"agent {trace.agent}",
        None if row.model is None else f"model {row.model}",
        None if trace.session is None else f"session {trace.session}",
        None if trace.started_at is None or row.stage else f"{trace.started_at:%Y-%m-%d %H:%M:%S} UTC",
        used[0] if used[1] else None,
        None if row.cost_usd is None else f"${row.cost_usd:.4g}",
        counted(row.n_spans, "span") if row.n_spans else None,
    )
    return GAP.join(filter(None, first)), GAP.join(filter(None, second))


def _print_run(trace: Trace, failures: Sequence[Failure], margin: Text) -> None:
    for message in trace.messages:
        print_block(margin + Text(f"{message.role}  ", style="dim"), Text(clean(message.content)))
    if trace.steps:
        stdout.print()
    below = {step.index: [child for child in trace.children if child.step == step.index] for step in trace.steps}
    for step in trace.steps:
        _print_step(step, [f for f in failures if f.step == step.index], margin)
        for child in below[step.index]:
            _print_child(child, margin)
    for child in trace.children:
        if child.step not in below:
            _print_child(child, margin)


def _print_child(child: SubTrace, margin: Text) -> None:
    margin = margin + Text(INDENT)
    name = child.trace.agent or child.trace.id
    print_block(margin, Text.assemble(("sub-agent ", "dim"), (on_one_line(name), "bold cyan")))
    _print_run(child.trace, (), margin)
    end = child.trace.error or child.trace.answer
    if end is not None:
        style = "red" if child.trace.error else ""
        print_block(margin, Text.assemble(("gave back ", "dim"), (repr(clean(end)), style)))


def _print_step(step: Step, failures: list[Failure], margin: Text) -> None:
    reply = step.completion.message
    lead = margin + Text(f"{step.index:>3} ", style="dim")
    for message in step.heard:
        print_block(margin + Text(f"{message.role}  ", style="dim"), Text(clean(message.content)))
    if reply.reasoning:
        print_block(lead, Text(clean(reply.reasoning), style="dim italic"))
    if reply.content:
        print_block(lead, Text(clean(reply.content)))
    for call in reply.tool_calls:
        name = (on_one_line(call.name or "(no tool)"), "bold cyan")
        print_block(lead, Text.assemble(name, " ", clean(_arguments(call))))
    if step.is_broken:
        there = reply.content or reply.reasoning or reply.tool_calls
        print_block(lead, Text("the answer ended here" if there else "no answer came", style="red"))
    for result in step.results:
        bar = margin + Text("  │ ", style="dim")
        print_block(bar, Text(clean(result.content.rstrip("\n")), style="" if result.ok else "red"), hang=bar)
    for failure in failures:
        _print_failure(failure)


def _arguments(call: ToolCall) -> str:
    """The command or the answer; of a call that cannot be made, the arguments as they were written."""
    from agentloop.agents.tools.shell import argument

    value, why_not = argument(call)
    return value if why_not is None else call.arguments


def _print_failure(failure: Failure) -> None:
    lead = Text("  ✗ ", style="bold red") if failure.critical else Text("  · ", style="yellow")
    quote = f" “{clean(failure.evidence)}” "
    print_block(lead, Text.assemble((failure.type, "red"), quote, (failure.detector, "dim")))


def _ended(trace: Trace) -> str:
    """How it did; of one from elsewhere no more than it says, as few agents submit anything."""
    if trace.answer is not None:
        return f"submitted {clean(trace.answer)!r}"
    why = trace.stop_reason.replace("_", " ")
    if trace.source == OURS:
        return f"submitted nothing ({why})"
    return ENDS.get(trace.stop_reason, f"ended: {why}")


def _last_words(trace: Trace) -> str:
    contents = (step.completion.message.content.strip() for step in reversed(trace.answered))
    words = next(filter(None, contents), "")
    return words if len(words) <= MAX_LAST else f"…{words[-MAX_LAST:]}"


def _print_end(trace: Trace, verdict: Verdict) -> None:
    """What came of it: the answer and its reward, every verifier's word, and what was wrong with the whole."""
    reward = f"no reward: {verdict.state}" if verdict.reward is None else f"reward {verdict.reward:g}"
    colour = "green" if verdict.reward == 1.0 else "red"
    print_block(NO_MARGIN, Text.assemble(f"{_ended(trace)}, ", (reward.replace("_", " "), colour)))
    if trace.answer is None and (words := _last_words(trace)):
        print_block(Text(INDENT), Text(f"its last words: {clean(words)!r}"))  # above they may be far away
    for score in verdict.scores:
        gave = f"gave no number: {score.error}" if score.value is None else f"gave {score.value:g}"
        if score.value is not None and score.value < 1 and score.why:
            gave += f": {score.why}"
        who = f" ({score.source})" if score.source else ""
        style = "red" if score.value is None else ""
        print_block(Text(INDENT), Text(clean(f"verifier {score.verifier} {gave}{who}"), style=style))
    steps = {step.index for step in trace.steps}
    for failure in verdict.failures:
        if failure.step not in steps:
            _print_failure(failure)
    if trace.error and all(failure.evidence != trace.error for failure in verdict.failures):
        print_block(Text(INDENT), Text(clean(trace.error), style="red"))
