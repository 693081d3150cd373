"""What ends an answer is found without being told."""

from __future__ import annotations

from pathlib import Path

import pytest

import templates
from templates import Stop
from tests.unit.template_folders import make_folder

TURN = "{% for m in messages %}"
END = "{% endfor %}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (TURN + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n" + END, "<|im_end|>"),
        (TURN + "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>" + END,
         "<|eot_id|>"),
        (TURN + "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }} {{ eos_token }}"
         "{% endif %}" + END, "</s>"),
        (TURN + "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n" + END + "{{ eos_token }}", "<|end|>"),
        # Nothing is written behind a last answer: the next turn's header ends it.
        (TURN + "<|{{ m.role }}|>\n{{ m.content }}" + END, "<|user|>"),
        # Written for an earlier answer, but not for the last.
        (TURN + "{{ m.role }}: {{ m.content }}{% if not loop.last %}<|end|>{% endif %}\n" + END, "<|end|>"),
        # Newlines, and text that belongs to the next turn, are no end.
        (TURN + "{{ m.role }}: {{ m.content }}\n" + END, None),
        (TURN + "### {{ m.role }}\n{{ m.content }}\n\n" + END, None),
        ("{{ messages | length }}", None),
        ("{{ raise_exception('never') }}", None),
    ],
)  # fmt: skip
def test_the_end_of_a_turn(tmp_path: Path, source: str, expected: str | None) -> None:
    tokens = (
        "<|im_start|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|end|>",
        "<|user|>",
    )
    stop = templates.load(make_folder(tmp_path / "m", source, tokens=tokens)).stop
    assert stop == Stop(tokens=(expected,) if expected else ())


def test_a_marker_that_is_no_token_ends_by_its_text(tmp_path: Path) -> None:
    source = TURN + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n" + END
    stop = templates.load(make_folder(tmp_path / "m", source, tokens=())).stop
    assert stop == Stop(words=("<|im_end|>",))


def test_stop_words_of_formats_are_ids_where_they_are_tokens(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", config={"model_type": "qwen"})
    assert templates.load(folder).stop.tokens == ("<|im_end|>", "<|endoftext|>", "<|im_start|>")
    chatglm3 = make_folder(tmp_path / "g", tokens=(), split_tokens=("<|user|>",), config={"model_type": "chatglm"})
    assert templates.load(chatglm3).stop == Stop(tokens=("<|user|>",), words=("<|observation|>",))
    for name in ("vicuna", "mistral"):  # no words of their own: the eos that they write
        assert templates.load(folder, template_type=name).stop == Stop(tokens=("</s>",))
    assert templates.load(folder, template_type="falcon").stop == Stop(words=("\nUser:",))


def test_the_demo_model(demo_model: Path) -> None:
    assert templates.load(demo_model).stop == Stop(tokens=("<|im_end|>",))
