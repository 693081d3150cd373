"""The OpenAI protocol as data: what a request may say, what an answer looks like.

    validation.py   one walk over any JSON (depth, text, numbers), bounded quoting, pydantic's errors as ours
    fields.py       field types: a range or a shape, and the error a client reads
    messages.py     `messages` in every shape clients send -> one normal form
    tools.py        tools / functions / tool_choice -> one normal form
    constraints.py  response_format / structured_outputs / guided_* -> one GrammarSpec
    requests.py     ChatCompletionRequest, CompletionRequest and the small ones
    responses.py    whole answers, usage, logprobs, the model list
    chunks.py       the pieces of a streamed answer
    sse.py          JSON text and event framing

Knows nothing of tokens, templates, settings or the engine's process.
"""
