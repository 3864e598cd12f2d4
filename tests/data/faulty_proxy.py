"""An HTTP server in front of another that fails on purpose: connections cut before and amid the answer, and 503 SlowDown."""

import http.client
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


@contextmanager
def faulty_proxy(
    upstream: str, *, share: float, seed: int = 0, delay_s: float = 0.0, cuts_upload: Callable[[int], bool] = lambda size: False
) -> Iterator[tuple[str, dict[str, int]]]:
    """(address, counts of what was done): of all requests, `share` is cut, `share` is cut amid the answer, `share` gets 503.

    Every request waits for `delay_s` first. Where `cuts_upload(bytes)` of a body says so, the connection ends at 60 % of it. The counts
    have requests by method too, as "PUT".
    """
    chance = random.Random(seed)
    counts = {"cut": 0, "half": 0, "503": 0, "ok": 0, "upload": 0}
    host = upstream.removeprefix("http://")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Silent."""

        def forward(self) -> None:
            size = int(self.headers.get("Content-Length", 0))
            if cuts_upload(size):
                self.rfile.read(size * 6 // 10)
                counts["upload"] += 1
                self.close_connection = True
                return
            body = self.rfile.read(size)
            time.sleep(delay_s)
            fault = chance.choices(["cut", "half", "503", "ok"], [share, share, share, 1 - 3 * share])[0]
            counts[fault] += 1
            counts[self.command] = counts.get(self.command, 0) + 1
            if fault == "cut":
                self.close_connection = True
                return
            if fault == "503":
                self.answer(503, [("Content-Type", "application/xml")], SLOW_DOWN, len(SLOW_DOWN))
                return
            connection = http.client.HTTPConnection(host)
            connection.request(self.command, self.path, body, dict(self.headers))
            answer = connection.getresponse()
            content = answer.read()
            connection.close()
            kept = len(content) // 2 if fault == "half" else len(content)
            self.answer(answer.status, answer.getheaders(), content[:kept], len(content))
            self.close_connection = self.close_connection or kept < len(content)

        def answer(self, status: int, headers: list[tuple[str, str]], content: bytes, length: int) -> None:
            self.send_response_only(status)
            for name, value in headers:
                if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(name, value)
            announced = next((value for name, value in headers if name.lower() == "content-length"), str(length))
            self.send_header("Content-Length", announced if self.command == "HEAD" else str(length))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = do_PATCH = forward

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", counts
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
