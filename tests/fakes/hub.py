"""A model hub on a free port: what huggingface_hub asks for when it lists and downloads a repository."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import unquote

COMMIT = "c" * 40


class FakeHub:
    """Serves `files` of one repository at any revision among `revisions`; `requests` notes the paths asked for and
    `tokens` the keys that came with them.

    gated: every file is refused as a gated one. slow_s: seconds a file's body takes.
    """

    def __init__(self, repo: str, files: dict[str, bytes], *, revisions: tuple[str, ...] = ("main",)) -> None:
        self.repo, self.files, self.revisions = repo, files, revisions
        self.gated = False
        self.slow_s = 0.0
        self.requests: list[str] = []
        self.tokens: set[str | None] = set()  # the Authorization headers
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: Any, *, body: bool) -> None:
        path = unquote(request.path.split("?")[0])
        self.requests.append(path)
        self.tokens.add(request.headers.get("Authorization"))
        api, files = f"/api/models/{self.repo}/", f"/{self.repo}/resolve/"
        if path.startswith(api):
            kind, revision, *_ = path.removeprefix(api).split("/")
            if self.gated:
                return self._refuse(request, 403, "GatedRepo")
            if revision not in (*self.revisions, COMMIT):
                return self._refuse(request, 404, "RevisionNotFound")
            return self._send(
                request, json.dumps(self._listing(kind)).encode(), body, {"Content-Type": "application/json"}
            )
        if path.startswith(files):
            revision, _, name = path.removeprefix(files).partition("/")
            if name in self.files and revision in (*self.revisions, COMMIT):
                data = self.files[name]
                headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
                return self._send(request, data, body, headers)
            return self._refuse(request, 404, "EntryNotFound")
        self._refuse(request, 404, "RepoNotFound")

    def _listing(self, kind: str) -> Any:
        if kind == "tree":
            return [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in self.files.items()
            ]
        return {"id": self.repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in self.files]}

    def _refuse(self, request: Any, status: int, code: str) -> None:
        self._send(request, b"{}", True, {"X-Error-Code": code, "X-Error-Message": code}, status)

    def _send(self, request: Any, data: bytes, body: bool, headers: dict[str, str], status: int = 200) -> None:
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            request.send_header(name, value)
        request.end_headers()
        if not body:
            return
        parts = 20 if self.slow_s and len(data) > 1000 else 1
        try:
            for part in range(parts):
                request.wfile.write(data[part * len(data) // parts : (part + 1) * len(data) // parts])
                time.sleep(self.slow_s / parts)
        except OSError:  # the client was killed
            request.close_connection = True
