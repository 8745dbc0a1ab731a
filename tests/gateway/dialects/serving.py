"""A real HTTP server that answers a POST with the bytes it was given, in pieces of an odd size."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PIECE_BYTES = 61


@contextlib.contextmanager
def answering(body: bytes, *, status: int = 200, path: str, streams: bool = False) -> Iterator[str]:
    """Its URL. Any other path is answered with 404."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            if self.path != path:
                self.send_error(404)
                return
            self.send_response(status)
            self.send_header("content-type", "text/event-stream" if streams else "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            for begin in range(0, len(body), PIECE_BYTES):
                self.wfile.write(body[begin : begin + PIECE_BYTES])
                self.wfile.flush()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
