"""What /metrics tells."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.messages import EngineInfo, SamplingParams, Stats
from worker import VERSION
from worker.generation import Timing
from worker.metrics import Metrics
from worker.protocol.responses import Usage

INFO = EngineInfo(1024, 100, 16, 64, "cpu", "float32", "sdpa", 8)
# What the dashboards of vLLM ask for.
DASHBOARD = """
vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc vllm:prompt_tokens_total
vllm:generation_tokens_total vllm:request_success_total vllm:num_preemptions_total vllm:prefix_cache_queries_total
vllm:prefix_cache_hits_total vllm:time_to_first_token_seconds_bucket vllm:inter_token_latency_seconds_bucket
vllm:e2e_request_latency_seconds_bucket vllm:request_prompt_tokens_bucket vllm:request_generation_tokens_bucket
vllm:request_prefill_time_seconds_sum vllm:request_decode_time_seconds_sum vllm:request_params_max_tokens_bucket
vllm:request_queue_time_seconds_sum vllm:request_inference_time_seconds_sum vllm:time_per_output_token_seconds_bucket
vllm:request_params_n_bucket vllm:cache_config_info vllm:admission_rejections_total
""".split()


def samples(text: str) -> dict[str, float]:
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


def timing() -> Timing:
    noted = Timing(started=100.0, first_token=100.5)
    noted.last_token = 102.5
    noted.between = [0.5] * 4
    noted.queue_s, noted.prefill_s = 0.1, 0.35
    return noted


def test_dashboards_find_their_names_and_labels() -> None:
    metrics = Metrics("demo", INFO)
    metrics.answered(timing(), Usage(31, 5), SamplingParams(max_tokens=5), 1, ["length"])
    metrics.rejected()
    text = metrics.text(Stats())
    found = samples(text)
    assert not [name for name in DASHBOARD if name not in found]
    assert 'vllm:num_requests_running{engine="0",model_name="demo"}' in text
    assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="demo"} 1.0' in text


def test_the_engines_numbers_are_those_of_the_moment() -> None:
    metrics = Metrics("demo", INFO)
    busy = Stats(num_running=3, num_waiting=2, num_pages=64, num_free_pages=48, generation_tokens=7, max_batch=9)
    found = samples(metrics.text(busy))
    assert (found["vllm:num_requests_running"], found["vllm:num_requests_waiting"]) == (3, 2)
    assert found["vllm:kv_cache_usage_perc"] == 0.25 and found["worker_paged:max_batch_size"] == 9
    idle = samples(metrics.text(Stats(num_pages=64, num_free_pages=64, generation_tokens=7)))
    assert idle["vllm:kv_cache_usage_perc"] == 0 and idle["vllm:generation_tokens_total"] == 7


def test_times_of_a_request() -> None:
    metrics = Metrics("demo", INFO)
    metrics.answered(timing(), Usage(31, 5), SamplingParams(max_tokens=5), 1, ["stop"])
    found = samples(metrics.text(Stats()))
    assert found["vllm:time_to_first_token_seconds_sum"] == 0.5
    assert found["vllm:e2e_request_latency_seconds_sum"] == 2.5
    assert found["vllm:request_time_per_output_token_seconds_sum"] == 0.5
    assert found["vllm:request_queue_time_seconds_sum"] == 0.1
    assert found["vllm:request_prefill_time_seconds_sum"] == 0.35
    assert found["vllm:request_decode_time_seconds_sum"] == 2.0
    assert found["vllm:request_inference_time_seconds_sum"] == pytest.approx(2.35)
    assert found["vllm:inter_token_latency_seconds_count"] == 4


def test_an_answer_without_tokens_is_counted() -> None:
    metrics = Metrics("demo", INFO)
    metrics.answered(Timing(1.0), Usage(31, 0), SamplingParams(max_tokens=0), 1, ["length"])
    assert samples(metrics.text(Stats()))["vllm:e2e_request_latency_seconds_count"] == 1


def test_the_version_is_that_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION
