"""The outputs of one request on their way from the engine client to whoever reads them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from engine.messages import SequenceOutput, StepOutput


class RequestStream:
    """The outputs of one request, for one reader. Tokens of steps that have not been read yet are merged."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._outputs: deque[SequenceOutput] = deque()
        self._tokens: list[int] = []  # after all of _outputs
        self._ended = False  # the final output has been put
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> AsyncIterator[SequenceOutput]:
        return self

    async def __anext__(self) -> SequenceOutput:
        while not self._outputs and not self._tokens:
            if self._ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._flush()
        return self._outputs.popleft()

    def pending(self) -> list[SequenceOutput]:
        """Everything that is there, without waiting."""
        self._flush()
        outputs = list(self._outputs)
        self._outputs.clear()
        return outputs

    def put_tokens(self, token_ids: tuple[int, ...]) -> None:
        self._tokens.extend(token_ids)
        self._wake()

    def put(self, output: SequenceOutput) -> None:
        self._flush()
        self._outputs.append(output)
        self._ended = output.finish is not None
        self._wake()

    def _flush(self) -> None:
        if self._tokens:
            self._outputs.append(SequenceOutput(self._request_id, tuple(self._tokens)))
            self._tokens.clear()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def deliver(message: StepOutput, streams: dict[str, RequestStream]) -> None:
    """Hand everything to its stream; streams that end are taken out of `streams`, unknown requests are skipped."""
    for request_id, token_ids in message.tokens:
        if stream := streams.get(request_id):
            stream.put_tokens(token_ids)
    for output in message.outputs:
        if stream := streams.get(output.request_id):
            stream.put(output)
            if output.finish is not None:
                del streams[output.request_id]
