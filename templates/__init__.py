"""Chat templates: which one a model gets, and prompts rendered with it. No torch, no engine, no tokenizer."""

from templates.jinja_template import check_kwargs
from templates.rendered import Piece, Rendered, Stop, TemplateError
from templates.resolution import ChatTemplates, load

__all__ = ["ChatTemplates", "Piece", "Rendered", "Stop", "TemplateError", "check_kwargs", "load"]
