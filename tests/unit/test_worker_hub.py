"""Finding a model: folders, caches in their layouts, and what an operator is told when there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from worker.errors import SettingsError
from worker.hub import ModelNotFound, locate
from worker.model_files import ModelFiles, caches, download_folder
from worker.settings import Settings


def model(folder: Path, **files: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {"config.json": {"model_type": "llama"}, "model.safetensors": "x", **files}.items():
        file = folder / name.replace("__", ".")
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def cached(cache: Path, repo: str = "models--org--name", commit: str = "c0ffee", ref: str | None = "main") -> Path:
    folder = model(cache / repo / "snapshots" / commit)
    if ref is not None:
        (cache / repo / "refs").mkdir(exist_ok=True)
        (cache / repo / "refs" / ref).write_text(commit)
    return folder


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert locate(str(model(tmp_path / "m"))) == tmp_path / "m"


@pytest.mark.parametrize(("missing", "told"), [("config.json", "config.json"), ("model.safetensors", "weights")])
def test_an_incomplete_folder_is_refused(tmp_path: Path, missing: str, told: str) -> None:
    folder = model(tmp_path / "m")
    (folder / missing).unlink()
    with pytest.raises(ModelNotFound, match=told):
        locate(str(folder))


def test_every_shard_of_the_index_must_be_there(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    folder = model(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-1.safetensors").write_text("x")
    with pytest.raises(ModelNotFound, match=r"model-2\.safetensors"):
        locate(str(folder))
    (folder / "model-2.safetensors").symlink_to(tmp_path / "nowhere")  # how a cache looks that was cut short
    with pytest.raises(ModelNotFound, match=r"model-2\.safetensors"):
        locate(str(folder))


@pytest.mark.parametrize("repo", ["models--Org--Name", "models--org--name"])
def test_caches_are_searched_without_regard_to_case(tmp_path: Path, repo: str) -> None:
    snapshot = cached(tmp_path, repo)
    assert locate("Org/Name", caches=[tmp_path / "no", tmp_path], offline=True) == snapshot


def test_revisions_are_kept_apart(tmp_path: Path) -> None:
    main = cached(tmp_path, commit="aaa")
    branch = cached(tmp_path, commit="bbb", ref="dev")
    assert locate("org/name", caches=[tmp_path], offline=True) == main
    assert locate("org/name", revision="dev", caches=[tmp_path], offline=True) == branch
    assert locate("org/name", revision="bbb", caches=[tmp_path], offline=True) == branch
    with pytest.raises(ModelNotFound, match="HF_HUB_OFFLINE"):
        locate("org/name", revision="v9", caches=[tmp_path], offline=True)


def test_a_cache_without_refs_is_good_enough(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, ref=None)
    assert locate("org/name", caches=[tmp_path / "x", tmp_path], offline=True) == snapshot


@pytest.mark.parametrize("name", ["/does/not/exist", "./nope", "../nope", "a/b/c", "has space/x"])
def test_what_is_no_name_is_never_looked_up(name: str) -> None:
    with pytest.raises(ModelNotFound, match="neither a folder here nor a name"):
        locate(name)


@pytest.mark.parametrize("name", ["a" * 5000, "~nobody_of_that_name/x", "/a\x00b"])
def test_what_can_be_no_path_is_no_model(name: str) -> None:
    with pytest.raises(ModelNotFound):
        locate(name, offline=True)


def test_a_tilde_is_the_home_folder_in_every_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of settings passes no shell: downloads went to a folder called ~."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "volume").mkdir()
    for environ, folder in (
        ({"DOWNLOAD_DIR": "~/models"}, tmp_path / "models"),
        ({"BASE_PATH": "~/volume"}, tmp_path / "volume" / "huggingface-cache" / "hub"),
    ):
        settings = Settings.from_env({"MODEL_NAME": "org/name", **environ}, has_gpu=False)
        assert download_folder(settings) == folder and folder in caches(settings)
    assert locate(f"~/{model(tmp_path / 'm').name}") == tmp_path / "m"


def test_errors_name_the_setting(tmp_path: Path) -> None:
    for name, told in (("/does/not/exist", "neither a folder"), ("x/y", "HF_HUB_OFFLINE")):
        settings = Settings.from_env({"MODEL_NAME": name, "HF_HUB_OFFLINE": "1", "BASE_PATH": str(tmp_path)})
        with pytest.raises(SettingsError, match=f"MODEL_NAME={name}: .*{told}") as caught:
            ModelFiles.find(settings)
        assert "\n" not in str(caught.value)


def test_the_platforms_cache_is_among_the_places(tmp_path: Path) -> None:
    settings = Settings.from_env({"MODEL_NAME": "Org/Name", "BASE_PATH": str(tmp_path), "HF_HUB_OFFLINE": "1"})
    snapshot = cached(tmp_path / "huggingface-cache" / "hub")
    assert tmp_path / "huggingface-cache" / "hub" in caches(settings)
    assert ModelFiles.find(settings).folder == snapshot


def test_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    tokenizer = tmp_path / "t"
    tokenizer.mkdir()
    environ = {"MODEL_NAME": str(folder), "TOKENIZER_NAME": str(tokenizer)}
    with pytest.raises(SettingsError, match=r"TOKENIZER_NAME=.*tokenizer\.json"):
        ModelFiles.find(Settings.from_env(environ))
    (tokenizer / "tokenizer.json").write_text("{}")
    assert ModelFiles.find(Settings.from_env(environ)).tokenizer_folder == tokenizer


def test_eos_ids_of_the_generation_config_win(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", **{"config.json": {"model_type": "llama", "eos_token_id": 2}})
    settings = Settings.from_env({"MODEL_NAME": str(folder)})
    assert ModelFiles.find(settings).eos_ids == (2,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert ModelFiles.find(settings).eos_ids == (7, 8)
    none = Settings.from_env({"MODEL_NAME": str(folder), "GENERATION_CONFIG": "none"})
    assert ModelFiles.find(none).eos_ids == (7, 8)  # what ends a text is no default of sampling


def test_text_config_and_overrides(tmp_path: Path) -> None:
    config = {"model_type": "outer", "text_config": {"vocab_size": 5}}
    folder = model(tmp_path / "m", **{"config.json": config})
    settings = Settings.from_env({"MODEL_NAME": str(folder), "HF_OVERRIDES": '{"max_position_embeddings": 9}'})
    files = ModelFiles.find(settings)
    assert files.config["vocab_size"] == 5 and files.config["max_position_embeddings"] == 9


def test_broken_json_is_one_line(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", **{"config.json": "{"})
    with pytest.raises(SettingsError, match=r"config\.json"):
        ModelFiles.find(Settings.from_env({"MODEL_NAME": str(folder)}))
