"""Chat templates: which one a model gets, and prompts rendered with it. No torch, no engine, no tokenizer."""

from templates.jinja_template import check_kwargs
from templates.rendered import Calls, CallWriter, Piece, Rendered, Stop, TemplateError, calls_as_json
from templates.resolution import ChatTemplates, load

__all__ = [
    "CallWriter",
    "Calls",
    "ChatTemplates",
    "Piece",
    "Rendered",
    "Stop",
    "TemplateError",
    "calls_as_json",
    "check_kwargs",
    "load",
]
