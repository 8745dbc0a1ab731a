"""`agentloop mine`: failed traces become regression cases, if they fail again and everything else about them holds."""

from __future__ import annotations

import asyncio
import shlex
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from agentloop.errors import ConfigError, counted
from agentloop_cli.leaves import check_types, known_types, taxonomy_of
from agentloop_cli.render import AsJson, LiveProgress, on_one_line, print_json, stderr, stdout
from agentloop_cli.stores import ProjectFolder, Tenant, Where, open_store

if TYPE_CHECKING:
    from agentloop.mining.candidates import Candidate
    from agentloop.mining.mine import Mined
    from agentloop.protocols import SandboxBackend
    from agentloop.rollout.actors import Actor
    from agentloop.store.store import Store
    from agentloop.suites.suite import Suite

LOST, NOTHING = 1, 5


def mine(
    traces: Annotated[list[str] | None, typer.Argument(help="Ids of failed traces, or how they begin.")] = None,
    policy: Annotated[
        str | None, typer.Option(help="REF of who failed; left out, the version that made each trace.")
    ] = None,
    fixed: Annotated[
        str | None, typer.Option(help="REF of who passes; left out, the live version, or the tasks' solutions.")
    ] = None,
    filter: Annotated[str, typer.Option(help="Which failures, as in `traces ls`: purpose:evaluate failure:obs.*")] = "",
    limit: Annotated[int, typer.Option("--max", min=1, help="Stop when so many were admitted.")] = 20,
    out: Annotated[
        Path | None, typer.Option(help="Folder of cases; left out, evals/regressions of the project.")
    ] = None,
    alike: Annotated[int, typer.Option(min=1, help="Cases of one kind of failure at most.")] = 3,
    keep_rejected: Annotated[Path | None, typer.Option(help="Folder for cases that were not admitted.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Only look whether offline cases still hold.")] = False,
    sandbox: Annotated[str, typer.Option(help="auto, docker or bubblewrap.")] = "auto",
    n_concurrent: Annotated[int, typer.Option(min=1, help="Episodes at once.")] = 4,
    project: ProjectFolder = Path(),
    where: Where = None,
    tenant: Tenant = None,
    as_json: AsJson = False,
) -> None:
    """Make regression cases of failed traces, and admit those that hold.

    A case must fail again with the policy that failed, pass with another, have
    verifiers that cannot be fooled, be new, and have no secret in it. Without
    ids and filter, what champions failed is taken up (evals/failed), or all
    failures where there is no such folder. REF: vN, live, FILE.toml,
    scripted:FILE.py:function, oracle.

    Exit codes: 0 some were admitted, 1 an offline case does not hold (--check),
    2 something named is wrong, 4 no box can be made, 5 nothing was admitted.
    """
    from agentloop.loop.project import REGRESSIONS

    out = out or project / REGRESSIONS
    if check:
        _check(out, as_json)
        return
    from agentloop_cli.main import make_backend

    store = open_store(where, project=project, create=False)
    try:
        check_types(filter, known_types(project, store))
        ids = _ids(store, traces or (), filter, project, tenant)
        backend = make_backend(sandbox, "--sandbox")
        work = _Work(project, store, out, backend, policy, fixed, alike, n_concurrent, keep_rejected)
        with LiveProgress() as progress, _kept(work, as_json):
            progress.start("mine: cases admitted", limit)
            asyncio.run(work.run(filter, ids, bool(traces), tenant, limit, lambda mined: _tell(progress, mined)))
    finally:
        store.close()
    if not any(mined.folder for mined in work.done):
        raise typer.Exit(NOTHING)


@dataclass
class _Work:
    """One run of the command."""

    project: Path
    store: Store
    out: Path
    backend: SandboxBackend
    policy: str | None
    fixed: str | None
    alike: int
    n_concurrent: int
    keep_rejected: Path | None
    done: list[Mined] = field(default_factory=list)
    trained: frozenset[str] = frozenset()
    """Ids of the train tasks."""
    n_passed_over: int = 0
    """Failed traces whose kind has cases enough."""

    async def run(
        self,
        filter: str,
        ids: Sequence[str],
        named: bool,
        tenant: str | None,
        limit: int,
        tell: Callable[[Mined], None],
    ) -> None:
        from agentloop.config.settings import known_secrets
        from agentloop.mining.candidates import Signatures, candidates
        from agentloop.mining.case import read_cases
        from agentloop.mining.mine import Mine
        from agentloop.types import Split

        suite = _suite(self.project)
        tasks = {task.id: task for task in suite.tasks} if suite else {}
        self.trained = frozenset(task.id for task in tasks.values() if task.split is Split.train)
        signatures = Signatures(read_cases(self.out), self.alike)
        found = candidates(self.store, tasks, signatures, filter=filter, ids=ids, every=named, project=tenant)
        failing, passing = self._actors(suite)
        mining = Mine(
            self.out,
            self.store,
            self.backend,
            failing,
            passing,
            signatures,
            suite=suite.name if suite else "",
            tenant=tenant,
            secrets=known_secrets(self.project),
            taxonomy=taxonomy_of(self.project),
            n_concurrent=self.n_concurrent,
            keep_rejected=self.keep_rejected,
        )
        async for mined in mining.mine(found, limit=limit):
            self.done.append(mined)
            tell(mined)
        self.n_passed_over = signatures.n_passed_over

    def _actors(
        self, suite: Suite | None
    ) -> tuple[Callable[[Candidate], Actor | None], Callable[[Candidate], Actor | None]]:
        """Who failed, and who passes now, of a candidate; each is loaded once."""
        from agentloop.loop.refs import resolve
        from agentloop.registry.versions import Registry

        live = Registry(self.store).live()

        @cache
        def acting(ref: str) -> Actor:
            tasks, name = (suite.tasks, suite.name) if suite else ((), "")
            return resolve(ref, self.project, tasks, name)

        def failing(candidate: Candidate) -> Actor | None:
            version = candidate.trace.policy_version if candidate.imported is None else None
            ref = self.policy or (f"v{version}" if version else None)
            return acting(ref) if ref else None

        def passing(candidate: Candidate) -> Actor | None:
            if self.fixed:
                return acting(self.fixed)
            failed = self.policy is None and live is not None and candidate.trace.policy_version == live.number
            return (
                None
                if live is None or failed or self.policy in ("live", f"v{live.number}")
                else acting(f"v{live.number}")
            )

        return failing, passing


@contextmanager
def _kept(work: _Work, as_json: bool) -> Iterator[None]:
    """What was done is told also when the work was interrupted."""
    try:
        yield
    finally:
        if as_json:
            print_json(_document(work.done, work.out))
        else:
            _print(work)
        if not work.done:
            stderr.print(
                f"nothing was tried: no scored failure that is no case yet ({work.n_passed_over:,} are like those that "
                "there are); `agentloop judge again` tells what imported traces are worth"
            )


def _ids(store: Store, named: Sequence[str], filter: str, project: Path, tenant: str | None) -> list[str]:
    """Whole ids of the traces that are named, or else of what champions failed; none is all."""
    from agentloop.loop.project import FAILED
    from agentloop.mining.failed import read_failed

    if named:
        return [store.named(prefix, project=tenant).id for prefix in named]
    return [] if filter else [failed.trace_id for failed in read_failed(project / FAILED)]


def _suite(project: Path) -> Suite | None:
    """The project's; None in a folder that is no project, where traces are all there is."""
    from agentloop.config.settings import CONFIG_FILE, load_config, suite_folder
    from agentloop.suites.suite import load_suite

    if not (project / CONFIG_FILE).is_file():
        return None
    config = load_config(project)
    return load_suite(suite_folder(project, config)) if config.project.suite else None


def _tell(progress: LiveProgress, mined: Mined) -> None:
    if mined.folder is not None:
        progress.advance()
        stderr.print(Text(f"admitted {mined.case.id} ({mined.case.kind}, {mined.seconds:.1f} s)"))
    else:
        stderr.print(Text(on_one_line(f"  not {mined.case.id}: {mined.why}"), style="dim"))


def _document(done: Sequence[Mined], out: Path) -> dict[str, Any]:
    return {
        "out": str(out),
        "n_admitted": sum(mined.folder is not None for mined in done),
        "n_rejected": sum(mined.folder is None for mined in done),
        "cases": [mined.document() for mined in done],
    }


def _print(work: _Work) -> None:
    done, out = work.done, work.out
    admitted = [mined for mined in done if mined.folder is not None]
    for mined in admitted:
        stdout.print(Text(mined.case.id, style="bold"), Text(f" {mined.case.kind}  {mined.case.failure}", style="red"))
        stdout.print(Text(f"    {on_one_line(mined.case.sentence)}"), soft_wrap=True)
        for check in mined.checks:
            stdout.print(Text(f"    {check.name:<11} {on_one_line(check.why)}", style="dim"), soft_wrap=True)
    why = Counter(check.name for mined in done for check in mined.checks if check.passed is False)
    told = ", ".join(f"{name} {n}" for name, n in why.most_common())
    n_rejected = len(done) - len(admitted)
    rejected = f"; {n_rejected} not admitted ({told})" if n_rejected else ""
    stdout.print(Text(f"{counted(len(admitted), 'case')} admitted to {out}{rejected}"), soft_wrap=True)
    for line in _next(work, admitted) if admitted else _nothing(work) if done else ():
        stdout.print(Text(line), soft_wrap=True)


def _next(work: _Work, admitted: Sequence[Mined]) -> Iterator[str]:
    """What a person does with new cases."""
    cases, project = (
        shlex.quote(str(work.out)),
        "" if work.project == Path() else f" -p {shlex.quote(str(work.project))}",
    )
    n_trained = len({mined.case.task for mined in admitted} & work.trained)
    if n_trained:
        yield f"{counted(n_trained, 'train task')} among them, left out of training from now on"
    yield "next, when you have read each case.toml and evidence.json:"
    passed = next((m.checks[3].numbers.get("policy") for m in admitted if m.case.kind != "offline"), None)
    if passed is not None:
        ref = shlex.quote("oracle" if passed == "solution" else str(passed))
        yield f"  agentloop bank {cases} --policy {ref} --as main{project}"
        yield f"  agentloop gate {cases} --baseline main --candidate REF{project}"
    if any(mined.case.kind == "offline" for mined in admitted):
        yield f"  agentloop mine --check --out {cases}"
    if _is_ignored(work.out):
        yield f"  git leaves {cases} out here (.gitignore): keep that folder, or name another with --out"
    else:
        yield f"  git status {cases}, then git add {cases} && git commit"


def _is_ignored(folder: Path) -> bool:
    """Whether git would not take it; where there is no git, there is nobody to refuse it."""
    try:
        asked = ("git", "-C", str(folder), "check-ignore", "-q", ".")
        return subprocess.run(asked, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def _nothing(work: _Work) -> Iterator[str]:
    if work.keep_rejected:
        yield f"what was tried is in {work.keep_rejected}, with its evidence"
    else:
        yield "nothing to commit; --keep-rejected DIR keeps what was tried, with its evidence"


def _check(out: Path, as_json: bool) -> None:
    from agentloop.mining.offline import recheck

    if not out.is_dir():
        raise ConfigError(f"no cases in {out}; name their folder with --out, or make some with `agentloop mine`")
    found = recheck(out)
    if as_json:
        print_json({"out": str(out), "cases": found})
    else:
        for name, lost in found.items():
            stdout.print(Text(f"{name}: {lost or 'holds'}", style="red" if lost else ""), soft_wrap=True)
        if not found:
            stdout.print("no offline cases to check")
    if any(found.values()):
        raise typer.Exit(LOST)
