"""Plots (PNG) of what the benchmarks measured.

    python -m benchmarks.plots benchmarks/results/<name>

Reads <name>.json and <name>-quantized.json (benchmarks.side_by_side), <name>-offline.json (benchmarks.offline_peers)
and <name>-bookkeeping.json (benchmarks.bookkeeping), those that are there. Writes
<name>-{throughput,latency,start,quantized,offline,bookkeeping}.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

OURS = "worker-paged"
OUR_COLOUR = "#0072B2"
OUR_VARIANT_COLOUR = "#7FB8DA"
COLOURS = (
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#CC79A7",
    "#D55E00",
    "#999999",
    "#F0E442",
)  # Okabe and Ito's, colour-blind safe
Row = dict[str, Any]
STYLE: dict[str, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "figure.dpi": 150,
    "legend.frameon": False,
}


def colours(names: list[str]) -> dict[str, str]:
    ours, others = iter([OUR_COLOUR, *[OUR_VARIANT_COLOUR] * len(names)]), iter(COLOURS * 3)
    return {name: next(ours if name.startswith(OURS) else others) for name in names}


def grouped(axes: Axes, rows: list[Row], figure: Callable[[Row], float], label: str) -> None:
    """Bars: a group a workload, a bar a server (median over the turns), a line from the lowest to the highest turn."""
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    names = list(dict.fromkeys(row["peer"] for row in rows))
    colour, width = colours(names), 0.84 / len(names)
    for position, name in enumerate(names):
        for group, workload in enumerate(workloads):
            values = [figure(row) for row in rows if row["peer"] == name and row["workload"] == workload]
            if not values:
                continue
            middle = statistics.median(values)
            x = group + (position - (len(names) - 1) / 2) * width
            axes.bar(x, middle, width * 0.94, color=colour[name], label=name if group == 0 else None)
            if len(values) > 1:
                axes.vlines(x, min(values), max(values), color="#333333", linewidth=1)
            axes.annotate(_short(middle), (x, max(values)), (0, 2), textcoords="offset points", ha="center", fontsize=7)
    axes.set_xticks(range(len(workloads)), workloads)
    axes.grid(axis="x", visible=False)
    axes.set_ylabel(label)
    axes.legend(ncols=min(4, len(names)), loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=9)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def heading(about: dict[str, Any], *, dtype: str | None = None) -> str:
    machine = about["machine"]
    flags = next((flag for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if flag in machine["flags"]), "")
    dtype = dtype or about["dtype"]
    return f"{about['model']}, {dtype}, {machine['cpu']} {flags}, {about['threads']} threads, {about['date']}"


def throughput(results: dict[str, Any], file: Path, *, dtype: str | None = None) -> None:
    figure, axes = plt.subplots(figsize=(9, 4.2))
    grouped(axes, results["rows"], lambda row: float(row["output_tokens_per_s"]), "output tokens per second")
    _save(figure, heading(results["about"], dtype=dtype), file)


def quantized(results: dict[str, Any], file: Path) -> None:
    throughput(results, file, dtype="smaller weights")


def latency(results: dict[str, Any], file: Path) -> None:
    figure, (first, second) = plt.subplots(2, 1, figsize=(9, 7.4))
    grouped(first, results["rows"], lambda row: 1000 * float(row["itl_s"]["mean"]), "time per further token, ms")
    grouped(second, results["rows"], lambda row: 1000 * float(row["ttft_s"]["p50"]), "time to first token, ms")
    second.get_legend().remove()
    _save(figure, heading(results["about"]), file)


def offline(results: dict[str, Any], file: Path) -> None:
    rows = [
        {"peer": row["engine"], "workload": label, "speed": speed}
        for row in results["rows"]
        for label, speed in row["speeds"].items()
    ]
    figure, axes = plt.subplots(figsize=(9, 4.2))
    grouped(axes, rows, lambda row: float(row["speed"]), "output tokens per second")
    _save(figure, f"engines alone: {heading(results['about'])}", file)


def start(results: dict[str, Any], file: Path) -> None:
    servers = {name: facts["start_s"] for name, facts in results["about"]["servers"].items() if "start_s" in facts}
    colour = colours(list(servers))
    figure, axes = plt.subplots(figsize=(7, 0.5 * len(servers) + 1.2))
    bars = axes.barh(list(servers), list(servers.values()), color=[colour[name] for name in servers])
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)
    axes.set_xlabel("seconds from start to serving")
    _save(figure, heading(results["about"]), file)


def bookkeeping(results: list[dict[str, Any]], file: Path) -> None:
    """Cost of the scheduler's step for 100 sequences, over each of: sequences running, waiting, context."""
    # Of a single sequence, 100 times its step is no cost of 100 sequences.
    cases = [(item["case"], item["ms"]["per_100"]) for item in results if item["case"]["running"] >= 100]
    plain = {key: value for key, value in cases[0][0].items() if key != "running"}
    panels = (
        ("running", "sequences running", lambda case: all(case[key] == value for key, value in plain.items())),
        ("waiting", "requests waiting", lambda case: case["running"] == 1000 and not case["shared_tokens"]),
        ("prompt_tokens", "tokens of context", lambda case: case["running"] == 1000 and not case["waiting"]),
    )
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.2), sharey=True)
    for panel, (key, label, chosen) in zip(axes, panels, strict=True):
        points = sorted((case[key], cost) for case, cost in cases if chosen(case))
        panel.plot([x for x, _ in points], [y for _, y in points], "o-", color=OUR_COLOUR)
        if key == "running":
            panel.set_xscale("log")
        for x, y in points:
            panel.annotate(f"{y:.2f}", (x, y), (0, 6), textcoords="offset points", ha="center", fontsize=8)
        panel.axhline(1.0, color="#D55E00", linestyle="--", linewidth=1)
        panel.margins(x=0.15)
        panel.set_xlabel(label)
    axes[0].set_ylabel("ms per 100 sequences")
    axes[0].set_ylim(bottom=0)
    axes[0].annotate("limit", (100, 1.0), (0, 3), textcoords="offset points", color="#D55E00", fontsize=8)
    _save(figure, "Planning and committing a step, without a model, 100,000 pages", file)


def _save(figure: Any, title: str, file: Path) -> None:
    figure.suptitle(title, fontsize=9, color="#555555")
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)
    print(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", type=Path, help="of the results, without an ending")
    name: Path = parser.parse_args().name
    plots: dict[str, dict[str, Callable[[Any, Path], None]]] = {
        "": {"throughput": throughput, "latency": latency, "start": start},
        "-quantized": {"quantized": quantized},
        "-offline": {"offline": offline},
        "-bookkeeping": {"bookkeeping": bookkeeping},
    }
    with plt.rc_context(STYLE):
        for suffix, wanted in plots.items():
            source = name.with_name(f"{name.name}{suffix}.json")
            if not source.exists():
                continue
            results = json.loads(source.read_text(encoding="utf-8"))
            for kind, plot in wanted.items():
                plot(results, name.with_name(f"{name.name}-{kind}.png"))


if __name__ == "__main__":
    main()
