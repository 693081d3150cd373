"""Which template a model gets, and that the answer says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import templates
from templates import TemplateError
from templates.index import by_name, formats
from tests.unit.template_folders import WEATHER, make_folder, user

OWN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
WITH_TOOLS = "{{ tools | tojson }}" + OWN


def test_the_named_format_wins_over_the_tokenizers_own(tmp_path: Path) -> None:
    chat = templates.load(make_folder(tmp_path / "m", OWN), template_type="ChatML")
    assert chat.render([user("Hi")]).text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert "MODEL_TEMPLATE_TYPE" in chat.why and "chatml" in chat.why


def test_an_unknown_name_fails_at_start_and_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(TemplateError) as error:
        templates.load(make_folder(tmp_path / "m"), template_type="no-such-format")
    message = str(error.value)
    assert "no-such-format" in message and "MODEL_TEMPLATE_TYPE" in message
    assert all(name in message for name in ("chatml", "llama3", "chatglm3", "vicuna"))


def test_the_custom_template_wins_over_the_tokenizers_own(tmp_path: Path) -> None:
    chat = templates.load(make_folder(tmp_path / "m", OWN), custom_template="custom {{ messages[0].content }}")
    assert chat.render([user("Hi")]).text == "custom Hi"
    assert "CUSTOM_CHAT_TEMPLATE" in chat.why


def test_a_custom_template_on_one_line_with_escaped_newlines(tmp_path: Path) -> None:
    escaped = r"{% for m in messages %}\n<{{ m.role }}>\n{{ m.content + '\n' }}{% endfor %}"
    plain = "{% for m in messages %}\n<{{ m.role }}>\n{{ m.content + '\n' }}{% endfor %}"
    folder = make_folder(tmp_path / "m")
    rendered = [templates.load(folder, custom_template=source).render([user("Hi")]).text for source in (escaped, plain)]
    assert rendered[0] == rendered[1] == "<user>\nHi\n"


def test_newlines_escaped_inside_of_expressions_only_stay_as_they_are(tmp_path: Path) -> None:
    source = r"{{ messages[0].content + '\n' + '\\n' }}"
    assert templates.load(make_folder(tmp_path / "m"), custom_template=source).render([user("Hi")]).text == "Hi\n\\n"


def test_a_custom_template_from_a_file_and_a_missing_file(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("from file: {{ messages[0].content }}", encoding="utf-8")
    folder = make_folder(tmp_path / "m")
    assert templates.load(folder, custom_template=str(file)).render([user("Hi")]).text == "from file: Hi"
    with pytest.raises(TemplateError, match="CUSTOM_CHAT_TEMPLATE"):
        templates.load(folder, custom_template=str(tmp_path / "missing.jinja"))


@pytest.mark.parametrize(
    ("content", "told"),
    [(b"root:x:0:0", "is no chat template"), (b"", "is no chat template"), (b"{{ x }}\xff", "cannot be read")],
)
def test_a_file_that_is_no_template_fails_at_start(tmp_path: Path, content: bytes, told: str) -> None:
    """Any text was taken for a template, and stood in place of every conversation."""
    file = tmp_path / "file"
    file.write_bytes(content)
    with pytest.raises(TemplateError, match=f"CUSTOM_CHAT_TEMPLATE.*{told}"):
        templates.load(make_folder(tmp_path / "m"), template_type=None, custom_template=str(file))


@pytest.mark.parametrize("value", ["a" * 5000, "~nobody_of_that_name/x", "a\x00b"])
def test_what_can_be_no_path_is_refused_like_a_missing_file(tmp_path: Path, value: str) -> None:
    with pytest.raises(TemplateError, match="neither a template nor an existing file") as error:
        templates.load(make_folder(tmp_path / "m"), template_type=None, custom_template=value)
    assert len(str(error.value)) < 400


def test_a_custom_template_that_is_no_jinja_fails_at_start(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="not valid Jinja"):
        templates.load(make_folder(tmp_path / "m"), custom_template="{% for m in messages %}")


def test_named_templates_of_the_tokenizer(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools: {{ tools | length }}"}]
    chat = templates.load(make_folder(tmp_path / "m", named))
    assert chat.render([user("Hi")]).text == "plain"
    assert chat.render([user("Hi")], tools=[WEATHER]).text == "tools: 1"
    assert chat.replaced("tool_use").render([user("Hi")], tools=[WEATHER]).text == "tools: 1"


def test_template_files_beside_the_tokenizer(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "from the config")
    (folder / "chat_template.jinja").write_text("from the file", encoding="utf-8")
    assert templates.load(folder).render([user("Hi")]).text == "from the file"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | length }}", encoding="utf-8")
    assert templates.load(folder).render([user("Hi")], tools=[WEATHER]).text == "1"
    assert "chat_template.jinja" in templates.load(folder).why


def test_the_file_of_old_processors(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "processor"}), encoding="utf-8")
    chat = templates.load(folder)
    assert chat.render([user("Hi")]).text == "processor" and "chat_template.json" in chat.why


def test_tools_go_to_the_template_that_reads_them_and_to_react_where_none_does(tmp_path: Path) -> None:
    knows = templates.load(make_folder(tmp_path / "a", WITH_TOOLS)).render([user("Hi")], tools=[WEATHER])
    assert not knows.react and '"get_weather"' in knows.text
    without = templates.load(make_folder(tmp_path / "b", OWN))
    asked = without.render([user("Hi")], tools=[WEATHER])
    assert asked.react and "ReAct" in asked.source and "Action Input" in asked.text
    assert not without.render([user("Hi")]).react


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "qwen"}, "qwen"),
        ({"model_type": "chatglm", "padded_vocab_size": 65024}, "chatglm3"),
        ({"model_type": "chatglm", "padded_vocab_size": 151552}, "glm4"),
        ({"model_type": "chatglm", "_name_or_path": "THUDM/chatglm2-6b"}, "chatglm2"),
        ({"model_type": "baichuan", "vocab_size": 64000}, "baichuan"),
        ({"model_type": "baichuan", "vocab_size": 125696}, "baichuan2"),
        ({"model_type": "internlm"}, "internlm"),
        ({"model_type": "gemma2"}, "gemma2"),
        ({"model_type": "mistral"}, "mistral"),
        ({"model_type": "", "architectures": ["QWenLMHeadModel"]}, "qwen"),
        ({"model_type": "llama", "_name_or_path": "lmsys/vicuna-7b-v1.5"}, "vicuna"),
        ({"model_type": "llama"}, "chatml"),
        ({"model_type": "unheard_of"}, "chatml"),
    ],
)
def test_models_without_a_template_by_name_or_type(tmp_path: Path, config: dict[str, object], expected: str) -> None:
    why = templates.load(make_folder(tmp_path / "m", config=config)).why
    assert why.startswith(f"{expected}:")


def test_one_model_type_is_told_apart_by_the_tokens_it_has(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", tokens=("<|start_header_id|>", "<|eot_id|>"), config={"model_type": "llama"})
    assert templates.load(folder).why.startswith("llama3:")


def test_a_revision_in_a_hubs_cache_is_known_by_its_repositorys_name(tmp_path: Path) -> None:
    folder = tmp_path / "models--lmsys--vicuna-13b-v1.5" / "snapshots" / "0123abcd"
    assert templates.load(make_folder(folder, config={"model_type": "llama"})).why.startswith("vicuna:")


def test_an_own_template_whose_tokens_would_be_split_gives_way_to_slots(tmp_path: Path) -> None:
    own = "{% for m in messages %}[gMASK]sop<|{{ m.role }}|>\n {{ m.content }}{% endfor %}<|assistant|>"
    split = ("[gMASK]", "sop", "<|user|>", "<|assistant|>")
    config = {"model_type": "chatglm", "padded_vocab_size": 65024}
    chat = templates.load(make_folder(tmp_path / "split", own, tokens=(), split_tokens=split, config=config))
    assert chat.why.startswith("chatglm3:") and "split" in chat.why and "[gMASK]" in chat.why
    chat = templates.load(make_folder(tmp_path / "whole", own, tokens=split, config=config))
    assert "own template" in chat.why


def test_an_unknown_template_asked_for_by_a_request(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="not a template"):
        templates.load(make_folder(tmp_path / "m", OWN)).replaced("/etc/passwd")


# Names under which people know formats, from the projects that shipped them.
KNOWN_ELSEWHERE = {
    "FastChat": "raw one_shot zero_shot vicuna_v1.1 airoboros_v1 airoboros_v2 airoboros_v3 koala_v1 alpaca chatglm "
    "chatglm2 chatglm3 codegeex dolly_v2 oasst_pythia oasst_llama openchat_3.5 tenyxchat deepseek-coder tulu stablelm "
    "baize rwkv openbuddy phoenix ReaLM-7b-v1 metamath mpt-7b-chat mpt-30b-chat lemur-70b-chat mpt-30b-instruct billa "
    "redpajama-incite h2ogpt Robin snoozy manticore falcon polyglot_changgpt tigerbot xgen internlm-chat starchat "
    "baichuan-chat baichuan2-chat mistral llama-2 chinese-alpaca2 cutegpt open-orca mistral-7b-openorca "
    "dolphin-2.2.1-mistral-7b OpenHermes-2.5-Mistral-7B Nous-Hermes-2-Mixtral-8x7B-DPO qwen-7b-chat Yi-34b-chat "
    "aquila-chat aquila-legacy aquila aquila-v1 llama2-chinese vigogne_instruct vigogne_chat_v2 stable-vicuna "
    "vigogne_chat_v3 falcon-chat phind metharme xdan-v1 zephyr catppt TinyLlama orca-2 deepseek-chat yuan2 solar yuan",
    "LLaMA-Factory": "alpaca aquila baichuan baichuan2 belle bluelm chatglm2 chatglm3 chatglm3_raw codegeex2 deepseek "
    "deepseekcoder default falcon internlm internlm2 intern2 llama2 llama2_zh mistral mixtral openchat qwen starchat "
    "vanilla vicuna xuanyuan xverse yayi yi yuan zephyr ziya chatml cohere deepseek3 deepseekr1 exaone gemma gemma2 "
    "gemma3 gemma4 glm4 glm4_moe glmz1 gpt_oss granite3 granite4 hunyuan hunyuan_small lfm2 llama3 llama4 mimo "
    "minimax1 minimax2 ministral mistral_small openchat-3.6 phi phi_small phi4 phi4_mini qwen3 qwen3_nothink qwen3_5 "
    "seed_oss seed_coder smollm2 solar telechat2 bailing bailing_v2 kimi_vl moonlight ernie ernie_nothink opencoder "
    "sailor youtu",
    "llama-cpp-python": "llama-2 llama-3 alpaca qwen vicuna oasst_llama baichuan baichuan-2 openbuddy redpajama-incite "
    "snoozy phind intel open-orca mistrallite zephyr pygmalion chatml mistral-instruct chatglm3 openchat saiga gemma "
    "functionary functionary-v1 functionary-v2 chatml-function-calling",
    "RTP-LLM": "qwen qwen_7b qwen_13b qwen_1b8 qwen_2 qwen_2_moe qwen_agent qwen_agent_tool qwen_tool qwen_3 "
    "qwen_3_moe qwen_3_tool qwen3_next qwen3_coder_moe glm4_moe glm_5 glm47_moe glm4_moe_lite chatglm4 chatglm4v "
    "deepseek_v31 deepseek_v32 deepseek_v4 kimi_k2 kimi_linear kimi_k25 llava qwen_vl qwen2_vl qwen2_5_vl qwen3_vl "
    "qwen_v2_audio deepseek_vl_v2",
    "vLLM's examples": "template_alpaca template_baichuan template_chatglm template_chatglm2 template_chatml "
    "template_falcon template_falcon_180b template_llava template_qwen_vl_chat",
}


@pytest.mark.parametrize("project", KNOWN_ELSEWHERE)
def test_names_of_other_projects_are_known(project: str) -> None:
    assert [name for name in KNOWN_ELSEWHERE[project].split() if by_name(name) is None] == []


def test_every_format_is_whole() -> None:
    for name, template in formats().items():
        assert "{content}" in template.user and "{content}" in template.assistant, name
        assert template.system or "{system}" in template.user, name
        assert all(alias == alias.strip() for alias in template.aliases), name
