"""The real templates, fetched before the first test: a test that lacks them fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.fetch_test_templates import ensure


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", sorted(file.stem for file in ensure().glob("*.jinja")))


@pytest.fixture
def source(family: str) -> str:
    return (ensure() / f"{family}.jinja").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def made() -> dict[str, Path]:
    return {}


@pytest.fixture
def folder(family: str, source: str, made: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with the template, made once a session."""
    from tests.templates_real.families import make_folder

    if family not in made:
        made[family] = make_folder(source, tmp_path_factory.mktemp("real") / "model")
    return made[family]
