"""What `check` accepts, stages can begin with: their own scripts run on tiny data, up to their first optimizer steps.

`check` and the stages read params.yaml by the same function; what it accepts must therefore end in a first step, or in one line
that says what is wrong with the data or the figures, never in a traceback and never for ever.
"""

import copy
import importlib
import math
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from test_evaluation import DEPS, make_repository
from test_params import NUMBERS, TREE, as_given, changed
from tiny_runs import MemoryRecorder, chats, make_config, make_set, pairs

from pipeline.data.encode import encode_set
from pipeline.data.prepare import prepare
from pipeline.errors import ParamsError, PipelineError
from pipeline.evaluation import examiner, report
from pipeline.model.config import ModelConfig
from pipeline.model.rope import rope_frequencies
from pipeline.model.transformer import CausalLM
from pipeline.params import Params, parse_params
from pipeline.params.sizes import num_parameters
from pipeline.rollout.torch_engine import TorchRolloutEngine
from pipeline.training import policy_setup
from pipeline.training.updater import Updater

EXTREMES = {
    int: [-1, 0, 1, 2, 3, 7, 64, 2**31, 2**53, 2**63, 10**30],
    float: [-1.0, 0.0, 5e-324, 1e-300, 0.1, 0.5, 1 - 1e-16, 1.0, 1 + 3e-16, 2.0, 2.0**53, 1e308, math.nan, math.inf, -math.inf],
}
UPDATES = 3  # after so many a stage has begun
LIMIT_S = 120  # a first step takes less than one


class Begun(Exception):
    """A stage has taken its first steps."""


class TooLong(Exception):
    """It has not."""


def bounds(key: str) -> list[Any]:
    """What the schema names as the ends of a key's range."""
    model: Any = Params
    for part in key.split("."):
        field = model.model_fields[part]
        kinds = [field.annotation, *get_args(field.annotation)]
        model = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
    marks, waiting = list(field.metadata), [field.annotation]
    while waiting:
        kind = waiting.pop()
        marks += getattr(kind, "__metadata__", ())
        waiting += [each for each in get_args(kind) if each is not kind]
    marks += [inner for mark in marks for inner in getattr(mark, "metadata", ())]
    return [getattr(mark, name) for mark in marks for name in ("ge", "gt", "le", "lt") if getattr(mark, name, None) is not None]


def tiny_tree() -> dict[str, Any]:
    """micro, with a model and steps so small that a first one takes no time."""
    tree = copy.deepcopy(TREE)
    shape = {name: getattr(make_config(300), name) for name in tree["model"]}
    tree["model"] = shape | {"max_position_embeddings": 1024}
    sampling = {"batch_size": 2, "max_steps": 3, "max_prompt_len": 300, "max_new_tokens": 8, "warmup_steps": 1}
    for name in ("ppo", "grpo", "agent"):
        tree[name] |= sampling | ({"mini_batch_size": 1, "critic_warmup_steps": 1} if name == "ppo" else {"group_size": 2})
    tree["agent"] |= {"max_prompt_len": 800, "max_total_len": 900}
    tree["eval"] |= {"panel_rows": 2, "max_new_tokens": 8}
    tree["data"]["max_dropped_frac"] = 1.0
    tree["runtime"] |= {"threads": 1, "device": "cpu", "dtype": "float32", "mlflow": False, "progress": "off"}
    return tree


BASE = tiny_tree()
YARN = {"factor": 2.0, "original_max_position_embeddings": 512, "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.0}
SCALED = changed("model.rope_scaling", YARN, BASE)


class Run(MemoryRecorder):
    """What `stage_run` gives, in memory."""

    def __init__(self, scratch: Path) -> None:
        super().__init__()
        self.scratch = scratch

    def announce(self, line: str) -> None:
        assert line.isprintable() or "\n" in line


class Workplace:
    """A tiny repository, in which any stage can begin."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tokenizer = make_repository(root)
        make_set(root / "data", "full_sft", chats(12), self.tokenizer)
        make_set(root / "data", "dpo", pairs(16), self.tokenizer)  # in place of long ones
        (root / "reports").mkdir()
        for name in ("dpo", "lora"):
            (root / f"data/code/{name}.json").write_text("{}", encoding="utf-8")

    def begin(self, stage: str, params: Params) -> None:
        """The stage's script, up to its first steps or its outputs.

        Raises:
            Begun: it got there.
        """
        module = importlib.import_module(f"stages.{stage}")
        declared = SimpleNamespace(deps=DEPS, params={"eval": params.eval.model_dump()})
        left = [UPDATES]
        update = Updater.update

        def counted(updater: Updater, *args: Any, **kwargs: Any) -> Any:
            done = update(updater, *args, **kwargs)
            left[0] -= 1
            if not left[0]:
                raise Begun
            return done

        def ends_soon(model: CausalLM, *, stop_ids: Iterable[int], **options: Any) -> TorchRolloutEngine:
            return TorchRolloutEngine(model, stop_ids=[*stop_ids, *range(40, 300, 7)], **options)

        def begun(*_: Any, **__: Any) -> Any:
            raise Begun

        @contextmanager
        def stage_run(*_: Any, **__: Any) -> Iterator[Run]:
            yield Run(self.root / "scratch")

        replaced: dict[str, Any] = {
            "load_params": lambda: params,
            "declaration": lambda *_: declared,
            "stage_run": stage_run,
            "greedy_panel": lambda *_, **__: list,
            "save_model": begun,
            "write_metrics": begun,
            "OUT": self.root / "out",
        }
        with ExitStack() as stack:
            for name, value in replaced.items():
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, value))
            stack.enter_context(mock.patch.object(Updater, "update", counted))
            stack.enter_context(mock.patch.object(policy_setup, "TorchRolloutEngine", ends_soon))
            stack.enter_context(mock.patch.object(examiner, "MODELS", ("full_sft",)))
            stack.enter_context(mock.patch.object(report, "CURVES", {}))
            if too_many(stage, params):
                for name in ("train_group", "train_ppo"):
                    if hasattr(module, name):
                        stack.enter_context(mock.patch.object(module, name, begun))
            module.main()
        raise Begun

    def prepared(self, params: Params) -> None:
        prepare("full_sft", self.root / "data/full_sft.jsonl", self.root / "again/prepared", params.data)
        raise Begun

    def encoded(self, name: str, params: Params) -> None:
        encode_set(
            name,
            self.root / "data/prepared" / name,
            self.root / "again/encoded",
            self.tokenizer,
            max_seq_len=getattr(params, name).max_seq_len,
            max_dropped_frac=params.data.max_dropped_frac,
        )
        raise Begun


def too_many(stage: str, params: Params) -> bool:
    """Whether a step samples more than a test has time for."""
    own = getattr(params, stage, None)
    rounds = getattr(getattr(own, "dynamic_sampling", None), "max_rounds", 0)
    return getattr(own, "group_size", 1) > 32 or rounds > 4


def shapes(params: Params) -> None:
    """What stands for the start of pretrain where the model is too big for a test."""
    config = ModelConfig.from_params(params.model, params.tokenizer.vocab_size)
    assert (rope_frequencies(config) * (config.max_position_embeddings - 1)).isfinite().all()
    raise Begun


def starts(key: str, params: Params, at: Workplace) -> list[Callable[[], None]]:
    """The beginnings of stages that a key decides."""
    section = key.split(".")[0]
    if section == "model":
        model = params.model
        wide = max(model.head_dim * model.max_position_embeddings, num_parameters(model, params.tokenizer.vocab_size)) > 2**22
        deep = model.num_hidden_layers > 16 or model.use_moe and model.num_experts > 16
        return [lambda: shapes(params)] if wide or deep else [lambda: at.begin("pretrain", params)]
    if section == "data":
        return [lambda: at.prepared(params), lambda: at.encoded("full_sft", params)]
    if section == "rewards":
        return [lambda: at.begin("grpo", params), lambda: at.begin("agent", params)]
    found = [lambda: at.begin(section, params)]
    if key.endswith("max_seq_len"):
        found.append(lambda: at.encoded(section, params))
    return found


@contextmanager
def in_time() -> Iterator[None]:
    def end(*_: Any) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


KEYS = [(key, kind) for key, kind, _ in NUMBERS if not key.startswith("runtime.")]  # runtime decides no first step


def values_of(key: str, kind: type) -> list[Any]:
    """The extremes, what lies at the ends of the key's range and next to them, and what the tiny tree has; each once."""
    ends = [kind(end) for end in bounds(key)]
    if kind is int:
        near = [end + by for end in ends for by in (-1, 0, 1)]
    else:
        near = [math.nextafter(end, towards) for end in ends for towards in (-math.inf, end, math.inf)]
    own: Any = SCALED
    for part in key.split("."):
        own = own[part]
    return list(dict.fromkeys([*near, *EXTREMES[kind], own[0] if isinstance(own, list) else own]))


@st.composite
def draws(draw: st.DrawFn) -> dict[str, Any]:
    """One key or two, and what they are given."""
    keys = draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=2, unique=True))
    return {key: draw(st.sampled_from(values_of(key, kind))) for key, kind in keys}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    before = Path.cwd()
    root = tmp_path_factory.mktemp("workplace")
    os.chdir(root)
    yield Workplace(root)
    os.chdir(before)


def try_out(values: dict[str, Any], at: Workplace) -> Counter[str]:
    """Gives the values to `check`, and what it accepts to the stages; how often each end came."""
    seen: Counter[str] = Counter()
    tree = SCALED if any("rope_scaling" in key for key in values) else BASE
    for key, value in values.items():
        tree = changed(key, as_given(key, value), tree)
    try:
        params = parse_params(tree)
    except ParamsError as error:
        assert all(line.startswith("params.yaml: ") and "\n" not in line for line in error.lines)
        return Counter(["refused"])
    for start in (start for key in values for start in starts(key, params, at)):
        try:
            with in_time():
                start()
        except Begun:
            seen["begun"] += 1
        except ParamsError as error:
            raise AssertionError(f"{values}: check accepts, the stage does not: {error}") from error
        except PipelineError as error:  # of the data or the figures, which check does not see
            assert all(line and "\n" not in line for line in error.lines)
            seen[type(error).__name__] += 1
    return seen


def test_what_check_accepts_begins(workplace: Workplace) -> None:
    """Two keys at once, too."""
    seen: Counter[str] = Counter()

    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(values=draws())
    def each(values: dict[str, Any]) -> None:
        seen.update(try_out(values, workplace))

    each()
    assert min(seen["begun"], seen["refused"]) > 10, seen


@pytest.mark.slow
@pytest.mark.parametrize("key", [key for key, _ in KEYS])
def test_a_key_at_its_ends(workplace: Workplace, key: str) -> None:
    """Every key at every extreme, and at both ends of its range and beside them; some 3000 values in all."""
    seen: Counter[str] = Counter()
    for value in values_of(key, dict(KEYS)[key]):
        seen.update(try_out({key: value}, workplace))
    assert seen["refused"] and seen["begun"], seen
