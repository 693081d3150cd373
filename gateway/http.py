"""One connection of a user or a worker: uvicorn's own protocol, but for two things.

An offer to speak another protocol (`Upgrade: h2c`, which Java's HTTP client makes with every request) is declined by
answering in HTTP/1.1, as it may be. The parser takes what follows such an offer for the other protocol, so that the
request would lose its body: it is read again without the offer. And what is no HTTP at all is told so in the shape
that every error has here.
"""

from __future__ import annotations

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.envelope import Failure
from worker.errors import BadRequest

_OFFER = (b"upgrade", b"http2-settings")


class Http(HttpToolsProtocol):
    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if self.parser.get_method() == b"CONNECT":
                self.send_400_response("this server is no proxy")
            else:
                self.data_received(self._head_without_offer() + data[offer.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("this is not a valid HTTP/1.1 request")

    def on_headers_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _head_without_offer(self) -> bytes:
        """The head that was just read, for a new parser."""
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/1.1"]
        for name, value in self.headers:
            if name == b"connection":
                value = b",".join(token for token in value.split(b",") if token.strip().lower() not in _OFFER)
            if name not in _OFFER:
                lines.append(name + b": " + value)
        self.parser = httptools.HttpRequestParser(self)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def send_400_response(self, msg: str) -> None:
        body = Failure.of(BadRequest(msg, code="invalid_http")).body()
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()
