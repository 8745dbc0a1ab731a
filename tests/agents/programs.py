"""Agent programs for sandboxes, and what they need there."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from tempfile import mkdtemp

from parts import lacking

ASK = """
import json, os, sys, urllib.error, urllib.request

def ask(messages, base=os.environ["OPENAI_BASE_URL"], **more):
    body = json.dumps({"model": "whatever", "messages": messages, **more}).encode()
    request = urllib.request.Request(base + "/chat/completions", body, {"content-type": "application/json"})
    try:
        return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        return {"status": error.code, **json.load(error)}

def user(text):
    return {"role": "user", "content": text}

task = os.environ["AGENTLOOP_INSTRUCTION"]
"""
"""What a program begins with that has nothing but Python."""


def program(folder: Path, text: str, begin: str = ASK) -> Path:
    """A folder with `run.py`."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    (folder / "run.py").write_text(begin + text)
    return folder


def packages(folder: Path, *names: str) -> Path:
    """What is installed here under these names, with all that it needs, in a folder; skips where one is missing."""
    todo, seen = list(names), set[str]()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = distribution(name)
        except PackageNotFoundError:
            if name in names:
                lacking(f"{name} not installed. Remedy: pip install '.[dev]'")
            continue
        for file in found.files or ():
            if ".." not in file.parts and "__pycache__" not in file.parts and (source := Path(file.locate())).is_file():
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, folder / file)
        for needed in found.requires or ():
            if "extra ==" not in needed:
                todo.append(re.split(r"[^A-Za-z0-9._-]", needed)[0])
    return folder


MINI = Path(__file__).with_name("mini-swe-agent.txt")


def installed(requirements: Path) -> Path:
    """A folder with exactly these packages; kept in the environment that runs the tests, until they are others."""
    name, digest = requirements.stem, hashlib.sha256(requirements.read_bytes()).hexdigest()[:8]
    folder = Path(sys.prefix, "environments", f"{name}-{digest}")
    if not folder.exists():
        # Made beside its place and moved there whole: two workers may want it at once.
        folder.parent.mkdir(exist_ok=True)
        made = Path(mkdtemp(dir=folder.parent))
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(made)]
        done = subprocess.run([*pip, "-r", requirements], capture_output=True, text=True, check=False, timeout=500)
        try:
            if done.returncode != 0:
                lacking(f"{name} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
            made.chmod(0o755)
            made.rename(folder)
        except OSError:
            assert folder.exists()  # the other worker's
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder
