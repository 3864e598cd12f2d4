"""A server that seems to speculate: python -m tests.decoding.speculating_server KIND. It prints its port.

Every answer has 12 tokens in 4 rounds of 7 drafts that accept 1, 2, 2 and 3; KIND says which counters it shows: vllm, sglang, none.
"""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ACCEPTED = (1, 2, 2, 3)
POSITIONS = 7


class Handler(BaseHTTPRequestHandler):
    """Counts what it answered."""

    kind = "vllm"
    answered = 0
    seen: list[dict] = []  # noqa: RUF012
    lock = threading.Lock()

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            return self.reply(json.dumps({"data": [{"id": "heron-7b"}]}))
        if self.path == "/seen":
            return self.reply(json.dumps(self.seen))
        self.reply(self.metrics())

    def metrics(self) -> str:
        count = Handler.answered
        labels = '{engine="0",model_name="heron-7b"'
        lines = ["# TYPE vllm:num_requests_running gauge", f"vllm:num_requests_running{labels}}} 0.0"]
        if self.kind == "vllm":
            start = 1000.0  # of requests before ours
            for name, value in (("drafts", 4), ("draft_tokens", 4 * POSITIONS), ("accepted_tokens", sum(ACCEPTED))):
                lines.append(f"vllm:spec_decode_num_{name}_total{labels}}} {start + count * value}")
                lines.append(f"vllm:spec_decode_num_{name}_created{labels}}} 1.7e+09")
            for place in range(POSITIONS):
                own = sum(accepted > place for accepted in ACCEPTED)
                lines.append(
                    f'vllm:spec_decode_num_accepted_tokens_per_pos_total{labels},position="{place}"}} {start + count * own}'
                )
        if self.kind == "sglang":
            lines.append(f"sglang:spec_accept_length{labels}}} 2.75")
        return "\n".join(lines) + "\n"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            Handler.answered += 1
            self.seen.append(body)
        if "refuse me" in body["messages"][-1]["content"]:
            return self.reply("context length exceeded", 400)
        message = {"role": "assistant", "content": f"answer {len(body['messages'])}"}
        self.reply(json.dumps({"choices": [{"message": message}], "usage": {"completion_tokens": 12}}))

    def reply(self, text: str, status: int = 200) -> None:
        payload = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: object) -> None: ...


if __name__ == "__main__":
    Handler.kind = sys.argv[1]
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
