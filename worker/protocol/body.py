"""What every request body shares: how it is parsed, what is refused by name, what is reported as ignored."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from worker.errors import BadRequest
from worker.protocol.fields import integer, string
from worker.protocol.validation import check_json, explain, fail, is_large, kind

# The values that ask for nothing, and what to say of any other.
Refusal = tuple[tuple[Any, ...], str]

_NOT_HERE = "is not supported by this server"
_CONSTRAINT = "is not known here: response_format, structured_outputs or guided_* ask for the same"
# Known, and impossible here.
UNSUPPORTED: dict[str, Refusal] = {
    "modalities": ((["text"],), 'must be ["text"]: this server makes text only'),
    "audio": ((), "is not supported: this server makes text only"),
    "web_search_options": ((), "is not supported: this server cannot search the web"),
    "moderation": ((), _NOT_HERE),
    "prompt_embeds": ((), _NOT_HERE),
    "mm_processor_kwargs": (({},), "is not supported: this server takes text only"),
    "media_io_kwargs": (({},), "is not supported: this server takes text only"),
    "mm_payload": ((), "is not supported: this server takes text only"),
    "kv_transfer_params": ((), _NOT_HERE),
    "ec_transfer_params": ((), _NOT_HERE),
    "vllm_xargs": (({},), _NOT_HERE),
    "routed_experts_prompt_start": ((), _NOT_HERE),
    "watermarking": ((), _NOT_HERE),
    "return_token_offsets": ((False,), _NOT_HERE),
    # Constraints in other servers' words: an answer without them would be one that nobody asked for.
    **dict.fromkeys(("regex", "ebnf", "grammar", "json_schema", "guided_decoding"), (("", {}), _CONSTRAINT)),
    "structural_tag": ((), _NOT_HERE),
    "thinking_token_budget": ((-1,), _NOT_HERE),
    "repetition_detection": ((), _NOT_HERE),
}


class Body(BaseModel):
    """What all request bodies share: parsing, the model's name, and who asks."""

    model_config = ConfigDict(extra="allow", frozen=True)
    # Fields of another route that this one cannot honour, in the form of UNSUPPORTED.
    elsewhere: ClassVar[dict[str, Refusal]] = {}
    # The most entries that an array may have, looked at before anything that takes time.
    longest: ClassVar[dict[str, int]] = {}

    model: Annotated[str, string(256)] = ""
    request_id: Annotated[str | None, string(128, min_chars=1, printable=True)] = None
    priority: Annotated[int, integer()] = 0

    @classmethod
    def parse(cls, body: Any) -> Self:
        """Validate a JSON body; raises WorkerError."""
        if not isinstance(body, dict):
            raise BadRequest(
                f"the request body must be a JSON object, got {kind(body)}", param="body", code="invalid_type"
            )
        for name, most in cls.longest.items():
            if isinstance(value := body.get(name), list) and len(value) > most:
                fail(name, f"must have at most {most} entries, got {len(value)}", "array_above_max_length")
        check_json(body)
        given = {key: value for key, value in body.items() if value is not None}
        for name, (harmless, text) in (UNSUPPORTED | cls.elsewhere).items():
            if name in given and given[name] not in harmless:
                fail(name, text, "unsupported_parameter")
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise explain(error) from None

    @classmethod
    async def parse_async(cls, body: Any) -> Self:
        """`parse`, in a thread where it would hold up the event loop."""
        return await asyncio.to_thread(cls.parse, body) if is_large(body) else cls.parse(body)

    def ignored_fields(self) -> list[str]:
        """Names of the fields that mean nothing to this server, at most 20, for a log line and a header."""
        return [name[:64] for name in sorted(self.model_extra or {}) if name not in UNSUPPORTED | self.elsewhere][:20]
