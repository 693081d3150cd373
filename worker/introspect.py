"""The operations that generate nothing: models, tokenize, detokenize, render, metrics, health, version.

`render` is for whoever wonders why a model answers as it does: the prompt and ids that were really built, what ends
the answer, the sampling parameters in effect, and which template was taken, and why.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from engine.client import EngineClient, EngineDead
from worker import VERSION
from worker.errors import ModelNotFound, Unavailable
from worker.jobs import Operation
from worker.metrics import Metrics
from worker.prompts import Prompt
from worker.protocol.requests import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from worker.protocol.responses import model_card, model_list
from worker.sampling import check_token_ids, sampling_params
from worker.served import ServedModel

# A busy engine answers between two steps; a dead one never.
STATS_TIMEOUT_S = 10.0


async def answer(
    operation: Operation, model: ServedModel, client: Callable[[], EngineClient], metrics: Metrics
) -> dict[str, Any] | str:
    """The whole answer: a JSON body, or text for /metrics. Raises WorkerError."""
    body = operation.body
    match operation.kind:
        case "models":
            return model_list([_card(model, name) for name in model.names])
        case "model":
            return _model(model, operation.model_id or "")
        case "tokenize":
            return await _tokenize(model, await TokenizeRequest.parse_async(body))
        case "detokenize":
            return await _detokenize(model, await DetokenizeRequest.parse_async(body))
        case "render":
            return await _render_chat(model, await ChatCompletionRequest.parse_async(body))
        case "render_completions":
            return await _render_completions(model, await CompletionRequest.parse_async(body))
        case "tokenizer_info":
            return _tokenizer_info(model)
        case "version":
            return {"version": VERSION}
        case "metrics":
            return metrics.text(await _stats(client()))
        case "load":
            stats = await _stats(client())
            return {"server_load": stats.num_running + stats.num_waiting}
        case "reset_prefix_cache":
            await _alive(client().reset_prefix_cache())
            return {"status": "ok"}
        case _:
            await _stats(client())
            return {"status": "ok"}


async def _stats(client: EngineClient) -> Any:
    return await _alive(client.stats())


async def _alive(question: Any) -> Any:
    try:
        async with asyncio.timeout(STATS_TIMEOUT_S):
            return await question
    except (EngineDead, TimeoutError):
        raise Unavailable("the engine does not answer") from None


def _card(model: ServedModel, name: str) -> dict[str, Any]:
    return model_card(name, created=model.created, root=model.root, max_model_len=model.info.max_model_len)


def _model(model: ServedModel, name: str) -> dict[str, Any]:
    if not name:
        raise ModelNotFound("a model's name must follow /v1/models/", param="model")
    return _card(model, model.resolve(name))


async def _tokenize(model: ServedModel, request: TokenizeRequest) -> dict[str, Any]:
    model.resolve(request.model)
    prompt = await model.prompts.tokenize(request)
    strings = await asyncio.to_thread(_strings, model, prompt.ids) if request.return_token_strs else None
    return {
        "count": len(prompt.ids),
        "max_model_len": model.info.max_model_len,
        "tokens": prompt.ids,
        "token_strs": strings,
    }


def _strings(model: ServedModel, ids: Sequence[int]) -> list[str]:
    return [model.tokenizer.token_str(token_id) for token_id in ids]


async def _detokenize(model: ServedModel, request: DetokenizeRequest) -> dict[str, Any]:
    model.resolve(request.model)
    check_token_ids("tokens", request.tokens, model.info.vocab_size)
    text = await asyncio.to_thread(model.tokenizer.decode, request.tokens, skip_special_tokens=False)
    return {"prompt": text}


async def _render_chat(model: ServedModel, request: ChatCompletionRequest) -> dict[str, Any]:
    model.resolve(request.model)
    prompt = await model.prompts.chat(request)
    return await asyncio.to_thread(_rendered, model, request, prompt)


async def _render_completions(model: ServedModel, request: CompletionRequest) -> dict[str, Any]:
    model.resolve(request.model)
    prompts = await model.prompts.completions(request)
    rendered = await asyncio.to_thread(lambda: [_rendered(model, request, prompt) for prompt in prompts])
    return rendered[0] | ({"prompts": rendered} if len(rendered) > 1 else {})


def _rendered(model: ServedModel, request: ChatCompletionRequest | CompletionRequest, prompt: Prompt) -> dict[str, Any]:
    tokenizer = model.tokenizer
    params = sampling_params(
        request,
        model.limits(prompt),
        model.defaults,
        num_prompt_tokens=len(prompt.ids),
        bad_words=model.bad_words(request.bad_words),
    )
    stop_ids = sorted(params.stop_token_ids)
    text = prompt.text
    return {
        "prompt": text if text is not None else tokenizer.decode(prompt.ids, skip_special_tokens=False),
        "token_ids": prompt.ids,
        "token_strs": _strings(model, prompt.ids),
        "count": len(prompt.ids),
        "max_model_len": model.info.max_model_len,
        "stop": [*request.stop, *(() if request.ignore_eos else model.stop_words(prompt))],
        "stop_token_ids": stop_ids,
        "stop_tokens": _strings(model, stop_ids),
        "sampling_params": dataclasses.asdict(params) | {"stop_token_ids": stop_ids},
        "template": None if prompt.rendered is None else {"source": prompt.rendered.source, "why": model.templates.why},
        "ignored_fields": request.ignored_fields(),
    }


def _tokenizer_info(model: ServedModel) -> dict[str, Any]:
    tokenizer = model.tokenizer
    return {
        "vocab_size": tokenizer.vocab_size,
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "added_tokens": tokenizer.added_tokens,
        "special_token_ids": sorted(tokenizer.special_ids),
        **model.facts(),
    }
