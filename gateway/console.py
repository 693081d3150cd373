"""What `make serve` prints."""

from __future__ import annotations

import json
import re
import sys
import time

# The line by which a child says why it cannot start, and what a log line has in front of its text.
_ERROR = re.compile(r"(?:^error: |ERROR cannot start: )(.+)")
_LOG_PREFIX = re.compile(r"^[\d-]{10} [\d:,]{8,12} INFO ")


class Console:
    """Lines with the seconds since the start, until the server is ready; a worker's own lines after that."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._starting = True
        self.reason: str | None = None  # the error that a child has told, without the word itself

    def progress(self, line: str) -> None:
        print(f"{time.monotonic() - self._started:7.1f} s  {line}", flush=True)

    def from_child(self, line: str) -> None:
        """A line of a child's output. Its error line is kept for the end, so that it is told once."""
        if (told := _ERROR.search(line)) is not None:
            self.reason = told[1]
        elif not line:
            return
        elif self._starting:
            self.progress(_LOG_PREFIX.sub("", line))
        else:
            print(f"worker | {line}", flush=True)

    def starting(self) -> None:
        self._starting, self.reason = True, None

    def ready(self, text: str) -> None:
        self._starting = False
        print(text, flush=True)

    def seconds(self) -> float:
        return time.monotonic() - self._started


def error(message: str) -> None:
    print(f"error: {message}", file=sys.stderr, flush=True)


def ready_text(origin: str, model: str, seconds: float, *, with_key: bool) -> str:
    """The ready line, a curl line and a snippet for the OpenAI SDK."""
    key = "YOUR_API_KEY" if with_key else "none"
    header = f" -H 'Authorization: Bearer {key}'" if with_key else ""
    # Bounded: a small model that misses its end on a CPU would go on for minutes.
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64})
    quoted = body.replace("'", "'\\''")
    name = json.dumps(model)
    return f"""
ready in {seconds:.1f} s: {model} at base_url {origin}/v1 (also {origin}/v2/local/openai/v1); playground {origin}/

curl {origin}/v1/chat/completions -H 'Content-Type: application/json'{header} -d '{quoted}'

from openai import OpenAI
client = OpenAI(base_url="{origin}/v1", api_key="{key}")
messages = [{{"role": "user", "content": "Hello!"}}]
for chunk in client.chat.completions.create(model={name}, messages=messages, max_tokens=64, stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
"""
