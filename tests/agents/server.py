"""An MCP server in plain Python, run in a sandbox, that does wrong what it is told to: `python3 server.py HOW`."""

import json
import sys
import time

HOW = sys.argv[1] if len(sys.argv) > 1 else ""
TOOLS = [
    "echo",
    "fail",
    "picture",
    "die",
    "hang",
    "garbage",
    "giant",
    "sample",
    "ask",
    "noisy",
    "grow",
    "odd name.é" + "x" * 60,
]
TYPED = {"type": "object", "properties": {"text": {"type": "string"}, "n": {"type": "integer"}}, "required": ["text"]}


def send(**message):
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def tool(name):
    schema = TYPED if name == "echo" else {"type": "object"}
    return {
        "name": name,
        "description": f"does {name}",
        "inputSchema": schema,
        "annotations": {"readOnlyHint": name == "echo"},
    }


def text(words, **more):
    return {"content": [{"type": "text", "text": words}], **more}


def called(ident, name, given):
    if name == "echo":
        return text(given["text"])
    if name == "fail":
        return text("it did not work", isError=True)
    if name == "picture":
        blocks = [
            {"type": "text", "text": "look:"},
            {"type": "image", "data": "AAAAAAAA", "mimeType": "image/png"},
            {"type": "resource_link", "uri": "file:///a", "name": "a"},
            {"type": "resource", "resource": {"uri": "file:///b", "text": "within"}},
            {"type": "resource", "resource": {"uri": "file:///c", "blob": "AAAA", "mimeType": "x/y"}},
        ]
        return {"content": blocks}
    if name == "die":
        sys.stderr.write("out of luck\n")
        sys.exit(3)
    if name == "hang":
        time.sleep(600)
    if name == "garbage":
        for line in (
            b"Traceback: no JSON\n",
            b"{}\n",
            b"[1, 2]\n",
            b"\xff\xfe\n",
            b'{"jsonrpc": "2.0", "id": 999, "result": {}}\n',
            b"\n",
        ):
            sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
        return text("after all that")
    if name == "giant":
        for _ in range(6 << 4):
            sys.stdout.write("x" * (1 << 16))
        sys.stdout.flush()
        return text("never")
    if name in ("sample", "ask"):
        params = {"messages": [{"role": "user", "content": {"type": "text", "text": "?"}}], "maxTokens": 9}
        method, given = (
            ("sampling/createMessage", params)
            if name == "sample"
            else ("elicitation/create", {"message": "?", "requestedSchema": {"type": "object", "properties": {}}})
        )
        send(id="mine", method=method, params=given)
        while (answer := json.loads(sys.stdin.readline())).get("id") != "mine":
            pass
        return text("refused: " + str("error" in answer))
    if name == "noisy":
        for n in range(3):
            send(method="notifications/message", params={"level": "error", "data": "log"})
            send(method="notifications/progress", params={"progressToken": "nobody's", "progress": n})
            send(method="notifications/unheard_of", params={})
        return text("quiet")
    if name == "grow":
        TOOLS.append("grown")
        send(method="notifications/tools/list_changed")
        return text("one more")
    return text("called " + name)


if HOW == "silent":
    time.sleep(600)
if HOW == "crash":
    sys.exit("no such database")
for line in sys.stdin:
    asked = json.loads(line)
    ident, method, params = asked.get("id"), asked["method"], asked.get("params") or {}
    if ident is None:
        continue
    if method == "initialize":
        capabilities = {"tools": {"listChanged": True}}
        send(
            id=ident,
            result={
                "protocolVersion": params["protocolVersion"],
                "capabilities": capabilities,
                "serverInfo": {"name": "x", "version": "1"},
            },
        )
    elif method == "tools/list" and HOW == "listless":
        send(id=ident, error={"code": -32603, "message": "no list today"})
    elif method == "tools/list":  # a page each two
        at = int(params.get("cursor") or 0)
        page = {"tools": [tool(name) for name in TOOLS[at : at + 2]]}
        send(id=ident, result={**page, "nextCursor": str(at + 2)} if at + 2 < len(TOOLS) else page)
    elif method == "tools/call":
        send(id=ident, result=called(ident, params["name"], params.get("arguments") or {}))
    else:
        send(id=ident, error={"code": -32601, "message": f"no method {method}"})
