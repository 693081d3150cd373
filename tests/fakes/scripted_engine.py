"""The real engine process without a model: it emits the token ids of a script.

    os.environ["SCRIPTED_ENGINE"] = json, or the path of a file with it:

    {"rules": [{"match": [1, 2],        # serves every prompt that contains these ids in a row; without it: the next
                                        # request that nothing else matches, once
                "token_ids": [7, 8],    # one a step; then the smallest stop id, or (without any) the ids again
                "delay_s": 0.01,        # before each token
                "error_after": 3,       # the request fails after so many tokens
                "crash_after": 3}],     # the engine process dies after so many tokens
     "vocab_size": 49152, "max_model_len": 2048, "load_s": 0.1, "load_error": "..."}

Without a rule a request counts up from its last token. Start it by
EngineProcess.launch(config, "tests.fakes.scripted_engine").
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.messages import EngineConfig, RequestError
from engine.process import main
from engine.scheduler import Plan
from engine.sequence import Sampled, Sequence
from tests.fakes.runners import CountingRunner


class ScriptedRunner(CountingRunner):
    def __init__(self, config: EngineConfig, progress: Callable[[str], None]) -> None:
        text = os.environ.get("SCRIPTED_ENGINE", "{}")
        script = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text())
        progress("reading the script")
        time.sleep(script.get("load_s", 0))
        if "load_error" in script:
            raise ValueError(script["load_error"])
        super().__init__(
            num_pages=config.num_pages or 4096,
            page_size=config.page_size or 16,
            vocab_size=script.get("vocab_size", 49152),
            max_model_len=config.max_model_len or script.get("max_model_len", 2048),
        )
        self.general = [rule for rule in script.get("rules", []) if "match" in rule]
        self.in_turn = [rule for rule in script.get("rules", []) if "match" not in rule]

    def launch(self, plan: Plan) -> Plan:  # without the slow checks of CountingRunner
        return plan

    def collect(self, plan: Plan) -> list[Sampled]:
        for part in plan.parts:
            if part.seq.sampling_state is None:
                part.seq.sampling_state = self.rule_for(part.seq)
        time.sleep(max((part.seq.sampling_state.get("delay_s", 0) for part in plan.parts if part.samples), default=0))
        results = super().collect(plan)
        for result in results:
            rule = result.seq.sampling_state
            if result.seq.num_output == rule.get("error_after"):
                result.error = RequestError("internal_error", "The script says so.")
            if result.seq.num_output == rule.get("crash_after"):
                raise RuntimeError("the script says so")
        return results

    def rule_for(self, seq: Sequence) -> dict[str, Any]:
        prompt = seq.token_ids[: seq.num_prompt]
        for rule in self.general:
            ids = rule["match"]
            if any(prompt[i : i + len(ids)] == ids for i in range(len(prompt) - len(ids) + 1)):
                return dict(rule)
        return dict(self.in_turn.pop(0)) if self.in_turn else {}

    def next_token(self, seq: Sequence) -> int:
        ids: list[int] = seq.sampling_state.get("token_ids")
        if not ids:
            return super().next_token(seq)
        if seq.num_output < len(ids):
            return ids[seq.num_output]
        if seq.params.stop_token_ids:
            return min(seq.params.stop_token_ids)
        return ids[seq.num_output % len(ids)]


if __name__ == "__main__":
    main(ScriptedRunner)
