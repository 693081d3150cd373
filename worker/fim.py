"""Fill-in-the-middle: prompt and suffix around a gap, in the tokens that code models were trained with."""

from __future__ import annotations

from dataclasses import dataclass

from worker.tokenizer import Tokenizer


@dataclass(frozen=True)
class FimPiece:
    """A `tokenizer.Piece`."""

    text: str
    control: bool = False


@dataclass(frozen=True)
class FimFormat:
    """`first` ... `second` ... `last`; "suffix first" formats put the suffix before the prompt."""

    first: str
    second: str
    last: str = ""
    suffix_first: bool = False

    def pieces(self, prompt: str, suffix: str) -> list[FimPiece]:
        before, after = (suffix, prompt) if self.suffix_first else (prompt, suffix)
        parts = [FimPiece(self.first, True), FimPiece(before), FimPiece(self.second, True), FimPiece(after)]
        return [*parts, FimPiece(self.last, True)] if self.last else parts


FORMATS = (
    FimFormat("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen-Coder, CodeGemma
    FimFormat("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite, StableCode
    FimFormat("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    FimFormat("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    FimFormat("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # CodeGeeX
    FimFormat("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    FimFormat("[SUFFIX]", "[PREFIX]", suffix_first=True),  # Codestral
)


def fim_format(tokenizer: Tokenizer) -> FimFormat | None:
    """The format whose tokens the tokenizer has; None: the model cannot fill in."""
    for form in FORMATS:
        if all(token in tokenizer.added_tokens for token in (form.first, form.second, form.last) if token):
            return form
    return None
