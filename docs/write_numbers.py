"""Writes numbers and lists into the pages, from the files that hold them: `python docs/write_numbers.py`.

`make format` runs it. Text between `<!-- numbers: NAME -->` and `<!-- end -->` in the README or a page of docs/ comes
from here; the rest is written by hand. `mini/NAME` is a table of experiments/mini/report.py.
"""

from __future__ import annotations

import ast
import json
import re
import runpy
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARKED = re.compile(r"(<!-- numbers: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
KERNELS = "engine with kernels and graphs, "


def table(header: Sequence[str], rows: Iterable[Sequence[object]], words: int = 1) -> str:
    """A Markdown table; its first columns, `words` of them, are text, the others numbers."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (header, *rows)]
    marks = "---|" * words + "---:|" * (len(header) - words)
    return "\n".join([lines[0], f"|{marks}", *lines[1:]])


def read(name: str) -> Any:
    """A file of results/."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


# -- training on one H200 --------------------------------------------------------------------------------------------


def training_steps() -> str:
    """Whole optimizer steps by the number of passes."""
    found = read("bench-train-h200.json")
    rows = [
        (
            f"{row['passes']} pass{'es' * (row['passes'] > 1)}",
            f"{1e3 * row['seconds']:,.1f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{100 * row['share']:.1f}%",
        )
        for row in found["steps"]
    ]
    share = f"share of the matmul rate ({found['matmul_tflops']:,.0f} TFLOP/s)"
    parts = {part["part"]: 1e3 * part["seconds"] for part in found["parts"]}
    whole, one = parts["forward of both halves, no gradient"], parts["a pass without gradient"]
    note = f"Peak memory {found['peak_gb']:.0f} GB, nothing recomputed. A pass without gradient takes {one:.1f} ms"
    return f"{table(('step', 'ms', 'clean tokens/s', share), rows)}\n\n{note}, a forward of both halves {whole:.1f} ms."


def training_kernels() -> str:
    """Where the time of a one-pass step goes."""
    profile = read("bench-train-h200.json")["profile"]
    kernels = {row["name"]: row["ms"] for row in profile["kernels"]}
    backward, forward = (next(ms for name, ms in kernels.items() if part in name) for part in ("bprop", "fprop"))
    added = kernels["_merge"] + kernels["_gradients"]
    meaning = {
        "attention": f"attention: cuDNN backward {backward:.0f}, forward {forward:.0f}, the keys inside a block "
        f"{added:.0f}, the rest cuDNN's helpers",
        "fused elementwise": "norms, rotary angles, SiLU and their gradients, fused by the compiler",
        "optimizer, casts and norms of gradients": "gradient norm, clipping, AdamW",
        "loss": "loss and its gradient, without their matrix products",
        "other": "other: sums of the two halves' gradients, embedding, noise",
    }
    kinds = sorted(profile["kinds_ms"].items(), key=lambda pair: (pair[0] == "other", -pair[1]))
    rows = [(meaning.get(name, name), f"{ms:.0f}") for name, ms in kinds]
    return table(("kernels", "ms"), [*rows, ("all", f"{sum(profile['kinds_ms'].values()):.0f}")])


def training_compare() -> str:
    """Steps of one pass with one optimisation switched off."""
    meaning = {
        "as it is": "everything on",
        "flex attention": "FlexAttention over the mask instead of a causal kernel and a few keys",
        "full logits": "all logits at once",
    }
    rows = []
    for row in read("bench-train-h200.json")["compare"]:
        cells = ("out of memory", "") if "error" in row else (f"{1e3 * row['seconds']:,.1f}", f"{row['share']:.1%}")
        rows.append((meaning.get(row["variant"], row["variant"]), *cells))
    return table(("variant", "ms", "share"), rows)


# -- decoding on one H200 --------------------------------------------------------------------------------------------


def decoding_traffic() -> str:
    """Requests of many lengths, at once or by and by, beside equal ones of the same run."""
    rows = []
    for run in read("bench-traffic-h200.json")["runs"]:
        for row in run["traffic"]:
            share = f"{row['share_of_equal']:.1%}" if "share_of_equal" in row else ""
            times = [f"{row[key][part]:,.1f}" for key in ("first_block_ms", "between_blocks_ms") for part in row[key]]
            cells = [f"{row['tokens_per_s']:,.0f}", share, *times, f"{row['host_ms_per_pass']:.2f}"]
            rows.append([run["model"].replace("q", "Q"), row["what"].removeprefix(KERNELS), *cells])
    header = ("shape", "requests", "tokens/s", "of equal", "first block, ms", "99%", "between blocks, ms", "99%")
    return table((*header, "host, ms per pass"), rows, words=2)


def decoding_one() -> str:
    """One request, by model and context."""
    rows = []
    for run in read("bench-one-h200.json")["runs"]:
        for row in run["rows"]:
            cells = [f"{row['context']:,}", f"{1e3 * row['seconds_per_forward']:.2f}"]
            cells += [f"{100 * row['weights_share_of_copy']:.1f}%", f"{row['tokens_per_s']:,.0f}"]
            rows.append([run["model"].replace("q", "Q"), *cells])
    return table(("shape", "context", "ms per forward", "share of copy rate", "tokens/s"), rows)


def decoding_speed() -> str:
    """Every configuration that was measured alone."""
    *runs, _ = read("bench-decode-h200.json")["runs"]
    rows = []
    for row in (row for run in runs for row in run["rows"]):
        cells = [row["what"].removeprefix(KERNELS), row["batch"], f"{row['context']:,}"]
        cells += [f"{1e3 * row['seconds_per_forward']:.2f}", f"{100 * row['weights_share_of_copy']:.1f}%"]
        cells += [f"{row[key]:,.0f}" for key in ("tokens_per_s", "tokens_per_s_with_prefill", "prefill_tokens_per_s")]
        rows.append([*cells, f"{100 * row['prefill_share_of_matmul']:.1f}%"])
    header = ("", "requests", "context", "ms per forward", "share of copy rate", "tokens/s", "with prefill")
    return table((*header, "prefill tokens/s", "share of matmul rate"), rows)


def decoding_kernels() -> str:
    """Microseconds of a forward of one self-refining request, by kind of kernel."""
    rows = []
    for row in read("bench-decode-h200.json")["runs"][0]["rows"]:
        times = {kernel["name"]: kernel["us"] for kernel in row["kernels"]}
        parts = [times[name] for name in ("_skinny", "_attend_parts", "_scan")]
        parts.append(1e6 * row["seconds_per_forward"] - sum(parts))
        rows.append((f"one request, {row['context']:,} tokens of context", *(f"{part:,.0f}" for part in parts)))
    return table(("", "matrix products", "attention", "head", "other, and waiting"), rows)


def decoding_compare() -> str:
    """The engine beside other decoders, with the same weights and prompts."""
    rows, found = [], read("bench-decode-h200.json")["runs"][-1]["rows"]
    for row in found:
        speeds = [f"{row[key]:,.0f}" if key in row else "–" for key in ("tokens_per_s", "tokens_per_s_with_prefill")]
        rows.append((row["what"].replace(KERNELS, "engine, "), row["batch"], *speeds))
    rate = {(row["what"], row["batch"]): row.get("tokens_per_s", 0.0) for row in found}
    ratios = (
        f"{rate[f'{KERNELS}self-refine', n] / rate[f'{KERNELS}autoregressive', n]:.2f} times as fast for {n}"
        for n in sorted({row["batch"] for row in found})
    )
    note = f"Two tokens per forward against autoregressive decoding on the same kernels: {', '.join(ratios)}."
    return f"{table(('', 'requests', 'tokens/s', 'with prefill'), rows)}\n\n{note}"


def speed() -> str:
    """The README's lines of the same measurements."""
    *runs, _ = read("bench-decode-h200.json")["runs"]
    rows = []
    for row in (row for run in runs for row in run["rows"]):
        if row["context"] == 512 and row["what"].endswith("self-refine"):
            kind = "int8" if row["int8"] else "bf16"
            rows.append((row["batch"], kind, f"{row['tokens_per_s']:,.0f}"))
    return table(("requests at once", "weights", "tokens/s"), rows, words=2)


# -- models ----------------------------------------------------------------------------------------------------------


def bundled() -> str:
    """What the bundled model solves, from its card."""
    card = (ROOT / "freda" / "assets" / "mini" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| ([\d,]+) \| ([\d.]+) \| [\d.]+ \| ([\d.]+) \|", card, re.M)
    header = ("the bundled model, held-out questions", *(f"{kind} ({n})" for kind, n, _, _ in rows))
    solved = ("solved", *(f"{right}%" for _, _, right, _ in rows))
    return table(header, [solved, ("tokens per forward", *(tpf for *_, tpf in rows))])


def demo() -> str:
    """The demo's models with 4 passes, from the sweep over them."""
    found = read("demo-sweep.json")
    rows = []
    for name, system in found["config"]["system"].items():
        wanted = {key: system[key] for key in ("threshold", "width", "tau")}
        points = [p for p in found["points"] if p["system"] == name and wanted.items() <= p["setting"].items()]
        point = max(points, key=lambda p: p["setting"]["passes"] if p["setting"]["passes"] <= system["passes"] else 0)
        score = f"{100 * point['accuracy']:.1f} ± {100 * point['standard_error']:.1f}"
        rows.append((name, point["setting"]["passes"], score, f"{point['tpf']:.2f}"))
    return table(("method", "passes", "exact match", "tokens per forward"), rows)


def files() -> str:
    """Every file of the package with the first line of its docstring, folder by folder."""
    found: dict[Path, list[tuple[str, str]]] = {}
    for path in sorted((ROOT / "freda").rglob("*.py")):
        if path.name != "__init__.py":
            about = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            cells = (f"`{path.name}`", about.partition("\n")[0].replace("|", "\\|"))
            found.setdefault(path.parent.relative_to(ROOT), []).append(cells)
    return "\n\n".join(table((f"`{folder}/`", ""), rows, words=2) for folder, rows in found.items())


# -- the pages -------------------------------------------------------------------------------------------------------

BLOCKS: dict[str, Callable[[], str]] = {
    "training/steps": training_steps,
    "training/kernels": training_kernels,
    "training/compare": training_compare,
    "decoding/traffic": decoding_traffic,
    "decoding/one": decoding_one,
    "decoding/speed": decoding_speed,
    "decoding/kernels": decoding_kernels,
    "decoding/compare": decoding_compare,
    "speed": speed,
    "bundled": bundled,
    "demo": demo,
    "files": files,
}


def blocks() -> dict[str, Callable[[], str]]:
    """Every block by name, the tables of the experiments among them."""
    report = runpy.run_path(str(ROOT / "experiments" / "mini" / "report.py"))
    return BLOCKS | {f"mini/{name}": lambda name=name: report["block"](name) for name in report["TABLES"]}  # type: ignore[misc]


def filled(page: str, known: dict[str, Callable[[], str]]) -> str:
    """The page with its marked numbers made again."""
    return MARKED.sub(lambda found: f"{found[1]}{known[found[2]]()}\n{found[3]}", page)


if __name__ == "__main__":
    made = blocks()
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        path.write_text(filled(text, made), encoding="utf-8")
