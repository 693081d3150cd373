"""What /metrics tells: the names of vLLM, so that existing dashboards work, in a registry of our own.

Gauges and counters of the engine are read from it when somebody asks; histograms are observed here, once a request.
Metrics that vLLM does not have are called worker_paged:*.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.messages import EngineInfo, SamplingParams, Stats
from worker.generation import Timing
from worker.protocol.responses import Usage

LATENCY_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
FEW = (1, 2, 5, 10, 20, 50, 100)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    def __init__(self, model_name: str, info: EngineInfo) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._engine = _EngineCollector(self._labels, info)
        self._registry.register(self._engine)

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            metric = Histogram(name, text, list(self._labels), registry=self._registry, buckets=tuple(buckets))
            return metric.labels(**self._labels)

        self._first_token = histogram("vllm:time_to_first_token_seconds", "Seconds to the first token", FIRST_TOKEN_S)
        self._between = histogram("vllm:inter_token_latency_seconds", "Seconds between tokens of an answer", TOKEN_S)
        # What vLLM called it before; boards of that time ask for it.
        self._between_once = histogram("vllm:time_per_output_token_seconds", "Seconds between tokens", TOKEN_S)
        self._per_token = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean seconds a token of a request", TOKEN_S
        )
        self._latency = histogram("vllm:e2e_request_latency_seconds", "Seconds from job to last token", LATENCY_S)
        self._queue = histogram("vllm:request_queue_time_seconds", "Seconds in the engine's queue", LATENCY_S)
        self._prefill = histogram("vllm:request_prefill_time_seconds", "Seconds from there to first token", LATENCY_S)
        self._decode = histogram("vllm:request_decode_time_seconds", "Seconds from first to last token", LATENCY_S)
        self._inference = histogram("vllm:request_inference_time_seconds", "Prefill and decode together", LATENCY_S)
        self._prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request", COUNTS)
        self._generated = histogram("vllm:request_generation_tokens", "Tokens generated for a request", COUNTS)
        self._max_tokens = histogram("vllm:request_params_max_tokens", "max_tokens of a request", COUNTS)
        self._n = histogram("vllm:request_params_n", "n of a request", FEW)
        self._success = Counter(
            "vllm:request_success", "Requests answered", [*self._labels, "finished_reason"], registry=self._registry
        )
        self._rejected = Counter(
            "vllm:admission_rejections", "Requests refused by a full queue", list(self._labels), registry=self._registry
        )

    def answered(self, timing: Timing, usage: Usage, params: SamplingParams, n: int, reasons: Iterable[str]) -> None:
        """Notes a request whose last token has come."""
        last = timing.last_token or timing.first_token or timing.started
        first = timing.first_token or last
        self._first_token.observe(first - timing.started)
        self._decode.observe(last - first)
        if timing.queue_s is not None and timing.prefill_s is not None:
            self._queue.observe(timing.queue_s)
            self._prefill.observe(timing.prefill_s)
            self._inference.observe(timing.prefill_s + last - first)
        self._latency.observe(last - timing.started)
        for seconds in timing.between:
            self._between.observe(seconds)
            self._between_once.observe(seconds)
        if usage.completion_tokens > n:
            self._per_token.observe((last - first) * n / (usage.completion_tokens - n))
        self._prompt.observe(usage.prompt_tokens)
        self._generated.observe(usage.completion_tokens)
        self._max_tokens.observe(params.max_tokens)
        self._n.observe(n)
        for reason in reasons:
            self._success.labels(**self._labels, finished_reason=reason).inc()

    def rejected(self) -> None:
        self._rejected.labels(**self._labels).inc()

    def text(self, stats: Stats) -> str:
        """Everything in Prometheus' text format."""
        self._engine.stats = stats
        return generate_latest(self._registry).decode()


class _EngineCollector(Collector):
    """The engine's own numbers, of the latest Stats."""

    def __init__(self, labels: dict[str, str], info: EngineInfo) -> None:
        self._labels = labels
        self._info = info
        self.stats = Stats()

    def collect(self) -> Iterable[Metric]:
        stats = self.stats
        used = 1 - stats.num_free_pages / stats.num_pages if stats.num_pages else 0.0
        yield self._gauge("vllm:num_requests_running", "Sequences that are being computed", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Sequences that wait to be computed", stats.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV cache that sequences hold, 0 to 1", used)
        yield self._gauge("worker_paged:cached_pages", "Pages kept for prompts to come", stats.num_cached_pages)
        yield self._gauge("worker_paged:max_batch_size", "Most sequences that shared a step", stats.max_batch)
        yield self._gauge("worker_paged:engine_resident_bytes", "Memory of the engine process", stats.rss_bytes)
        yield self._counter("vllm:prompt_tokens", "Prompt tokens, cached ones included", stats.prompt_tokens)
        yield self._counter("vllm:prompt_tokens_cached", "Prompt tokens from the cache", stats.cached_prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens generated", stats.generation_tokens)
        yield self._counter("vllm:num_preemptions", "Sequences put back for lack of pages", stats.num_preemptions)
        yield self._counter("vllm:prefix_cache_queries", "Tokens looked up in the cache", stats.prefix_cache_queries)
        yield self._counter("vllm:prefix_cache_hits", "Tokens found in the cache", stats.prefix_cache_hits)
        yield self._counter("worker_paged:steps", "Steps of the engine", stats.num_steps)
        phases = CounterMetricFamily("worker_paged:step_seconds", "Seconds by phase", labels=[*self._labels, "phase"])
        for phase, seconds in stats.step_s.items():
            phases.add_metric([*self._labels.values(), phase], seconds)
        yield phases
        yield self._cache_config()

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        metric = GaugeMetricFamily(name, text, labels=list(self._labels))
        metric.add_metric(list(self._labels.values()), value)
        return metric

    def _counter(self, name: str, text: str, value: float) -> Metric:
        metric = CounterMetricFamily(name, text, labels=list(self._labels))
        metric.add_metric(list(self._labels.values()), value)
        return metric

    def _cache_config(self) -> Metric:
        facts: dict[str, object] = {"block_size": self._info.page_size, "num_gpu_blocks": self._info.num_pages}
        facts |= {"attention_backend": self._info.attention_backend, "cache_dtype": self._info.dtype}
        labels = {**self._labels, **{key: str(value) for key, value in facts.items()}}
        metric = GaugeMetricFamily("vllm:cache_config_info", "How the KV cache is set up", labels=list(labels))
        metric.add_metric(list(labels.values()), 1)
        return metric
