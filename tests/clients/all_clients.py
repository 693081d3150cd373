"""Real clients against a served project: `make test-clients`.

Each client has a script (scripts/, node/) that runs in an environment of its own (environments.py). Every check
of every script is a test here. Not named test_*: `make test` leaves it out, since installing the clients takes minutes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.environments import HERE, NODE, NotInstalled, interpreter, not_installable
from tests.clients.running import Outcomes

# script -> the environment it runs in: the name of a file in locks/, or node
_PYTHON_SCRIPTS = {
    "openai_chat.py": "openai",
    "openai_tools.py": "openai",
    "openai_0_28.py": "openai_0_28",
    "openai_0_28_functions.py": "openai_0_28",
    "langchain_chat.py": "langchain",
    "langchain_tools.py": "langchain",
    "langchain_0_0_chat.py": "langchain_0_0",
    "langchain_0_0_functions.py": "langchain_0_0",
    "llama_index_chat.py": "llama_index",
    "llama_index_rag.py": "llama_index",
    "litellm_chat.py": "litellm",
    "litellm_tools.py": "litellm",
    "instructor_chat.py": "instructor",
    "instructor_models.py": "instructor",
}
_NODE_SCRIPTS = {"openai_npm_chat.mjs": "node", "openai_npm_tools.mjs": "node"}
SCRIPTS = {HERE / "scripts" / name: environment for name, environment in _PYTHON_SCRIPTS.items()}
SCRIPTS |= {NODE / name: environment for name, environment in _NODE_SCRIPTS.items()}


def checks(script: Path) -> list[str]:
    """The names of a script's check functions, found without running it."""
    return re.findall(r"^(?:async )?(?:def|function) (check_\w+)", script.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("environment", sorted(set(SCRIPTS.values())))
@pytest.mark.timeout(1200)
def test_installs(environment: str) -> None:
    reason = not_installable().get(environment)
    try:
        interpreter(environment)
    except NotInstalled as error:
        if reason is None:
            pytest.fail(f"{environment} does not install and is not in not_installable.txt:\n{error}")
        pytest.skip(reason)
    assert reason is None, f"{environment} installs: take it out of not_installable.txt"


@pytest.mark.parametrize(
    ("script", "environment", "check"),
    [
        pytest.param(script, environment, check, id=f"{script.stem}-{check.removeprefix('check_')}")
        for script, environment in SCRIPTS.items()
        for check in checks(script)
    ],
)
@pytest.mark.timeout(900)
def test_client(script: Path, environment: str, check: str, outcome_of: Callable[[Path], Outcomes]) -> None:
    if environment in not_installable():
        pytest.skip(not_installable()[environment])
    outcome = outcome_of(script)[check]
    if outcome.error is not None:
        pytest.fail(outcome.error, pytrace=False)
