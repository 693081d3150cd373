"""InternLM 2.5 and 3: <|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>."""

from worker.parsers.shape import Shape
from worker.parsers.tools.json_tags import JsonTags


class InternLM(JsonTags):
    starts = ("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>")
    ends = ("<|action_end|>",)
    inner = ("<|action_start|>", "<|plugin|>")
    shape = Shape('<|action_start|><|plugin|>{"name": "NAME", "parameters": ', "}<|action_end|>", many=False)
