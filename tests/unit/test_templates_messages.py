"""Messages of every form, in templates that take only some: faults that users reported of other servers."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import templates
from templates import ChatTemplates, TemplateError
from tests.unit.template_folders import WEATHER, assistant, calls, make_folder, system, tool, user

ALTERNATE = (
    "{% for m in messages %}{% if loop.previtem is defined and loop.previtem.role == m.role %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system must come first') }}{% endif %}"
    "{% if m.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('bad role') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
KNOWS_DEVELOPER = (
    "{% for m in messages %}{% if m.role == 'developer' %}<dev>{% else %}<{{ m.role }}>{% endif %}"
    "{{ m.content }}{% endfor %}"
)
NONE_TEST = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' and m.content is none %}"
    "CALL{{ m.tool_calls[0].function.arguments }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
ARG_ITEMS = (
    "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}<call {{ c.function.name }}"
    "{% for k, v in c.function.arguments | items %} {{ k }}={{ v }}{% endfor %}>{% endfor %}"
    "{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)
ARG_RAW_OR_TOJSON = (
    "{% for m in messages %}{% for c in m.tool_calls %}{% if c.function.arguments is string %}"
    "{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}{% endfor %}{% endfor %}"
)
ARG_RAW = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments }}{% endfor %}{% endfor %}"
ARG_CONCAT = (
    "{% for m in messages %}{% for c in m.tool_calls %}{{ '<' + c.function.arguments + '>' }}{% endfor %}{% endfor %}"
)
HAS_TOOL_CALLS_KEY = (
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call only') }}{% endif %}<{{ m.tool_calls[0].function | tojson }}>"
    "{% else %}[{{ m.role }}]{{ m.content }}{% endif %}"
    "{% endfor %}"
)
TOOL_STRING = (
    "{% for m in messages %}{% if m.role == 'tool' %}<resp>{% if m.content is string %}{{ m.content }}"
    "{% else %}LIST{% endif %}</resp>{% endif %}{% endfor %}"
)
USES_EXTRA = (
    "{% for m in messages %}{% if m.name %}{{ m.name }}:{% endif %}{% if m.reasoning_content %}"
    "{{ m.reasoning_content }}>{% endif %}{{ m.content }}|{% endfor %}"
)
EFFORT = (
    "{% if reasoning_effort not in ['low', undefined] %}{{ raise_exception('effort must be low') }}{% endif %}"
    "{{ reasoning_effort }}:{{ messages[0].content }}"
)
DIALECT = """{% for m in messages %}
    {% if m.role == 'stop' %}
        {% break %}
    {% endif %}
    {% generation %}{{- m.content }}|{% endgeneration %}
{% endfor %}
{{- strftime_now('%Y') }}
"""
NINE_LETTER_IDS = (
    "{% for m in messages %}{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
    "{{ raise_exception('ids have 9 letters') }}{% endif %}<{{ c.id }}>"
    "{{ c.function.arguments }}{% endfor %}{% if m.role == 'tool' %}[{{ m.tool_call_id }}]{% endif %}{{ m.content }}"
    "{% endfor %}"
)
PARTS_ONLY = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endfor %}"
)
PARTS_OR_TEXT = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}({{ part.text }}){% endfor %}{% endif %}{% endfor %}"
)
TRIMS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def load(tmp_path: Path) -> Any:
    return lambda source: templates.load(make_folder(tmp_path / "m", source))


@pytest.fixture(scope="module")
def smollm2(demo_model: Path) -> ChatTemplates:
    return templates.load(demo_model)


def plain(chat: ChatTemplates, messages: list[dict[str, Any]], **options: Any) -> str:
    return chat.render(messages, add_generation_prompt=False, **options).text


def test_a_list_of_one_text_part_is_the_text(smollm2: ChatTemplates) -> None:
    parts = smollm2.render([user([{"type": "text", "text": "Hi"}])]).text
    assert parts == smollm2.render([user("Hi")]).text
    assert "[{'" not in parts and "'type'" not in parts


def test_several_text_parts_are_lines_where_the_template_takes_text(load: Any) -> None:
    two = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert plain(load(KNOWS_DEVELOPER), [user(two)]) == "<user>a\nb"


def test_parts_are_passed_where_the_template_takes_them_and_text_too(load: Any) -> None:
    two = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert plain(load(PARTS_OR_TEXT), [user(two), assistant("c")]) == "<user>(a)(b)<assistant>c"


def test_text_becomes_a_part_where_the_template_takes_parts_only(load: Any) -> None:
    assert plain(load(PARTS_ONLY), [system("s"), user("a"), assistant("b")]) == "<system>s<user>a<assistant>b"


def test_parts_that_are_no_text_are_refused_by_their_name(load: Any) -> None:
    with pytest.raises(TemplateError, match="image_url"):
        plain(load(PARTS_OR_TEXT), [user([{"type": "image_url", "image_url": {"url": "http://x"}}])])


def test_an_assistant_turn_with_null_content_keeps_its_place(smollm2: ChatTemplates) -> None:
    text = smollm2.render([user("time?"), calls(("now", "{}")), tool("noon")]).text
    assert "None" not in text and text.count("<|im_start|>assistant") == 2


def test_a_missing_content_takes_the_branch_for_null(smollm2: ChatTemplates, load: Any) -> None:
    turn = calls(("f", "{}"))
    del turn["content"]
    messages = [user("q"), turn, tool("r")]
    text = smollm2.render(messages).text
    assert "None" not in text and "Undefined" not in text
    assert plain(load(NONE_TEST), messages) == "[user]q[assistant]CALL{}[tool]r"


def test_developer_is_system_where_the_template_does_not_know_it(smollm2: ChatTemplates, load: Any) -> None:
    messages = [{"role": "developer", "content": "Answer in French."}, user("Hi")]
    as_system = [system("Answer in French."), user("Hi")]
    assert smollm2.render(messages).text == smollm2.render(as_system).text
    assert "named SmolLM" not in smollm2.render(messages).text
    assert plain(load(KNOWS_DEVELOPER), messages) == "<dev>Answer in French.<user>Hi"


@pytest.mark.parametrize(
    "branch", ["", "{{ raise_exception('Invalid message role') }}", "{% set developer_token = '<|developer|>' %}"]
)
def test_a_template_that_names_the_developer_and_passes_over_him_gets_a_system_message(load: Any, branch: str) -> None:
    source = "{% for m in messages %}{% if m.role == 'developer' %}BRANCH{% else %}[{{ m.role }}]{{ m.content }}"
    source = source.replace("BRANCH", branch) + "{% endif %}{% endfor %}"
    messages = [{"role": "developer", "content": "Answer in French."}, user("Hi")]
    assert plain(load(source), messages) == "[system]Answer in French.[user]Hi"


def test_later_system_messages_move_to_the_front_where_they_must(load: Any) -> None:
    messages = [{"role": "developer", "content": "A"}, user("u1"), system("B"), user("u2")]
    assert plain(load(SYSTEM_FIRST), messages) == "[system]A\n\nB[user]u1[user]u2"


def test_later_system_messages_stay_where_the_template_takes_them(load: Any) -> None:
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    assert plain(load(source), [user("u"), system("B"), user("v")]) == "[user]u[system]B[user]v"


def test_consecutive_roles_only_where_the_template_allows_them(smollm2: ChatTemplates, load: Any) -> None:
    messages = [user("a"), user("b")]
    assert smollm2.render(messages).text.count("<|im_start|>user") == 2
    with pytest.raises(TemplateError, match=r"^roles must alternate$"):
        plain(load(ALTERNATE), messages)


def test_arguments_of_calls_are_objects_for_templates_that_walk_through_them(load: Any) -> None:
    messages = [user("q"), calls(("lookup", '{"city": "Oslo", "n": 2}'), content="")]
    assert plain(load(ARG_ITEMS), messages) == "[user]q<call lookup city=Oslo n=2>"


@pytest.mark.parametrize("source", [ARG_RAW_OR_TOJSON, ARG_RAW, ARG_CONCAT])
@pytest.mark.parametrize("arguments", ['{"a": "é", "b": true}', {"a": "é", "b": True}])
def test_arguments_of_calls_come_out_as_json_once(load: Any, source: str, arguments: Any) -> None:
    text = plain(load(source), [calls(("f", arguments), content="")]).strip("<>")
    assert json.loads(text) == {"a": "é", "b": True}


def test_broken_arguments_pass_as_text_or_are_named(load: Any) -> None:
    messages = [user("q"), calls(("f", "{")), tool("invalid arguments, try again")]
    assert "{" in plain(load(ARG_RAW), messages)
    with pytest.raises(TemplateError, match=re.escape("messages[1].tool_calls[0].function.arguments")):
        plain(load(ARG_ITEMS), messages)


def test_no_tool_calls_is_no_key(load: Any) -> None:
    chat = load(HAS_TOOL_CALLS_KEY)
    assert plain(chat, [{"role": "assistant", "content": "a", "tool_calls": None}]) == "[assistant]a"
    assert plain(chat, [{"role": "assistant", "content": "a", "tool_calls": []}]) == "[assistant]a"
    assert plain(chat, [calls(("f", "{}"))]) == '<{"name": "f", "arguments": {}}>'


def test_ids_of_calls_fit_templates_that_want_nine_letters(load: Any) -> None:
    text = plain(load(NINE_LETTER_IDS), [user("q"), calls(("f", "{}")), tool("r")])
    match = re.fullmatch(r"q<(\w{9})>\{\}\[(\w{9})\]r", text)
    assert match and match[1] == match[2]


def test_a_tools_result_stays_text_for_templates_that_want_text(load: Any) -> None:
    messages = [user("q"), calls(("f", "{}")), tool([{"type": "text", "text": "r"}])]
    assert plain(load(TOOL_STRING), messages) == "<resp>r</resp>"


def test_tools_are_json_without_html_escapes(load: Any) -> None:
    source = "{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    described = {"type": "function", "function": {"name": "f", "description": "a < b && c > 'é'"}}
    assert json.loads(load(source).render([user("q")], tools=[described]).text) == described
    assert "a < b && c > 'é'" in load(source).render([user("q")], tools=[described]).text


def test_fields_that_the_protocol_does_not_know_reach_the_template(load: Any) -> None:
    messages = [{**user("q"), "name": "ann"}, {**assistant("a"), "reasoning_content": "r"}]
    assert plain(load(USES_EXTRA), messages) == "ann:q|r>a|"
    messages[1]["reasoning"] = messages[1].pop("reasoning_content")
    assert plain(load(USES_EXTRA), messages) == "ann:q|r>a|"


def test_a_kwarg_that_the_template_refuses_is_an_error_in_its_words(load: Any) -> None:
    chat = load(EFFORT)
    with pytest.raises(TemplateError, match="effort must be low"):
        plain(chat, [user("q")], kwargs={"reasoning_effort": "high"})
    assert plain(chat, [user("q")], kwargs={"reasoning_effort": "low"}) == "low:q"


def test_the_dialect_of_published_templates(load: Any) -> None:
    messages = [user("a"), {"role": "stop", "content": "x"}, user("b")]
    assert plain(load(DIALECT), messages) == f"a|{datetime.now().year}"


def test_the_date_of_a_template_can_be_fixed(load: Any) -> None:
    assert plain(load("{{ strftime_now('%d %b %Y') }}"), [user("q")], kwargs={"now": "2024-07-26"}) == "26 Jul 2024"
    with pytest.raises(TemplateError, match=r"kwargs\.now"):
        plain(load("{{ strftime_now('%Y') }}"), [user("q")], kwargs={"now": "yesterday"})


PRINTS_VARIABLES = (
    "{{ tools is none }},{{ add_generation_prompt }},{{ messages | length }},{{ bos_token }},"
    "{{ enable_thinking }},{{ custom }},{{ namespace is callable }}"
)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"messages": []}, {"tools": []}, {"add_generation_prompt": False}, {"raise_exception": 1}, {"bos_token": "x"},
        {"tokenize": True}, {"chat_template": "X"}, {"namespace": 1}, {"documents": []}, {"strftime_now": 1},
    ],
)  # fmt: skip
def test_reserved_names_are_refused_by_name(load: Any, kwargs: dict[str, Any]) -> None:
    with pytest.raises(TemplateError, match=f"chat_template_kwargs.{next(iter(kwargs))}"):
        load(PRINTS_VARIABLES).render([user("q")], kwargs=kwargs)


def test_other_kwargs_reach_the_template_and_unread_ones_are_named(load: Any) -> None:
    kwargs = {"enable_thinking": False, "custom": "ok", "typo": 1, "chat_template": None}
    rendered = load(PRINTS_VARIABLES).render([user("q")], kwargs=kwargs)
    assert rendered.text == "True,True,1,<s>,False,ok,True"
    assert rendered.ignored_kwargs == ("typo",)


def test_documents_reach_the_template(load: Any) -> None:
    source = "{% for d in documents %}{{ d.title }}: {{ d.text }};{% endfor %}"
    assert plain(load(source), [user("q")], documents=[{"title": "T", "text": "x"}]) == "T: x;"


def test_going_on_with_the_last_message_leaves_only_it_open(smollm2: ChatTemplates) -> None:
    messages = [user("Say ok"), assistant("ok"), user("again"), assistant("ok")]
    text = plain(smollm2, messages, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nok") and text.count("<|im_end|>") == 4


def test_going_on_keeps_blanks_unless_the_template_trims_all_contents(smollm2: ChatTemplates, load: Any) -> None:
    messages = [user("List"), assistant("1. ")]
    assert plain(smollm2, messages, continue_final_message=True).endswith("assistant\n1. ")
    assert plain(load(TRIMS), messages, continue_final_message=True).endswith("assistant\n1.")


def test_going_on_is_not_confused_by_text_that_looks_like_its_mark(load: Any) -> None:
    mark = "CONTINUE_FINAL_MESSAGE_TAG "
    messages = [user(f"{mark}a"), assistant(f"x {mark}y")]
    assert plain(load(TRIMS), messages, continue_final_message=True).endswith(f"assistant\nx {mark}y")


@pytest.mark.parametrize("role", ["system", "developer"])
def test_going_on_with_a_system_message_that_moves_to_the_front_is_refused(
    load: Any, tmp_path: Path, role: str
) -> None:
    """Another message was continued in its place, or none."""
    messages = [user("a"), {"role": role, "content": "b"}]
    for chat in (load(SYSTEM_FIRST), templates.load(make_folder(tmp_path / "t"), template_type="chatml")):
        with pytest.raises(TemplateError, match="the last message is a system message"):
            chat.render(messages, add_generation_prompt=False, continue_final_message=True)
    alone = plain(load(SYSTEM_FIRST), messages[1:], continue_final_message=True)
    assert alone == "[system]b"


def test_going_on_needs_a_content_that_the_template_shows(load: Any) -> None:
    with pytest.raises(TemplateError, match="continue_final_message"):
        plain(load("{{ messages | length }}"), [user("a"), assistant("b")], continue_final_message=True)
    with pytest.raises(TemplateError, match="continue_final_message"):
        load(TRIMS).render([user("a"), assistant("b")], continue_final_message=True)


def test_a_template_that_needs_a_list_of_tools_gets_an_empty_one(load: Any) -> None:
    source = "{% for t in tools %}{{ t.function.name }}{% endfor %}{{ messages[0].content }}"
    assert load(source).render([user("q")]).text == "q"
    assert load(source).render([user("q")], tools=[WEATHER]).text == "get_weatherq"


def test_the_older_name_of_tools(load: Any) -> None:
    rendered = load("{{ functions }}|{{ messages[0].content }}").render([user("q")], tools=[WEATHER])
    assert not rendered.react and json.loads(rendered.text.partition("|")[0])[0]["name"] == "get_weather"


def test_a_request_nested_without_end_is_refused(load: Any) -> None:
    nested: Any = "x"
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(TemplateError, match="nested"):
        load(WITH_DEPTH).render([user("q")], documents=[{"text": nested}])


WITH_DEPTH = "{{ documents | length }}"
