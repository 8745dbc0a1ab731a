"""Prints `ok`, or the first thing that is wrong with service.json."""

import json
import pathlib
import sys

LEVELS = ("debug", "info", "warning", "error")


def problem(text):
    try:
        config = json.loads(text)
    except ValueError as error:
        return f"not JSON: {error}"
    if not isinstance(config.get("listen", {}).get("port"), int):
        return "listen.port must be a number"
    if config.get("log", {}).get("level") not in LEVELS:
        return f"log.level must be one of {', '.join(LEVELS)}"
    if not str(config.get("root", "")).startswith("/") or config["root"].endswith("/"):
        return "root must be an absolute path without a slash at its end"
    if not config.get("max_clients"):
        return "max_clients must be above 0"
    for upstream in config.get("upstreams", []):
        if not upstream.rpartition(":")[2].isdigit() or ":" not in upstream:
            return f"upstream {upstream} has no port"
    return None


if __name__ == "__main__":
    found = problem(pathlib.Path("/app/service.json").read_text())
    print(found or "ok")
    sys.exit(bool(found))
