"""Task folders in the Harbor format, as small as they can be."""

from __future__ import annotations

from pathlib import Path

PASS = "#!/bin/sh\n[ -f /app/done ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"
SOLVE = "#!/bin/sh\nmkdir -p /app\ntouch /app/done\n"


def make_task(folder: Path, *, toml: str, test: str = PASS, solve: str = SOLVE, image: Path | None = None) -> Path:
    """A task that is done when /app/done is there; `image` is a root folder in place of a Dockerfile."""
    for name in ("environment", "tests", "solution"):
        (folder / name).mkdir(parents=True)
    (folder / "environment" / "Dockerfile").write_text("FROM scratch\n")
    (folder / "instruction.md").write_text("Do it.\n")
    (folder / "tests" / "test.sh").write_text(test)
    (folder / "solution" / "solve.sh").write_text(solve)
    head = f'[environment]\ndocker_image = "{image}"\nnetwork_mode = "no-network"\n' if image else ""
    (folder / "task.toml").write_text(head + toml)
    return folder
