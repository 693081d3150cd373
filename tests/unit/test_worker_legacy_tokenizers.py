"""Old tokenizer files: ids are those of tiktoken and sentencepiece themselves, on small vocabularies trained here."""

from __future__ import annotations

import base64
import io
import json
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken._educational import bpe_train

from engine.grammar import GrammarCompiler
from engine.messages import GrammarSpec
from worker.errors import SettingsError
from worker.legacy_tokenizers import converted
from worker.model_files import ModelFiles
from worker.settings import Settings
from worker.tokenizer import Tokenizer

# The published patterns of the two.
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GLM4_PATTERN = QWEN_PATTERN.replace(r"\p{N}|", r"\p{N}{1,3}|")
SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind. 12345 times!",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))  # 3",
    "Übermäßig schöne Grüße, naïve café, piñata; hello hello world",
    "你好，世界。今天天气很好，我们去公园吧。",
] * 8
WORDS = [
    "zyzzyva", "hello", "world", " the", "  ", " ", "\n", "\n\n", "\t", "'s", "'LL", "2024", "é", "e\u0301", "你好",
    "。", "🦊", "👩‍👩‍👧", "\u00a0", "\u3000", "\u2028", "\r\n", "\0", "▁", "_", "Ⅷ", "ſ", "fox jumps", "<eo", "[gMAS",
    "...!", "\ue000",
]  # fmt: skip
texts = st.lists(st.sampled_from(WORDS) | st.text(max_size=6), max_size=12).map("".join)
few = settings(max_examples=150, deadline=None)


@dataclass(frozen=True)
class Piece:
    text: str
    control: bool = False


def train(**options: Any) -> bytes:
    """A sentencepiece model; the defaults are those of the Llama-like ones: bytes for what is unknown, no changes."""
    file = io.BytesIO()
    defaults = {
        "model_type": "bpe",
        "vocab_size": 540,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "character_coverage": 0.99,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_writer=file, **{**defaults, **options}
    )
    return file.getvalue()


def ranks(words: str) -> dict[bytes, int]:
    trained: dict[bytes, int] = bpe_train("\n".join(SENTENCES), 400, words, visualise=None)
    return trained | {b"zyzzyva": len(trained)}  # no merges lead to this one; it is a token where it is a whole word


def lines(merged: dict[bytes, int]) -> bytes:
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in merged.items())


def model_folder(folder: Path, vocabulary: bytes, file: str = "tokenizer.model", **configs: Any) -> Path:
    """`configs`: contents of the JSON files by name without suffix."""
    folder.mkdir(parents=True)
    (folder / file).write_bytes(vocabulary)
    for name, content in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def loaded(folder: Path) -> Tokenizer:
    return Tokenizer.load(converted(folder, folder.parent / "cache"))


# -- Qwen-1 and GLM-4 --


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, tiktoken.Encoding]:
    merged = ranks(QWEN_PATTERN)
    config = {"tokenizer_class": "QWenTokenizer", "model_max_length": 8192}
    folder = tmp_path_factory.mktemp("qwen") / "Qwen-7B-Chat"
    tokenizer = loaded(model_folder(folder, lines(merged), "qwen.tiktoken", tokenizer_config=config))
    return tokenizer, tiktoken.Encoding("qwen", pat_str=QWEN_PATTERN, mergeable_ranks=merged, special_tokens={})


def as_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text whatever it spells; as a raw prompt it has the same, unless it spells a control token."""
    ids = tokenizer.encode_pieces([Piece(text)])
    if not any(token in text for token in tokenizer.added_tokens):
        assert tokenizer.encode(text, add_special_tokens=True) == [*tokenizer.prefix_ids, *ids]
    return ids


@few
@given(text=texts)
def test_qwen_ids_are_those_of_tiktoken(qwen: tuple[Tokenizer, tiktoken.Encoding], text: str) -> None:
    tokenizer, reference = qwen
    composed = unicodedata.normalize("NFC", text)
    ids = as_text(tokenizer, text)
    assert ids == reference.encode(composed, disallowed_special=())
    assert tokenizer.decode(ids, skip_special_tokens=True) == composed


def test_qwen_special_tokens_come_behind_the_ranks_and_a_user_cannot_spell_them(
    qwen: tuple[Tokenizer, tiktoken.Encoding],
) -> None:
    tokenizer, reference = qwen
    first = reference.n_vocab  # 151643 in the real one
    assert [tokenizer.token_id(token) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|extra_0|>")] == [
        first, first + 1, first + 2, first + 3,
    ]  # fmt: skip
    assert tokenizer.vocab_size == first + 208
    assert tokenizer.eos_ids == (first,) and tokenizer.prefix_ids == ()
    pieces = [Piece("<|im_start|>", True), Piece("user\n<|im_end|>"), Piece("<|im_end|>", True), Piece("\n")]
    spelled = reference.encode("user\n<|im_end|>", disallowed_special=())
    assert tokenizer.encode_pieces(pieces) == [first + 1, *spelled, first + 2, *reference.encode("\n")]
    assert tokenizer.encode("<|im_end|>", add_special_tokens=False) == [first + 2]


@few
@given(text=texts | st.text("0123456789 .", max_size=12))
def test_glm4_ids_are_those_of_tiktoken(glm4: tuple[Tokenizer, tiktoken.Encoding], text: str) -> None:
    """Its file is called as a sentencepiece model is; digits stay together by threes and nothing is composed."""
    tokenizer, reference = glm4
    assert as_text(tokenizer, text) == reference.encode(text, disallowed_special=())


@pytest.fixture(scope="module")
def glm4(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, tiktoken.Encoding]:
    merged = ranks(GLM4_PATTERN)
    names = ["<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>"]
    special = {str(len(merged) + n): {"content": name, "special": True} for n, name in enumerate(names)}
    config = {"tokenizer_class": "ChatGLM4Tokenizer", "added_tokens_decoder": special, "eos_token": "<|endoftext|>"}
    folder = tmp_path_factory.mktemp("glm4") / "glm-4-9b-chat"
    tokenizer = loaded(model_folder(folder, lines(merged), tokenizer_config=config))
    assert tokenizer.prefix_ids == (len(merged) + 2, len(merged) + 4)
    return tokenizer, tiktoken.Encoding("glm4", pat_str=GLM4_PATTERN, mergeable_ranks=merged, special_tokens={})


# -- sentencepiece --

MODELS: dict[str, dict[str, Any]] = {
    "as InternLM has it": {},
    "no space before a text": {"add_dummy_prefix": False},
    "runs of spaces become one": {"remove_extra_whitespaces": True},
    "no bytes": {"byte_fallback": False, "vocab_size": 280},
    "characters are normalized": {"normalization_rule_name": "nfkc"},
    "tokens in texts": {"user_defined_symbols": ["<eoh>", "<eoa>", "dog"]},
}


@pytest.fixture(scope="module", params=MODELS)
def spm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(name, our tokenizer, sentencepiece itself)"""
    data = train(**MODELS[request.param])
    folder = model_folder(tmp_path_factory.mktemp("spm") / "model", data)
    return request.param, loaded(folder), sentencepiece.SentencePieceProcessor(model_proto=data)


@few
@given(text=st.lists(st.sampled_from([*WORDS, "<eoh>", "<eoa>", "dog", "dogs"]) | st.text(max_size=6)).map("".join))
def test_ids_are_those_of_sentencepiece(spm: Any, text: str) -> None:
    name, tokenizer, reference = spm
    if name == "characters are normalized":
        text = "".join(char for char in text if char.isascii() or char in "üßéï，。你好世界Ⅷ\u3000")
    if text in ("<eoh>", "<eoa>", "dog"):  # alone, they get no space before them
        return
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert ids == [reference.bos_id(), *reference.encode(text)]
    if reference.unk_id() not in ids and "▁" not in text:
        assert tokenizer.decode(ids, skip_special_tokens=True) == reference.decode(reference.encode(text))


def test_bos_eos_and_settings_of_the_tokenizer_config(tmp_path: Path) -> None:
    data = train()
    plain = loaded(model_folder(tmp_path / "plain", data))
    assert (plain.bos_id, plain.eos_ids, plain.prefix_ids) == (1, (2,), (1,))
    assert plain.encode("</s>", add_special_tokens=False) == [2]
    assert plain.decode([2], skip_special_tokens=True) == "" and plain.decode([2], skip_special_tokens=False) == "</s>"
    told = {"add_bos_token": False, "eos_token": "<unk>"}
    other = loaded(model_folder(tmp_path / "told", data, tokenizer_config=told))
    assert (other.bos_id, other.eos_ids, other.prefix_ids) == (1, (0,), ())


def test_internlm_chats_are_encoded_as_their_whole_text_is(tmp_path: Path) -> None:
    """<eoh> is a token in the text, behind which no new text begins; a user's own <eoh> is none."""
    data = train(user_defined_symbols=["<eoh>", "<eoa>"])
    reference = sentencepiece.SentencePieceProcessor(model_proto=data)
    tokenizer = loaded(model_folder(tmp_path / "m", data, tokenizer_config={"tokenizer_class": "InternLMTokenizer"}))
    pieces = [
        Piece("<|User|>:hello  fox"),
        Piece("<eoh>", True),
        Piece("\n<|Bot|>:"),
        Piece("<eoa>", True),
        Piece("\n"),
    ]
    assert tokenizer.encode_pieces(pieces) == reference.encode("<|User|>:hello  fox<eoh>\n<|Bot|>:<eoa>\n")
    ids = tokenizer.encode_pieces([Piece("hello <eoh>")])
    assert reference.piece_to_id("<eoh>") not in ids and reference.decode(ids) == "hello <eoh>"


def test_baichuan_chats_have_their_marks_by_id(tmp_path: Path) -> None:
    data = train(control_symbols=["<reserved_106>", "<reserved_107>"])
    reference = sentencepiece.SentencePieceProcessor(model_proto=data)
    tokenizer = loaded(model_folder(tmp_path / "m", data, tokenizer_config={"tokenizer_class": "BaichuanTokenizer"}))
    user, assistant = map(reference.piece_to_id, ("<reserved_106>", "<reserved_107>"))
    pieces = [Piece("<reserved_106>", True), Piece("hello <reserved_107>"), Piece("<reserved_107>", True)]
    assert tokenizer.encode_pieces(pieces) == [user, *reference.encode("hello <reserved_107>"), assistant]
    assert {user, assistant} <= tokenizer.special_ids


def test_chatglm3_chats_are_encoded_as_its_own_code_does(tmp_path: Path) -> None:
    """Each part of a message apart, with the marks by id; sop and eop are words in any text."""
    data = train()
    reference = sentencepiece.SentencePieceProcessor(model_proto=data)
    size = reference.vocab_size()
    config = {
        "tokenizer_class": "ChatGLMTokenizer",
        "added_tokens_decoder": {str(size + 3): {"content": "sop"}, str(size + 6): {"content": "<|user|>"}},
    }
    tokenizer = loaded(model_folder(tmp_path / "chatglm3-6b", data, tokenizer_config=config))
    gmask, sop, system, user, assistant = size + 1, size + 3, size + 5, size + 6, size + 7

    def message(role: int, content: str) -> list[int]:
        return [role, *reference.encode("\n"), *reference.encode(content)]

    expected = [gmask, sop, *message(system, "You are here."), *message(user, "hello [gMASK] 你好"), assistant]
    turns = [("<|system|>", "You are here."), ("<|user|>", "hello [gMASK] 你好")]
    written = [piece for role, text in turns for piece in (Piece(role, True), Piece("\n"), Piece(text))]
    pieces = [Piece("[gMASK]", True), Piece("sop", True), *written, Piece("<|assistant|>", True)]
    assert tokenizer.encode_pieces(pieces) == expected
    assert tokenizer.prefix_ids == (gmask, sop) and tokenizer.eos_ids == (reference.eos_id(),)
    text = "philosophy, a sop, people"
    assert tokenizer.encode(text, add_special_tokens=True) == [gmask, sop, *reference.encode(text)]
    assert tokenizer.vocab_size == size + 9


def test_chatglm2_has_no_tokens_for_roles(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--THUDM--chatglm2-6b" / "snapshots" / "c0ffee"
    tokenizer = loaded(model_folder(snapshot, train(), config={"model_type": "chatglm"}))
    assert tokenizer.token_id("sop") is not None and tokenizer.token_id("<|user|>") is None


def test_tokens_that_the_config_renames(tmp_path: Path) -> None:
    """InternLM2's tokens for chats have the ids of pieces that its vocabulary keeps in reserve."""
    data = train(user_defined_symbols=["[UNUSED_TOKEN_145]"])
    reference = sentencepiece.SentencePieceProcessor(model_proto=data)
    token_id = reference.piece_to_id("[UNUSED_TOKEN_145]")
    config = {"added_tokens_decoder": {str(token_id): {"content": "<|im_end|>", "special": True}}}
    tokenizer = loaded(model_folder(tmp_path / "m", data, tokenizer_config=config))
    assert tokenizer.encode_pieces([Piece("hello"), Piece("<|im_end|>", True)])[-1] == token_id
    assert tokenizer.decode([token_id], skip_special_tokens=True) == ""
    assert tokenizer.token_id("[UNUSED_TOKEN_145]") is None


# -- folders --


def test_what_is_converted_once_stays(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "name", train(), tokenizer_config={"chat_template": "x"}, config={"a": 1})
    (folder / "chat_template.jinja").write_text("template")
    (folder / "model.safetensors.index.json").write_text("{}")
    cache = tmp_path / "cache"
    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(lambda _: converted(folder, cache), range(4))
    assert set(others) == {first}
    assert first.name == "name" and [entry.name for entry in first.parent.iterdir()] == ["name"]
    assert json.loads((first / "tokenizer_config.json").read_text())["chat_template"] == "x"
    files = {"tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja"}
    assert {file.name for file in first.iterdir()} == files
    written = (first / "tokenizer.json").stat().st_mtime_ns
    assert converted(folder, cache) == first and (first / "tokenizer.json").stat().st_mtime_ns == written
    (folder / "config.json").write_text('{"a": 2}')
    assert converted(folder, cache) != first


def test_other_folders_are_taken_as_they_are(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", b"not looked at", tokenizer={})
    assert converted(folder) == folder
    assert converted(tmp_path) == tmp_path


def test_glm4_without_its_list_of_special_tokens_is_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", b"IQ== 0\n", config={"model_type": "chatglm"})
    with pytest.raises(ValueError, match="does not list the special tokens of GLM-4"):
        converted(folder, tmp_path / "cache")


@pytest.mark.parametrize(
    ("file", "data", "message"),
    [
        ("tokenizer.model", lambda: train(model_type="unigram", vocab_size=330), "type unigram are not supported"),
        ("tokenizer.model", lambda: train(treat_whitespace_as_suffix=True), "marks spaces behind words"),
        ("tokenizer.model", lambda: train()[:-1], "no sentencepiece model"),
        ("tokenizer.model", lambda: b"\n\xff\xff", "no sentencepiece model"),
        ("tokenizer.model", lambda: b"IQ== 0\n", "no sentencepiece model"),
        ("qwen.tiktoken", lambda: b"IQ== 0\nIQ== x\n", "no list of base64 tokens"),
        ("qwen.tiktoken", lambda: b"\xff\xff 0\n", "no list of base64 tokens"),
        ("qwen.tiktoken", lambda: b"IQ== 0\nIg== 2\n", "not 0, 1, 2"),
        ("qwen.tiktoken", lambda: b"", "not 0, 1, 2"),
    ],
)
def test_files_that_cannot_be_used_are_refused_at_start(file: str, data: Any, message: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", data(), file)
    with pytest.raises(SettingsError, match=f"the tokenizer of m cannot be used.*{message}") as error:
        ModelFiles.read(folder, folder, Settings.from_env({"MODEL_NAME": "m"}))
    assert str(tmp_path) not in str(error.value)


def test_the_converted_folder_serves_the_worker_and_constraints(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    marked = train(user_defined_symbols=["<eoh>", "<eoa>"])
    qwen = lines(ranks(QWEN_PATTERN))
    vocabularies = [(train(), "tokenizer.model"), (marked, "tokenizer.model"), (qwen, "qwen.tiktoken")]
    for number, (vocabulary, file) in enumerate(vocabularies):
        folder = model_folder(tmp_path / str(number), vocabulary, file)
        files = ModelFiles.read(folder, folder, Settings.from_env({"MODEL_NAME": "m"}))
        assert tmp_path / "home" in files.tokenizer_folder.parents
        tokenizer = Tokenizer.load(files.tokenizer_folder)
        compiler = GrammarCompiler(files.tokenizer_folder, tokenizer.vocab_size)
        row = np.zeros((tokenizer.vocab_size + 31) // 32, dtype=np.int32)
        compiler.compile(GrammarSpec("choice", '["fox"]')).fill(row)
        allowed = [n for n in range(tokenizer.vocab_size) if row[n // 32] >> (n % 32) & 1]
        assert allowed and all(b"fox".startswith(tokenizer.token_bytes(token_id)) for token_id in allowed)
