"""Histories with tool calls: none is passed over, and their ids are such that the template takes them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from time import process_time
from typing import Any

import pytest

import templates
from templates import ChatTemplates
from templates.call_ids import complete
from templates.written_calls import one_by_one
from tests.unit.template_folders import WEATHER, assistant, calls, make_folder, tool, user
from worker.parsers import registry

CHATML = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ '' if tools }}"
WRITES_CALLS = "{% for c in m.tool_calls %}<call {{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %}"
ONLY_WITH_TOOLS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}{% if tools %}"
    + WRITES_CALLS
    + "{% endif %}{% endfor %}"
)
NOT_BESIDE_TEXT = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    + WRITES_CALLS
    + "{% endif %}{{ '' if tools }}{% endfor %}"
)
FIRST_CALL_ONLY = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in (m.tool_calls or [])[:1] %}<"
    "{{ c.function.arguments.a }}{{ c.function.arguments.probe_argument }}>{% endfor %}{% endfor %}{{ '' if tools }}"
)
ONE_CALL = FIRST_CALL_ONLY.replace(
    "{% for c", "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}{% for c", 1
)
WRITES_IDS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls %}"
    "{{ CALL }}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.role == 'tool' %}{{ RESULT }}{% endif %}{% endfor %}{{ '' if tools }}"
)
NEEDS_IDS = WRITES_IDS.replace("{{ CALL }}", "{{ '<' + c.id + '>' }}").replace("{{ RESULT }}", "({{ m.tool_call_id }})")
SHOWS_IDS = WRITES_IDS.replace("{{ CALL }}", "<{{ c.id }}>").replace("{{ RESULT }}", "({{ m.tool_call_id }})")
NUMBERED = WRITES_IDS.replace("{{ CALL }}", "<functions.{{ c.function.name }}:{{ loop.index0 }}>").replace(
    "{{ RESULT }}", "({{ m.tool_call_id }})"
)
NAMED = SHOWS_IDS.replace("{{ c.function.name }}", "")
NO_IDS = WRITES_IDS.replace("{{ CALL }}", "<{% if c.id %}id {{ c.id }}{% endif %}>").replace("{{ RESULT }}", "")
NINE = NEEDS_IDS.replace(
    "{{ '<'", "{% if c.id is undefined or c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}{{ '<'"
)
HISTORY = [user("?"), calls(("f", '{"a": 1}')), tool("sunny"), assistant("It is sunny."), user("thanks")]


@pytest.fixture
def load(tmp_path: Path) -> Any:
    return lambda source, **more: templates.load(make_folder(tmp_path / "m", source, **more))


def plain(chat: ChatTemplates, messages: list[dict[str, Any]], **options: Any) -> str:
    before = copy.deepcopy(messages)
    text = chat.render(messages, add_generation_prompt=False, **options).text
    assert messages == before
    return text


def without_ids(messages: list[dict[str, Any]], empty: str | None = None) -> list[dict[str, Any]]:
    messages = copy.deepcopy(messages)
    for message in messages:
        for part in [message, *message.get("tool_calls", ())]:
            for key in ("id", "tool_call_id"):
                if key in part:
                    part[key] = empty
    return messages


def test_a_call_that_the_template_never_writes_is_text_in_its_turn(load: Any, demo_model: Path) -> None:
    """The turn came out empty, and the tool's result without what was asked."""
    written = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    text = f"[user]?[assistant]{written}[tool]sunny[assistant]It is sunny.[user]thanks"
    assert plain(load(CHATML), HISTORY) == plain(load(CHATML), HISTORY, tools=[WEATHER]) == text
    demo = templates.load(demo_model).render(HISTORY)
    assert f"<|im_start|>assistant\n{written}<|im_end|>" in demo.text and not demo.react


def test_a_call_that_is_written_only_where_there_are_tools_is_text_where_there_are_none(load: Any) -> None:
    chat = load(ONLY_WITH_TOOLS)
    assert '[assistant]<tool_call>\n{"name": "f"' in plain(chat, HISTORY)
    assert '[assistant]<call f {"a": 1}>[tool]' in plain(chat, HISTORY, tools=[WEATHER])


def test_words_beside_a_call_stay(load: Any) -> None:
    messages = [user("?"), calls(("f", '{"a": 1}'), ("g", "{"), content="Let me see."), tool("sunny")]
    expected = (
        '[user]?[assistant]Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": "{"}\n</tool_call>[tool]sunny'
    )
    assert plain(load(CHATML), messages) == plain(load(NOT_BESIDE_TEXT), messages) == expected


@pytest.mark.parametrize("content", [None, ""])
def test_an_empty_content_is_none_where_calls_are_written_beside_none_only(load: Any, content: Any) -> None:
    messages = [user("?"), calls(("f", '{"a": 1}'), content=content), tool("sunny")]
    assert plain(load(NOT_BESIDE_TEXT), messages) == '[user]?[assistant]<call f {"a": 1}>[tool]sunny'


@pytest.mark.parametrize("source", [FIRST_CALL_ONLY, ONE_CALL])
def test_calls_of_one_turn_are_turns_where_a_turn_holds_one(load: Any, source: str) -> None:
    """The second was passed over, or the request refused, though an answer of the same model may hold several."""
    both = calls(("f", '{"a": 1}'), ("g", '{"a": 2}'), content="Both.")
    text = "[user]?[assistant]Both.<1>[tool]one[assistant]<2>[tool]two[user]!"
    chat = load(source)
    assert plain(chat, [user("?"), both, tool("two", "call_2"), tool("one", "call_1"), user("!")]) == text
    in_order = [user("?"), both, tool("one"), tool("two"), user("!")]
    assert plain(chat, without_ids(in_order)) == text


def test_calls_as_text_are_in_the_models_own_form_with_its_control_tokens(load: Any) -> None:
    marks = ("<|tool_call_start|>", "<|tool_call_end|>")
    chat = load(CHATML, tokens=marks)
    evil = {"place": "".join(marks), "n": [1, True, None]}
    messages = [user("?"), calls(("f", evil)), tool("sunny")]
    rendered = chat.render(messages, write_calls=registry.call_writer("lfm2"))
    assert [piece.text for piece in rendered.pieces if piece.control] == list(marks)
    assert f'{marks[0]}[f(place="{"".join(marks)}", n=[1, True, None])]{marks[1]}[tool]' in rendered.text


def test_a_content_of_parts_takes_calls_as_a_part(load: Any) -> None:
    source = "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    chat = load(source + "{{ '' if tools }}")
    assert '[assistant]<tool_call>\n{"name": "f"' in plain(chat, HISTORY)
    words = [HISTORY[0], {**HISTORY[1], "content": [{"type": "text", "text": "Wait."}]}, HISTORY[2]]
    assert '[assistant]Wait.<tool_call>\n{"name": "f"' in plain(chat, words)


@pytest.mark.parametrize("empty", [None, ""])
def test_ids_that_are_missing_are_made_where_the_template_needs_them(load: Any, empty: str | None) -> None:
    both = calls(("f", "{}"), ("g", "{}"))
    messages = without_ids([user("?"), both, tool("1"), tool("2"), calls(("f", "{}")), tool("3")], empty)
    text = "[user]?[assistant]<call_0>f{}<call_1>g{}[tool]1(call_0)[tool]2(call_1)[assistant]<call_2>f{}[tool]3(call_2)"
    for source in (NEEDS_IDS, SHOWS_IDS):
        assert plain(load(source), messages) == text
    numbered = plain(load(NUMBERED), messages)
    assert "1(functions.f:0)" in numbered and "2(functions.g:1)" in numbered and "3(functions.f:0)" in numbered


@pytest.mark.parametrize("given", [None, "", "call_9f8e7d", "functions.f:7"])
def test_ids_tell_the_names_where_the_template_writes_nothing_else(load: Any, given: str | None) -> None:
    """What was called could not be read from an id of another server's making."""
    first, second = calls(("f", "{}")), calls(("g", "{}"))
    first["tool_calls"][0]["id"] = given
    messages = [user("?"), first, tool("1", given), second, tool("2")]  # type: ignore[arg-type]
    made = given if given == "functions.f:7" else "functions.f:0"
    text = f"[user]?[assistant]<{made}>{{}}[tool]1({made})[assistant]<functions.g:1>{{}}[tool]2(functions.g:1)"
    assert plain(load(NAMED), messages) == text


def test_ids_are_not_made_where_the_template_does_without(load: Any) -> None:
    assert plain(load(NO_IDS), without_ids(HISTORY)).count("id ") == 0
    assert "<id call_1>" in plain(load(NO_IDS), HISTORY)


def test_an_id_on_one_side_is_the_others_too(load: Any) -> None:
    messages = [user("?"), calls(("f", "{}")), tool("1")]
    for side in (messages[1]["tool_calls"][0], messages[2]):
        some = copy.deepcopy(messages)
        target = some[2] if side is messages[2] else some[1]["tool_calls"][0]
        del target["tool_call_id" if side is messages[2] else "id"]
        assert plain(load(NEEDS_IDS), some) == "[user]?[assistant]<call_1>f{}[tool]1(call_1)"


@pytest.mark.parametrize("given", ["call_abcdefghijklmnop", "", None, "functions.f:0", "é23456789"])
def test_ids_become_nine_letters_on_both_sides(load: Any, given: str | None) -> None:
    first, second = calls(("f", '{"a": 1}')), calls(("f", '{"a": 2}'))
    first["tool_calls"][0]["id"] = given
    second["tool_calls"][0]["id"] = "abcdefgh9"
    messages = [user("?"), first, tool("1", given), second, tool("2", "abcdefgh9")]  # type: ignore[arg-type]
    text = plain(load(NINE), messages)
    made = text.partition("<")[2].partition(">")[0]
    assert len(made) == 9 and made.isalnum() and made.isascii()
    assert (
        text
        == f'[user]?[assistant]<{made}>f{{"a": 1}}[tool]1({made})[assistant]<abcdefgh9>f{{"a": 2}}[tool]2(abcdefgh9)'
    )
    assert plain(load(NINE), messages) == text


def test_ten_thousand_calls_of_a_turn_find_their_results(load: Any) -> None:
    number = 10_000
    messages = [user("?"), calls(*[("f", "{}")] * number), *(tool("r", f"call_{at}") for at in range(number, 0, -1))]
    started = process_time()
    for form in ("nine", "any"):
        done = complete(one_by_one(messages), form)  # type: ignore[arg-type]
        assert all(done[at]["tool_calls"][0]["id"] == done[at + 1]["tool_call_id"] for at in range(1, 2 * number, 2))
        assert complete(messages, form)[-1]["tool_call_id"] == done[1]["tool_calls"][0]["id"]  # type: ignore[arg-type]
        bare = without_ids(messages)
        assert complete(bare, form)[2]["tool_call_id"] == complete(bare, form)[1]["tool_calls"][0]["id"]  # type: ignore[arg-type]
    assert process_time() - started < 5


def test_calls_as_json_keep_broken_and_odd_arguments() -> None:
    write = registry.call_writer(None)
    given = [("f", {"x": float("nan")}), ("g", "{")]
    objects = [json.loads(line) for line in write(given).splitlines() if line.startswith("{")]
    assert [entry["name"] for entry in objects] == ["f", "g"] and objects[1]["arguments"] == "{"
