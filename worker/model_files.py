"""What a model's folder says about the model, weights aside: config.json and generation_config.json.

Knows nothing of requests; `worker.sampling` turns the generation config into defaults.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from worker import hub, legacy_tokenizers
from worker.errors import SettingsError
from worker.settings import Settings


@dataclass(frozen=True)
class ModelFiles:
    folder: Path
    tokenizer_folder: Path
    config: dict[str, Any]  # config.json; of a multimodal model its text part is merged in
    generation_config: dict[str, Any]  # generation_config.json, {} where there is none
    tokenizer_config: dict[str, Any]  # tokenizer_config.json, {} where there is none

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type") or "")

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a text, as the model's files say; generation_config.json first."""
        for source in (self.generation_config, self.config):
            ids = source.get("eos_token_id")
            ids = ids if isinstance(ids, list) else [ids]
            if found := tuple(token_id for token_id in ids if isinstance(token_id, int)):
                return found
        return ()

    @classmethod
    def find(cls, settings: Settings) -> ModelFiles:
        """Locates the model (downloading it if need be) and reads its small files. Raises SettingsError."""
        folder = _locate("MODEL_NAME", settings.model, settings.model_revision, settings, "weights")
        tokenizer_folder = folder
        if settings.tokenizer_name or settings.tokenizer_revision:
            tokenizer_folder = _locate(
                "TOKENIZER_NAME" if settings.tokenizer_name else "TOKENIZER_REVISION",
                settings.tokenizer_name or settings.model,
                settings.tokenizer_revision or (None if settings.tokenizer_name else settings.model_revision),
                settings,
                "tokenizer",
            )
        return cls.read(folder, tokenizer_folder, settings)

    @classmethod
    def read(cls, folder: Path, tokenizer_folder: Path, settings: Settings) -> ModelFiles:
        try:
            tokenizer_folder = legacy_tokenizers.converted(tokenizer_folder)
        except ValueError as error:
            raise SettingsError(f"the tokenizer of {settings.model} cannot be used: {error}") from None
        config = {**_json(folder / "config.json"), **settings.hf_overrides}
        if isinstance(text_config := config.get("text_config"), dict):
            config = {**config, **text_config}
        return cls(
            folder,
            tokenizer_folder,
            config,
            _json(folder / "generation_config.json"),
            _json(tokenizer_folder / "tokenizer_config.json"),
        )


def caches(settings: Settings) -> list[Path]:
    """Where downloads of earlier starts, of the image build or of the platform may be."""
    from huggingface_hub.constants import HF_HUB_CACHE

    volume = hub.as_path(settings.base_path) / "huggingface-cache"
    own = [hub.as_path(settings.download_dir)] if settings.download_dir else []
    return list(dict.fromkeys([*own, volume / "hub", volume, Path(HF_HUB_CACHE)]))


def download_folder(settings: Settings) -> Path | None:
    """The cache that a download goes to: DOWNLOAD_DIR, the volume where there is one, else the hub library's own."""
    if settings.download_dir:
        return hub.as_path(settings.download_dir)
    volume = hub.as_path(settings.base_path)
    return volume / "huggingface-cache" / "hub" if volume.is_dir() else None


def _locate(setting: str, name: str, revision: str | None, settings: Settings, needs: hub.Needs) -> Path:
    try:
        return hub.locate(
            name,
            revision=revision,
            caches=caches(settings),
            download_to=download_folder(settings),
            token=settings.hf_token,
            offline=settings.hf_hub_offline,
            needs=needs if needs != "weights" or settings.load_format != "dummy" else "config",
        )
    except hub.ModelNotFound as error:
        raise SettingsError(f"{setting}={name}: {error}") from None


def _json(file: Path) -> dict[str, Any]:
    """The object in a file; {} where there is no file. Raises SettingsError."""
    if not file.is_file():
        return {}
    try:
        value = orjson.loads(file.read_bytes())
    except orjson.JSONDecodeError as error:
        raise SettingsError(f"{file.name} of the model is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise SettingsError(f"{file.name} of the model is not a JSON object")
    return value
