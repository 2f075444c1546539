"""How answers are asked for, and the TOML file of `freda sweep`: what is measured, and of which systems."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from freda.decode.config import DecodeConfig
from freda.errors import require
from freda.sections import build, knob, read_tables, require_at_least

SWEEP_PARTS = ("main", "passes", "pareto", "stability", "tau", "width")


@dataclass(frozen=True, kw_only=True)
class EvalSettings(DecodeConfig):
    """How a benchmark's answers are generated, or chosen."""

    method: str = knob("", "decode with another method than the model's own: NAME, or NAME:KEY=VALUE,...")
    likelihood: Literal["auto", "tokens", "blocks"] = knob(
        "auto",
        "choices by the next-token distributions of the text, or of drafts; auto: the text's in the shifted layout",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        known = self.likelihood in ("auto", "tokens", "blocks")
        require(known, f"likelihood is {self.likelihood!r}; use auto, tokens or blocks")


@dataclass(frozen=True, kw_only=True)
class SystemConfig:
    """`[system.NAME]`: one system of a sweep, a row of its tables and a curve of its figures."""

    models: tuple[str, ...] = knob((), "model or run folders: one, or several trained with different seeds")
    adapters: tuple[str, ...] = knob((), "adapters over the models: one for each, or several over one model")
    data: str = knob("", "folder of benchmark files for this system alone; empty takes --data")
    baseline: bool = knob(False, "the system that others are compared with; at most one")
    passes: int = knob(4, "most passes per block in the main table, K")
    threshold: float = knob(0.9, "commitment threshold in the main table, η")
    width: int = knob(4, "best-of-n: candidates, N")
    tau: float = knob(0.1, "best-of-n: weight of the scorer, τ")
    likelihood: Literal["auto", "tokens", "blocks"] = knob("auto", "choices by the text or by drafts, see freda eval")
    method: str = knob("", "decode with another method than the models' own, see freda eval")

    def __post_init__(self) -> None:
        require(bool(self.models), "models is empty; name one model or run folder, or several")
        odd = f"adapters names {len(self.adapters)}, models {len(self.models)}"
        fit = not self.adapters or len(self.models) in (1, len(self.adapters))
        require(fit, f"{odd}; name one adapter for each model, or one model")
        self.decoding(0)

    def folders(self) -> list[tuple[str, str | None]]:
        """The models of the system, each with the adapter over it, if there is one."""
        if not self.adapters:
            return [(model, None) for model in self.models]
        models = self.models if len(self.models) > 1 else self.models * len(self.adapters)
        return list(zip(models, self.adapters, strict=True))

    def decoding(self, max_new_tokens: int, **changed: Any) -> EvalSettings:
        """The decoding of this system; 0 tokens takes the default length."""
        names = ("passes", "threshold", "width", "tau", "likelihood", "method")
        limit = {"max_new_tokens": max_new_tokens} if max_new_tokens else {}
        return EvalSettings(**{**{name: getattr(self, name) for name in names}, **limit, **changed})


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """`[sweep]`: what `freda sweep` measures with every `[system.NAME]`, and draws."""

    parts: tuple[str, ...] = knob(SWEEP_PARTS, "tables and figures to make, by name")
    tasks: tuple[str, ...] = knob(("gsm8k", "math500", "humaneval", "humaneval_plus"), "benchmarks, see freda eval")
    limit: int = knob(0, "only the first questions of each; 0 asks all")
    passes: tuple[int, ...] = knob((1, 2, 3, 4, 5, 6), "passes, pareto: numbers of passes")
    early_stop_passes: int = knob(3, "passes: most passes with the threshold on; with more, every block gets them all")
    thresholds: tuple[float, ...] = knob((0.5, 0.7, 0.8, 0.9, 0.95, 0.99), "pareto: commitment thresholds")
    taus: tuple[float, ...] = knob((0.0, 0.1, 0.3, 1.0), "tau: weights of the scorer")
    widths: tuple[int, ...] = knob((2, 4), "width: numbers of candidates")
    width_passes: tuple[int, ...] = knob((2, 4), "width: numbers of passes")
    stability_examples: int = knob(200, "stability: questions of each task whose published answers are refined")
    max_new_tokens: int = knob(1024, "most tokens of an answer; a task may set less")
    batch_size: int = knob(64, "questions answered side by side")
    isolation: bool = knob(True, "run programs only where the kernel isolates them; see SECURITY.md")

    def __post_init__(self) -> None:
        unknown = [part for part in self.parts if part not in SWEEP_PARTS]
        require(not unknown, f"sweep.parts has {', '.join(unknown)}; use {', '.join(SWEEP_PARTS)}")
        for name in ("parts", "tasks", "passes", "thresholds", "taus", "widths", "width_passes"):
            require(bool(getattr(self, name)), f"sweep.{name} is empty; name one or more")
        require_at_least(1, self, "sweep", "stability_examples", "batch_size", "max_new_tokens")
        require_at_least(0, self, "sweep", "limit", "early_stop_passes")
        tried: dict[str, Any] = {"passes": (*self.passes, *self.width_passes), "threshold": self.thresholds}
        tried |= {"tau": self.taus, "width": self.widths}
        for name, value in ((name, value) for name, values in tried.items() for value in values):
            DecodeConfig(**{name: value})  # an impossible value is reported now, not after hours of work


@dataclass(frozen=True, kw_only=True)
class SweepFile:
    """A whole file: what is measured, and of which systems."""

    sweep: SweepConfig = SweepConfig()
    system: Mapping[str, SystemConfig] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        require(bool(self.system), "the sweep has no [system.NAME]; name at least one, with its models")
        marked = [name for name, system in self.system.items() if system.baseline]
        require(len(marked) <= 1, f"{' and '.join(marked)} are both a baseline; mark one")


def load_sweep(path: Path, overrides: Iterable[str] = ()) -> SweepFile:
    """The sweep that a TOML file describes, with `section.key=value` overrides applied in order."""
    sweep: SweepFile = build(SweepFile, read_tables(path, overrides), "")
    return sweep
