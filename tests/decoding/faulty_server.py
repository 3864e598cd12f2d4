"""An OpenAI-compatible server that fails on purpose: `python -m tests.decoding.faulty_server --log FILE [...]`, port on stdout.

Its answer is a function of the messages (`text_of`), so a test can tell which messages a turn was asked with. Faults are a
function of the messages and of how often they came: with --faults the first 0 to 3 requests for the same messages fail, each
in its own way. Every request is a line of the log before it is answered. Words in the last user message ask for more:
CUT (finish_reason length), CALL (a call of the first tool), REFUSE (400), POISON (500 for ever).
"""

import argparse
import collections
import hashlib
import json
import os
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STOP_ID = 2
FAULTS = ("500", "429", "disconnect", "broken JSON", "no completion", "slow")


def digest(messages: list[dict[str, Any]]) -> bytes:
    """Of what a target would see of the messages."""
    seen = [[message["role"], message.get("content"), message.get("tool_calls")] for message in messages]
    return hashlib.sha256(json.dumps(seen).encode()).digest()


def text_of(messages: list[dict[str, Any]]) -> str:
    """The server's answer to these messages."""
    return "says " + digest(messages).hex()[:12]


def ids_of(text: str) -> list[int]:
    """Its token ids, stop token included."""
    return [*(100 + byte for byte in text.encode()), STOP_ID]


class Server(ThreadingHTTPServer):
    """Settings and counters that all connections share."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.options = options
        self.lock = threading.Lock()
        self.came: collections.Counter[bytes] = collections.Counter()
        self.log = open(options.log, "a", buffering=1)  # noqa: SIM115

    def note(self, body: dict[str, Any], authorization: str | None) -> str:
        """Logs a request; returns the fault it meets, "" for none."""
        key = digest(body["messages"])
        users = [message["content"] for message in body["messages"] if message["role"] == "user"]
        with self.lock:
            number = self.came[key]
            self.came[key] += 1
            fault = FAULTS[key[1 + number] % len(FAULTS)] if self.options.faults and number < key[0] % 4 else ""
            if "REFUSE" in users[-1] or (self.options.no_token_ids and "return_token_ids" in body):
                fault = "400"
            elif "POISON" in users[-1]:
                fault = "500"
            elif self.options.busy_first and sum(self.came.values()) == 1:
                fault = "429"
            elif self.options.status:
                fault = self.options.status
            line = {"first": users[0], "turns": len(body["messages"]), "fault": fault, "time": time.monotonic()}
            self.log.write(json.dumps({**line, "authorization": authorization, "body": body}) + "\n")
        return fault


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fault = self.server.note(body, self.headers.get("Authorization"))
        time.sleep(self.server.options.delay * digest(body["messages"])[5] / 255)  # answers out of order
        if fault == "slow":
            time.sleep(self.server.options.slow)
        payload = json.dumps(completion(body)).encode()
        if fault == "disconnect":
            self.send_response(200)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload[: len(payload) // 2])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        elif fault == "broken JSON":
            self.reply(200, payload[:-2])
        elif fault == "no completion":
            self.reply(200, b'{"choices": []}')
        elif fault in ("", "slow"):
            self.reply(200, payload)
        else:
            wait = {"Retry-After": str(self.server.options.retry_after)} if fault == "429" else {}
            self.reply(int(fault), json.dumps({"error": {"message": f"made to fail with {fault}"}}).encode(), **wait)

    def reply(self, status: int, payload: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(payload)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: Any) -> None:
        pass


def completion(body: dict[str, Any]) -> dict[str, Any]:
    """The right reply to a request."""
    text = text_of(body["messages"])
    asked = next(message["content"] for message in reversed(body["messages"]) if message["role"] == "user")
    last = body["messages"][-1]
    message: dict[str, Any] = {"role": "assistant", "content": text}
    reason = "length" if "CUT" in asked else "stop"
    if "CALL" in asked and last["role"] == "user":
        function = {"name": body["tools"][0]["function"]["name"], "arguments": '{"city": "Bergen"}'}
        message |= {"content": None, "tool_calls": [{"id": f"new-{text[-4:]}", "type": "function", "function": function}]}
        reason = "tool_calls"
    if body.get("chat_template_kwargs", {}).get("enable_thinking"):
        message["reasoning"] = "thought about it"
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": reason}
    if body.get("return_token_ids"):
        ids = ids_of(text)
        choice["token_ids"] = ids[:-1] if reason == "length" else ids
    return {"id": "x", "object": "chat.completion", "choices": [choice], "usage": {"completion_tokens": len(text)}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--log", required=True)
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--busy-first", action="store_true", help="429 to the very first request")
    parser.add_argument("--status", help="to every request")
    parser.add_argument("--no-token-ids", action="store_true", help="400 to a request that asks for token ids")
    parser.add_argument("--retry-after", type=float, default=0.05)
    parser.add_argument("--delay", type=float, default=0.02)
    parser.add_argument("--slow", type=float, default=3.0)
    server = Server(parser.parse_args())
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    print(server.server_address[1], flush=True)
    server.serve_forever()


def end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


if __name__ == "__main__":
    main()
