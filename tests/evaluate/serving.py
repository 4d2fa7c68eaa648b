"""A small OpenAI-compatible server: what it answers is up to a function."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = Callable[[dict[str, Any]], tuple[str | None, str]]
"""A request's body to (text, finish reason). A ValueError is answered with status 400."""


@contextmanager
def serve(reply: Reply, *, version: str | None = "9.9") -> Iterator[str]:
    """Answer on a port of this machine until the block ends; gives the base URL."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._send(200, {"data": [{"id": "tiny"}]})
            elif self.path == "/version" and version:
                self._send(200, {"version": version})
            else:
                self._send(404, {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                text, finish = reply(body)
            except ValueError as error:
                self._send(400, {"error": str(error)})
                return
            choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
            choice |= {"message": {"content": text}} if "messages" in body else {"text": text}
            self._send(200, {"choices": [choice], "usage": {"completion_tokens": 7}})

        def _send(self, status: int, content: Any) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
