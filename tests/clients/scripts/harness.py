"""What the scripts of all clients share: where the endpoint is, a few prompts, and the loop over a script's checks.

Standard library only, and old syntax: it runs inside the environment of every client. A check is a function whose
name starts with `check_`; it passes if it returns. Each result is one line of JSON in the file CLIENT_REPORT.
"""

import asyncio
import contextlib
import inspect
import json
import os
import time
import traceback

BASE_URL = os.environ["CLIENT_BASE_URL"]
API_KEY = os.environ["CLIENT_API_KEY"]
MODEL = os.environ["CLIENT_MODEL"]
MODEL_DIR = os.environ["CLIENT_MODEL_DIR"]

QUESTION = "What is the capital of France?"
# Asked greedily, the demo model goes on with these characters, each of which is spread over several tokens.
UNICODE_QUESTION = "Repeat:" + " 🦊 你好," * 6
UNICODE_TEXT = "🦊 你好,"
LONG_TEXT = "word " * 9000  # more tokens than the demo model's context of 8192
UNKNOWN_MODEL = "no-such-model"


@contextlib.contextmanager
def raises(*classes):
    """The block must raise one of `classes`; the yielded list holds the error afterwards."""
    caught = []
    try:
        yield caught
    except classes as error:
        caught.append(error)
    else:
        raise AssertionError("nothing was raised, expected " + " or ".join(c.__name__ for c in classes))


def assert_unicode(text):
    """`text` is what the model answers to UNICODE_QUESTION, with no character broken in two."""
    assert UNICODE_TEXT in text, repr(text)
    assert "\ufffd" not in text, repr(text)


def run(namespace):
    """Runs every check of a script's globals, in the order in which they stand there."""
    with open(os.environ["CLIENT_REPORT"], "w", encoding="utf-8") as report:
        for name, check in list(namespace.items()):
            if not name.startswith("check_"):
                continue
            started = time.monotonic()
            error = None
            try:
                result = check()
                if inspect.iscoroutine(result):
                    asyncio.run(result)
            except Exception:
                error = traceback.format_exc()
            line = {"check": name, "error": error, "seconds": round(time.monotonic() - started, 2)}
            report.write(json.dumps(line) + "\n")
            report.flush()
