"""The borders between the rooms: the text side and the bookkeeping of the engine never import torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCH_FREE_ENGINE = {"messages", "client", "sequence", "pages", "scheduler", "grammar"}
WORKER_MAY_IMPORT_FROM_ENGINE = {"engine.messages", "engine.client", "engine.grammar"}


def modules_of(room: str) -> list[str]:
    names = []
    for file in sorted((ROOT / room).rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


TORCH_FREE = [
    *modules_of("worker"),
    *modules_of("templates"),
    *modules_of("gateway"),
    *[name for name in modules_of("engine") if name.split(".")[-1] in TORCH_FREE_ENGINE],
]


def run_fresh(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_every_torch_free_module_leaves_torch_out() -> None:
    code = f"""
import importlib, sys
for name in {TORCH_FREE!r}:
    importlib.import_module(name)
    if "torch" in sys.modules:
        print(name); break
"""
    assert run_fresh(code).strip() == ""


def test_the_check_above_can_fail() -> None:
    assert run_fresh("import sys, torch; print('torch' in sys.modules)").strip() == "True"


@pytest.mark.parametrize("name", modules_of("worker"))
def test_worker_imports_only_the_public_part_of_engine(name: str) -> None:
    import ast

    file = ROOT.joinpath(*name.split(".")).with_suffix(".py")
    if not file.exists():
        file = ROOT.joinpath(*name.split(".")) / "__init__.py"
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "engine":
            imported = {node.module} if node.module != "engine" else {f"engine.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            imported = {a.name for a in node.names if a.name.split(".")[0] == "engine"}
        else:
            continue
        assert imported <= WORKER_MAY_IMPORT_FROM_ENGINE, f"{name} imports {imported}"


@pytest.mark.parametrize("room", ["gateway", "templates"])
def test_gateway_and_templates_never_import_the_engine(room: str) -> None:
    for file in (ROOT / room).rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert "import engine" not in text and "from engine" not in text, file
