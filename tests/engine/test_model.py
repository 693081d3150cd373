"""Families of models: the paged, batched forward gives what transformers' own generate gives, token for token."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.messages import EngineConfig
from engine.model import ModelLoadError
from engine.runner import Runner

from . import tiny_models
from .tiny_models import FAMILIES, Driver, make, random_prompts, reference, runner_of


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate(family, tmp_path):
    """Together and in chunks; prompts from one token to several pages and beyond every sliding window."""
    folder = make(family, tmp_path / family)
    prompts = random_prompts([1, 7, 16, 17, 40, 61])
    expected = reference(folder, prompts, 8)
    for chunk in (1000, 13):
        driver = Driver(runner_of(folder))
        assert driver.run([driver.sequence(prompt) for prompt in prompts], chunk) == expected, f"chunks of {chunk}"
        assert driver.max_batch == len(prompts)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "granite", "cohere"])
def test_a_head_that_scales_or_caps_is_not_taken_for_a_projection_alone(family, tmp_path):
    model = runner_of(make(family, tmp_path)).model
    assert (model._head._projection is not None) == (family in ("llama", "gpt2"))
    hidden = 5 * torch.randn(3, model.config.hidden_size)
    with torch.inference_mode():
        found = model.logits(hidden)
        expected = hidden @ model.hf.get_output_embeddings().weight.T
    assert torch.allclose(found, expected, atol=1e-4) == (family in ("llama", "gpt2"))


def test_a_missing_folder_is_named_without_its_path(tmp_path):
    with pytest.raises(ModelLoadError, match="'no-such-model' does not exist") as error:
        Runner(EngineConfig(str(tmp_path / "no-such-model"), device="cpu"))
    assert str(tmp_path) not in str(error.value)


@pytest.mark.parametrize("content", ["{", "[]x"])
def test_a_config_that_is_not_json(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"config\.json .* is not JSON"):
        Runner(EngineConfig(str(tmp_path), device="cpu"))


def test_an_unknown_model_type_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "warp9"}))
    with pytest.raises(ModelLoadError, match="'warp9'"):
        Runner(EngineConfig(str(tmp_path), device="cpu"))


@pytest.mark.parametrize("model_type", ["bloom", "mamba", "t5"])
def test_an_architecture_without_paged_attention_is_refused_by_name(tmp_path, model_type):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": model_type, "vocab_size": 100, "hidden_size": 32, "n_head": 4, "n_layer": 2,
                    "num_hidden_layers": 2, "num_heads": 4, "d_model": 32, "d_kv": 8, "num_layers": 2,
                    "state_size": 4, "max_position_embeddings": 64})
    )  # fmt: skip
    with pytest.raises(ModelLoadError, match="(?i)" + model_type):
        Runner(EngineConfig(str(tmp_path), device="cpu", load_format="dummy", num_pages=4, max_model_len=64))


def test_weights_that_are_cut_off_or_missing_are_one_clear_line(tmp_path):
    folder = make("llama", tmp_path / "broken")
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"\x00" * 64):
        weights.write_bytes(damaged)
        with pytest.raises(ModelLoadError, match="weights of 'broken'") as error:
            runner_of(folder)
        assert str(tmp_path) not in str(error.value) and "\n" not in str(error.value)
    weights.unlink()
    with pytest.raises(ModelLoadError, match="holds no weights"):
        runner_of(folder)


def test_weights_of_another_size_are_refused(tmp_path):
    folder = make("llama", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    for key, value, named in (("num_hidden_layers", 4, "missing keys"), ("vocab_size", 300, "embed_tokens")):
        (folder / "config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(ModelLoadError, match=f"do not fit its config.*{named}"):
            runner_of(folder)


def test_max_model_len_is_checked_against_the_positions(tmp_path):
    folder = make("llama", tmp_path)
    assert runner_of(folder).info.max_model_len == 256
    assert runner_of(folder, max_model_len=100).info.max_model_len == 100
    with pytest.raises(ModelLoadError, match="MAX_MODEL_LEN=300 is more than the 256 positions"):
        runner_of(folder, max_model_len=300)
    stretched = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}}
    assert runner_of(folder, max_model_len=1000, hf_overrides=stretched).info.max_model_len == 1000


@pytest.mark.parametrize("load_format", ["pt", "safetensors"])
def test_load_formats_give_the_same_model(tmp_path, load_format):
    folder = make("qwen2", tmp_path)
    prompts = random_prompts([5, 20])
    expected = reference(folder, prompts, 4)
    if load_format == "pt":
        model = AutoModelForCausalLM.from_pretrained(folder)
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    for chosen in (load_format, "auto"):
        driver = Driver(runner_of(folder, load_format=chosen))
        assert driver.run([driver.sequence(prompt, max_tokens=4) for prompt in prompts]) == expected


def test_a_pickle_that_runs_code_is_refused(tmp_path):
    """Torch files are read with weights_only: what else they bring is not executed."""

    class Trap:
        def __reduce__(self):
            return (exec, (f"open({str(tmp_path / 'sprung')!r}, 'w').close()",))

    folder = make("qwen2", tmp_path / "model")
    (folder / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Trap()}, folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="cannot load the weights"):
        runner_of(folder)
    assert not (tmp_path / "sprung").exists()


def test_dummy_weights_need_no_file(tmp_path):
    tiny_models.config_of("llama").save_pretrained(tmp_path)
    driver = Driver(runner_of(tmp_path, load_format="dummy"))
    assert len(driver.run([driver.sequence([1, 2, 3])])[0]) == 8


def test_dtype_and_backend_are_checked_and_reported(tmp_path):
    folder = make("llama", tmp_path)
    info = runner_of(folder, dtype="bfloat16", attention_backend="sdpa").info
    assert (info.dtype, info.attention_backend, info.device) == ("bfloat16", "sdpa", "cpu")
    for wrong, message in (
        ({"dtype": "float8"}, "'float8'"),
        ({"attention_backend": "magic"}, "'magic'"),
        ({"load_format": "zip"}, "LOAD_FORMAT=zip"),
        ({"quantization": "int3"}, "QUANTIZATION=int3"),
    ):
        with pytest.raises(ModelLoadError, match=message):
            runner_of(folder, **wrong)


def test_experts_cannot_be_quantized_and_that_is_said(tmp_path):
    folder = make("qwen3-moe", tmp_path)
    with pytest.raises(ModelLoadError, match="QUANTIZATION=int8 is not possible"):
        runner_of(folder, quantization="int8")


def test_a_gguf_file_alone_is_enough(tmp_path):
    """It brings config and weights; its 16-bit numbers are the model's own."""
    import gguf

    folder = make("llama", tmp_path / "model")
    config = tiny_models.config_of("llama")
    weights = AutoModelForCausalLM.from_pretrained(folder).half().float().state_dict()
    writer = gguf.GGUFWriter(tmp_path / "only.gguf", "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in weights.items():
        if name == "lm_head.weight":
            continue
        if "q_proj" in name or "k_proj" in name:  # GGUF stores rotary pairs side by side
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        array = tensor.half().numpy() if tensor.dim() > 1 else tensor.numpy()
        writer.add_tensor(names.get_name(name, (".weight",)), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tmp_path / "gguf").mkdir()
    (tmp_path / "only.gguf").rename(tmp_path / "gguf" / "only.gguf")
    halved = AutoModelForCausalLM.from_pretrained(folder).half().float()
    halved.save_pretrained(tmp_path / "halved")
    prompts = random_prompts([5, 20])
    expected = reference(tmp_path / "halved", prompts, 6)
    driver = Driver(runner_of(tmp_path / "gguf"))
    assert driver.run([driver.sequence(prompt, max_tokens=6) for prompt in prompts]) == expected
