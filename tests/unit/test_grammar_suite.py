"""Soundness over the public JSON-Schema-Test-Suite (from the PyPI source package of `jsonschema`): whatever a compiled
schema lets through is valid, for random outputs and for the suite's own examples."""

from __future__ import annotations

import json
from decimal import Decimal
from functools import cache
from typing import Any

import jsonschema
import pytest
from jsonschema.validators import extend

from builder.fetch_schema_suite import DRAFTS, ensure
from engine.grammar import GrammarError, check
from engine.messages import GrammarSpec
from tests.unit.grammar_driver import driver

CLASSES = {"draft7": jsonschema.Draft7Validator, "draft2020-12": jsonschema.Draft202012Validator}


def exact_multiple(validator: Any, factor: Any, instance: Any, schema: Any) -> Any:
    """The library divides floats: 0.07 is no multiple of 0.01 to it."""
    if validator.is_type(instance, "number") and Decimal(repr(instance)) % Decimal(repr(factor)):
        yield jsonschema.ValidationError(f"{instance} is not a multiple of {factor}")


VALIDATORS = {draft: extend(base, {"multipleOf": exact_multiple}) for draft, base in CLASSES.items()}


@cache
def groups(draft: str) -> tuple[tuple[Any, Any], ...]:
    """(validator, group of the suite) of the schemas that compile."""
    compiled = []
    for file in sorted((ensure() / draft).glob("*.json")):
        for group in json.loads(file.read_text()):
            try:
                check(GrammarSpec("json_schema", json.dumps(group["schema"])))
            except GrammarError:
                continue
            compiled.append((VALIDATORS[draft](group["schema"]), group))
    return tuple(compiled)


def test_hundreds_of_schemas_compile() -> None:
    assert sum(len(groups(draft)) for draft in DRAFTS) >= 300


@pytest.mark.parametrize("draft", DRAFTS)
def test_what_ends_with_stop_is_valid(draft: str) -> None:
    ended = 0
    for validator, group in groups(draft):
        for seed in range(2):
            text = driver().sample(driver().grammar("json_schema", group["schema"]), seed)
            if text is not None:
                validator.validate(json.loads(text))
                ended += 1
    assert ended >= 1.9 * len(groups(draft))


@pytest.mark.parametrize("draft", DRAFTS)
def test_no_invalid_example_gets_through_and_most_valid_ones_do(draft: str) -> None:
    valid = taken = 0
    for validator, group in groups(draft):
        for example in group["tests"]:
            text = json.dumps(example["data"], ensure_ascii=False, separators=(",", ":"))
            takes = driver().takes(driver().grammar("json_schema", group["schema"]), text)
            if validator.is_valid(example["data"]):
                valid += 1
                taken += takes
            else:
                assert not takes, (group["schema"], text)
    assert taken >= 0.9 * valid
