"""The benchmarks as tasks of lm-evaluation-harness, over the same local files: an oracle for `freda.eval.tasks`.

Prompts and grading are stated a second time, in lm_eval's terms: its templates build the prompts, its samplers choose
the exemplars, its filters find the answers and its metrics count them. None of it is shared with `freda.eval.tasks`, so
equal prompts and equal verdicts check both. Shared are the reading of rows, the numbers that a setting consists of
(shots, stop strings, lengths), the sandbox, and the processes around math-verify.

Datasets are made in memory: nothing is fetched, and nothing stays in a cache. Where a task is not the one that lm_eval
has under a like name, the function that makes it says how.
"""

from __future__ import annotations

import csv
import itertools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from freda.data.config import CorpusConfig
from freda.data.mini import questions_of, settings_in
from freda.data.mini_code import tests_of
from freda.data.synthetic import problems_of
from freda.eval.harness import metrics_of, silence, simple_evaluate
from freda.eval.sandbox.run import Job, check_ready, free_names, run_many
from freda.eval.tasks import TASKS
from freda.eval.tasks.code import humanevalplus_job
from freda.eval.tasks.mathematics import LONGEST, in_workers, same
from freda.eval.tasks.task import Example, json_rows

Row = Mapping[str, Any]
Config = dict[str, Any]  # what a YAML file of lm_eval holds

LETTERS = ["A", "B", "C", "D"]
STRICT = r"[Tt]he answer is:?\s*\$?(-?[\d.,]*\d)"
NUMBER = r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+"
NOISE = [",", r"(?<![\d.])0+(?=\d)", r"\.0*$"]  # what may differ between two spellings of a whole number
LAST_ANSWER = r"(?s)The answer is(?!.*The answer is)\s*(-?[0-9]{1,3}(?:,[0-9]{3})+|-?[0-9]+)(?![.,]?\w)"
IN_BRACES = r"(?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*\})*"  # braces in braces, four deep
FINAL = (  # behind the first "final answer is", or else in the last \boxed{}
    r"(?s)\A(?:.*?(?i:final answer is):?\s*(.+?)(?:\.\s*(?i:I hope)|\.?\s*\Z)"
    rf"|.*\\boxed\{{({IN_BRACES})\}}(?!.*\\boxed\{{))"
)


class HarnessTask(NamedTuple):
    """How lm_eval asks one of our benchmarks."""

    configs: Callable[[Path, int], list[Config]]  # of a data folder and a number of questions; parts in their order
    metric: str  # that is compared with ours, and the filter before it


# -- answers that are generated --------------------------------------------------------------------------------------


def _gsm8k(folder: Path, count: int) -> list[Config]:
    """lm_eval's `gsm8k_cot` has eight exemplars, no stop at an empty line, and 256 tokens; it looks for a number only
    behind "The answer is " in these letters, and compares texts."""
    samples = json.loads((folder / "fewshot" / "gsm8k_cot_8shot.json").read_text(encoding="utf-8"))["samples"]
    config = {
        **_generated("gsm8k"),
        **_rows(test=json_rows(folder / "gsm8k" / "test.jsonl", ())[:count]),
        "doc_to_text": "Q: {{question}}\nA:",
        "doc_to_target": "{{answer.split('####')[-1].strip()}}",
        "fewshot_config": {"sampler": "first_n", "samples": samples, "doc_to_target": "{{target}}"},
        "filter_list": [
            _pipeline("strict-match", {"function": "regex", "regex_pattern": STRICT}),
            _pipeline("flexible-extract", {"function": "regex", "regex_pattern": NUMBER, "group_select": -1}),
        ],
        "metric_list": [{**_mean("exact_match"), "regexes_to_ignore": NOISE}],
    }
    return [config]


def _math500(folder: Path, count: int) -> list[Config]:
    """lm_eval's `minerva_math500` gives math-verify the whole text, which then takes any last number for the answer
    (the filter `whole-text` here), has 256 tokens, and puts a space, not a line break, before exemplars' solutions."""
    samples = json.loads((folder / "fewshot" / "minerva_math_4shot.json").read_text(encoding="utf-8"))["samples"]
    config = {
        **_generated("math500"),
        **_rows(test=json_rows(folder / "math500" / "test.jsonl", ())[:count]),
        "doc_to_text": "Problem:\n{{problem}}\n\nSolution:",
        "doc_to_target": "answer",
        "target_delimiter": "\n",
        "fewshot_config": {"sampler": "first_n", "samples": samples, "doc_to_target": "solution"},
        "filter_list": [
            _pipeline(
                "final-answer",
                {"function": "regex", "regex_pattern": FINAL, "fallback": ""},
                {"function": "custom", "filter_fn": _verified},
            ),
            _pipeline("whole-text", {"function": "custom", "filter_fn": _verified_as_a_whole}),
        ],
        **_verdict("math_verify"),
    }
    return [config]


def _verified(responses: Sequence[Sequence[str]], documents: Sequence[Row]) -> list[list[bool]]:
    """A filter of lm_eval: which of the answers are the published ones?"""
    pairs = [(row["answer"], found[0][:LONGEST]) for row, found in zip(documents, responses, strict=True)]
    verdicts = iter(in_workers(same, [pair for pair in pairs if pair[1]]))
    return [[bool(answer and next(verdicts))] for _, answer in pairs]


def _verified_as_a_whole(responses: Sequence[Sequence[str]], documents: Sequence[Row]) -> list[list[bool]]:
    pairs = [(row["solution"], found[0]) for row, found in zip(documents, responses, strict=True)]
    return [[bool(verdict)] for verdict in in_workers(same_as_a_whole, pairs)]


def same_as_a_whole(solution: str, text: str) -> bool:
    """Does math-verify find the same answer in both texts?"""
    from math_verify import parse, verify

    return bool(verify(parse(solution), parse(text)))


def _sums(folder: Path, count: int) -> list[Config]:
    """Nothing like it is in lm_eval."""
    asked = itertools.islice(problems_of(CorpusConfig(**settings_in(folder, "sums")), "test"), count)
    return _word_problems("sums", [{"prompt": one.prompt, "answer": one.answer} for one in asked])


def _mini_math(folder: Path, count: int) -> list[Config]:
    return _word_problems("mini_math", [item._asdict() for item in questions_of("mini_math", folder, count)])


def _word_problems(name: str, rows: Sequence[Row]) -> list[Config]:
    config = {
        **_generated(name),
        **_rows(test=rows),
        "doc_to_text": "prompt",
        "doc_to_target": "answer",
        "filter_list": [_pipeline("strict-match", {"function": "regex", "regex_pattern": LAST_ANSWER})],
        "metric_list": [{**_mean("exact_match"), "regexes_to_ignore": NOISE}],
    }
    return [config]


# -- answers that are executed, in the sandbox and nowhere else ------------------------------------------------------


def _humaneval(folder: Path, count: int) -> list[Config]:
    """lm_eval's own runs programs by `code_eval` of the Hub: in our process's rights, and for three seconds."""
    rows = json_rows(folder / "humaneval" / "HumanEval.jsonl.gz", ())

    def program(row: Row, text: str) -> Job:
        return Job(row["prompt"] + text, f"{row['test']}\ncheck({row['entry_point']})\n")

    return [_executed("humaneval", rows[:count], program, {"doc_to_text": "prompt"})]


def _humaneval_plus(folder: Path, count: int) -> list[Config]:
    """lm_eval's own takes the published test code, which nothing passes for HumanEval/32; here inputs and reference."""
    mixed = ("base_input", "plus_input")  # of many types: as text, since a column has one
    rows = [
        {**row, **{name: json.dumps(row[name]) for name in mixed}}
        for row in json_rows(folder / "humanevalplus" / "HumanEvalPlus.jsonl.gz", mixed)
    ]

    def program(row: Row, text: str) -> Job:
        return humanevalplus_job({**row, **{name: json.loads(row[name]) for name in mixed}}, text)

    return [_executed("humaneval_plus", rows[:count], program, {"doc_to_text": "prompt"})]


def _mbpp(folder: Path, count: int) -> list[Config]:
    """lm_eval's own shows three tests of every row, however many it has, stops at [DONE] only, leaves the set-up code
    out, and has 256 tokens."""
    rows = json_rows(folder / "mbpp" / "mbpp.jsonl", ())
    texts = {
        "doc_to_text": "You are an expert Python programmer, and here is your task: {{text}} Your code should pass "
        "these tests:\n\n{{test_list | join('\\n')}}\n[BEGIN]\n",
        "target_delimiter": "",
        "fewshot_config": {
            "sampler": "first_n",
            "samples": [row for row in rows if row["task_id"] in (2, 3, 4)],
            "doc_to_target": "{{code}}\n[DONE]",
        },
    }

    def program(row: Row, text: str) -> Job:
        tests = "\n".join((row["test_setup_code"], *row["test_list"], ""))
        return Job(text, tests, free_names(tests, row["code"]))

    return [_executed("mbpp", [row for row in rows if 11 <= row["task_id"] <= 510][:count], program, texts)]


def _mini_code(folder: Path, count: int) -> list[Config]:
    """Nothing like it is in lm_eval; the rows are ours with their tests."""
    items = questions_of("mini_code", folder, count)
    rows = [{"task_id": str(number), **one._asdict(), "test": tests_of(one)} for number, one in enumerate(items)]

    def program(row: Row, text: str) -> Job:
        return Job(row["prompt"] + text, f"{row['test']}\ncheck({row['entry_point']})\n")

    return [_executed("mini_code", rows, program, {"doc_to_text": "prompt"})]


def _executed(name: str, rows: Sequence[Row], program: Callable[[Row, str], Job], texts: Config) -> Config:
    """A task whose answers pass if they run to the end of their tests."""

    def run(responses: Sequence[Sequence[str]], documents: Sequence[Row]) -> list[list[bool]]:
        jobs = [program(row, found[0]) for row, found in zip(documents, responses, strict=True)]
        return [[verdict.passed] for verdict in run_many(jobs)]

    executing = _pipeline("sandbox", {"function": "custom", "filter_fn": run})
    answer = {"doc_to_target": "task_id", "filter_list": [executing], **_verdict("pass@1")}
    return {**_generated(name), **_rows(test=rows), **answer, **texts}


# -- answers that are chosen -----------------------------------------------------------------------------------------


def _mmlu(folder: Path, count: int) -> list[Config]:
    """A task for each subject, as in lm_eval, which sets no number of shots. `count` cuts through all of them in their
    order, and not each of them."""
    configs, left = [], count
    for path in sorted((folder / "mmlu" / "test").glob("*_test.csv")):
        subject = path.name.removesuffix("_test.csv")
        rows = _questions(path)[:left]
        left -= len(rows)
        if rows:
            dev = _questions(folder / "mmlu" / "dev" / f"{subject}_dev.csv")
            about = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}."
            configs.append({**_chosen("mmlu", about), **_rows(test=rows, dev=dev), "task": f"mmlu_{subject}"})
    return configs


def _questions(path: Path) -> Sequence[Row]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, ("question", *LETTERS, "answer")))


def _gpqa_diamond(folder: Path, count: int) -> list[Config]:
    """lm_eval's `gpqa_diamond_n_shot` scores all 198 rows with random ones of them as exemplars, words the question
    otherwise, and shuffles the options of all rows by one generator, so that they change with the rows asked."""
    with open(folder / "gpqa" / "gpqa_diamond.csv", encoding="utf-8", newline="") as file:
        rows = [_shuffled(row, number) for number, row in enumerate(csv.DictReader(file))]
    shots = TASKS["gpqa_diamond"].shots
    about = "The following are multiple choice questions (with answers) about science."
    return [{**_chosen("gpqa_diamond", about), **_rows(test=rows[shots : shots + count], dev=rows[:shots])}]


def _shuffled(row: Row, number: int) -> Row:
    """The row with its options under letters; the right one is published first."""
    names = ["Correct Answer", *(f"Incorrect Answer {index}" for index in (1, 2, 3))]
    random.Random(number).shuffle(names)
    options = {letter: row[name].strip() for letter, name in zip(LETTERS, names, strict=True)}
    return {"question": row["Question"], **options, "answer": LETTERS[names.index("Correct Answer")]}


def _mini_logic(folder: Path, count: int) -> list[Config]:
    rows = [item._asdict() for item in questions_of("mini_logic", folder, count)]
    plain = {"description": "", "doc_to_text": "prompt"}
    return [{**_chosen("mini_logic", ""), **_rows(test=rows, dev=rows[:1]), **plain}]


def _chosen(name: str, about: str) -> Config:
    return {
        "task": name,
        "output_type": "multiple_choice",
        "description": f"{about}\n\n",
        "doc_to_text": "{{question.strip()}}\nA. {{A}}\nB. {{B}}\nC. {{C}}\nD. {{D}}\nAnswer:",
        "doc_to_choice": LETTERS,
        "doc_to_target": "answer",
        "test_split": "test",
        "fewshot_split": "dev",
        "fewshot_config": {"sampler": "first_n"},
        "num_fewshot": TASKS[name].shots,
        "metric_list": [_mean("acc")],
    }


# -- parts of configs ------------------------------------------------------------------------------------------------


def _generated(name: str) -> Config:
    task = TASKS[name]
    length = {"until": list(task.stops), "max_gen_toks": task.max_new_tokens}
    return {
        "task": name,
        "output_type": "generate_until",
        "generation_kwargs": {**length, "do_sample": False, "temperature": 0.0},
        "test_split": "test",
        "num_fewshot": task.shots,
    }


def _rows(**splits: Sequence[Row]) -> Config:
    """The part of a config that says where rows are from: from memory."""

    def load(**_: Any) -> dict[str, Any]:
        from datasets import Dataset

        return {name: Dataset.from_list(rows) for name, rows in splits.items()}

    return {"custom_dataset": load}


def _pipeline(name: str, *steps: Config) -> Config:
    return {"name": name, "filter": [*steps, {"function": "take_first"}]}


def _mean(metric: str) -> Config:
    return {"metric": metric, "aggregation": "mean", "higher_is_better": True}


def _verdict(metric: str) -> Config:
    """A metric for filters that have found the verdict already."""

    def process_results(document: Row, results: Sequence[bool]) -> dict[str, float]:
        return {metric: float(results[0])}

    return {"metric_list": [_mean(metric)], "process_results": process_results}


HARNESS_TASKS: dict[str, HarnessTask] = {
    "mmlu": HarnessTask(_mmlu, "acc,none"),
    "gpqa_diamond": HarnessTask(_gpqa_diamond, "acc,none"),
    "gsm8k": HarnessTask(_gsm8k, "exact_match,strict-match"),
    "math500": HarnessTask(_math500, "math_verify,final-answer"),
    "humaneval": HarnessTask(_humaneval, "pass@1,sandbox"),
    "humaneval_plus": HarnessTask(_humaneval_plus, "pass@1,sandbox"),
    "mbpp": HarnessTask(_mbpp, "pass@1,sandbox"),
    "sums": HarnessTask(_sums, "exact_match,strict-match"),
    "mini_math": HarnessTask(_mini_math, "exact_match,strict-match"),
    "mini_code": HarnessTask(_mini_code, "pass@1,sandbox"),
    "mini_logic": HarnessTask(_mini_logic, "acc,none"),
}


# -- asking ------------------------------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """What lm_eval made of one of our benchmarks."""

    prompts: list[str]
    outputs: list[str]  # texts, or chosen letters
    verdicts: list[bool]
    accuracy: float
    metrics: dict[str, float | None]


def ask(lm: Any, name: str, data: Path, examples: Sequence[Example]) -> Asked:
    """Let lm_eval ask as many questions of a benchmark as there are `examples`."""
    if HARNESS_TASKS[name].metric.endswith(",sandbox"):
        check_ready()  # says what the kernel does not grant, before lm_eval is made silent
    with silence():
        found = simple_evaluate(lm, _tasks(name, data, len(examples)))
    metric, _, chosen = HARNESS_TASKS[name].metric.partition(",")
    choices, rows = TASKS[name].choices, []
    for part in found["samples"].values():
        for sample in sorted((one for one in part if one["filter"] == chosen), key=lambda one: one["doc_id"]):
            first = [answers[0] for answers in sample["resps"]]
            output = choices[max(range(len(first)), key=lambda index: first[index][0])] if choices else first[0]
            rows.append((sample["arguments"][0][0], output, bool(sample[metric])))
    metrics = metrics_of(name, found)
    prompts, outputs, verdicts = (list(column) for column in zip(*rows, strict=True))
    return Asked(prompts, outputs, verdicts, metrics[HARNESS_TASKS[name].metric] or 0.0, metrics)


def _tasks(name: str, data: Path, count: int) -> list[Any]:
    """One of our tasks in lm_eval's terms; parts make a group whose metric counts every question once."""
    from lm_eval.api.group import Group
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.config.group import GroupConfig

    parts = [ConfigurableTask(config=config) for config in HARNESS_TASKS[name].configs(data, count)]
    if parts[0].task_name == name:
        return parts
    metric = HARNESS_TASKS[name].metric.partition(",")[0]
    group = Group.from_config(GroupConfig(name, aggregate_metric_list=[{"metric": metric, "weight_by_size": True}]))
    for part in parts:
        group.add(part)
    return [group]
