"""Which requests the engine cannot serve at all, and why. What depends on the moment (a full queue, an id in use) is
the core's own business."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from engine.messages import Request, RequestError


def check(request: Request, max_len: int, vocab_size: int) -> RequestError | None:
    """None if it can be served. `max_len` counts prompt and output tokens together."""
    length = len(request.prompt_ids)
    if not length:
        return RequestError("invalid_request", "The prompt is empty.")
    room = max_len - (1 if request.params.max_tokens else 0)
    if length > room:
        return RequestError("prompt_too_long", f"The prompt has {length} tokens; at most {room} can be served.")
    for name, ids in _token_ids(request):
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            return RequestError("invalid_request", f"{name}: a token id is not in 0..{vocab_size - 1}.")
    return None


def _token_ids(request: Request) -> Iterator[tuple[str, Collection[int]]]:
    """All token ids of a request, by where they come from. On a GPU a single index that is out of range takes the
    whole process down, so they are checked although the worker has done so."""
    params = request.params
    yield "prompt", request.prompt_ids
    yield "stop_token_ids", params.stop_token_ids
    yield "logit_bias", [token_id for token_id, _ in params.logit_bias]
    yield "allowed_token_ids", params.allowed_token_ids or ()
    yield "bad_words", [token_id for word in params.bad_words for token_id in word]
    yield "logprob_token_ids", params.logprob_token_ids
