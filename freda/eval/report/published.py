"""What the paper reports, in percent, to stand beside what we measure. Its models have 4 billion parameters."""

from __future__ import annotations

# Table main_results: the rows that were trained or run by the authors.
TASKS = ("mmlu", "gpqa_diamond", "gsm8k", "math500", "humaneval", "humaneval_plus")
MAIN = {
    "Qwen3-4B-Base": (71.76, 33.68, 84.99, 52.60, 65.24, 57.93),
    "BlockDiff-4B": (64.56, 33.68, 77.33, 50.60, 57.32, 51.83),
    "FReDA-4B (Self-refine)": (69.11, 36.27, 83.55, 51.98, 60.98, 58.54),
    "FReDA-4B (Best-of-N)": (69.11, 36.27, 84.15, 53.00, 63.41, 59.76),
}

# Tables alpha_ablation and bon_width_ablation: mathematics, coding, overall.
PANELS = ("mathematics", "coding", "overall")
PANEL_TASKS = {"mathematics": {"gsm8k", "math500"}, "coding": {"humaneval", "humaneval_plus"}}
SELF_REFINE = (67.77, 59.76, 63.76)
TAU = {0.1: (68.58, 61.59, 65.08), 0.3: (68.58, 61.28, 64.93), 1.0: (68.62, 60.07, 64.34)}
WIDTH = {
    (2, 2): (48.13, 18.60, 33.36),
    (2, 4): (48.82, 19.21, 34.01),
    (4, 2): (68.14, 60.98, 64.56),
    (4, 4): (68.58, 61.59, 65.08),
}

# Figure iter-scaling is described in words only: overall accuracy with one refinement step and after five.
PASSES = {1: 25.9, 5: 56.3}

# Figure pareto-frontier: average speed-up over diffusion baselines at matched accuracy.
SPEED_UP = (1.5, 1.8)
