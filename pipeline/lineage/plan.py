"""What `dvc repro` would run, and why: `dvc status` names the stages whose own inputs changed, not those behind them."""

import difflib
import hashlib
import json
import os
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import ParamsError, PipelineError
from pipeline.lineage.causes import FIRST, code_causes, file_causes, param_causes
from pipeline.lineage.code_hash import code_files
from pipeline.lineage.history import flat_params
from pipeline.lineage.plan_params import ParamsReader, is_params, overridden
from pipeline.tracking.home import home

if TYPE_CHECKING:
    from dvc.output import Output
    from dvc.repo import Repo
    from dvc.stage import PipelineStage
    from networkx import DiGraph


IN_PROCESS = threading.Lock()
"""DVC is not made for several threads, and the members of a sweep plan at any time."""


class Verdict(StrEnum):
    """What becomes of a stage."""

    RUNS = "runs"
    """Its command, a parameter, an input or an output changed. Where stages before it run, what they make may be in the run
    cache with its results: then it is restored."""
    RESTORED = "restored"
    """The same, but DVC's run cache has the results of these very inputs."""
    MAY_RUN = "may run"
    """A stage before it runs; it runs too unless what it reads comes out unchanged."""
    UP_TO_DATE = "up to date"


@dataclass(frozen=True, slots=True)
class Planned:
    """A stage of the plan.

    Attributes:
        stage: its name, such as `data@pretrain`.
        causes: what changed, such as `grpo.lr 1e-4 → 2e-4`; for `MAY_RUN` what it waits for.
        parents: the stages whose outputs it reads.
        recipe: a digest of its command, parameters and inputs where these are known and it runs: equal ones give the same result.
        params: its parameters by full key.
        inputs: digest by path of what it reads; None where a stage before it decides, or there is no such file.
    """

    stage: str
    verdict: Verdict
    causes: list[str]
    parents: list[str]
    recipe: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, str | None] = field(default_factory=dict)


def read_plan(
    root: Path, targets: Sequence[str] = (), *, unsettled: Collection[str] = (), overrides: Mapping[str, Any] | None = None
) -> list[Planned]:
    """The targets (all stages when left out) and everything before them, from the files as they are now.

    Parents come first, and otherwise stages in the order of dvc.yaml.

    What `code` is going to write is known before it runs, and so is what the run cache restores: the stages behind are judged
    by that.

    Args:
        root: the repository.
        targets: names of stages; `data` is every `data@SET`.
        unsettled: stages that are running at this moment: their outputs say nothing yet, so those behind them may run.
        overrides: values in place of those in params.yaml, by key; whether they are allowed is `check_overrides`'s to say.

    Raises:
        ParamsError: there is no such target.
        PipelineError: dvc.yaml or dvc.lock cannot be read.
    """
    from dvc.repo import Repo  # slow to import, and only who plans needs it
    from dvc.repo.reproduce import get_active_graph, plan_repro

    with (
        faults_of_dvc(root),
        IN_PROCESS,
        Repo(os.fspath(root), _wait_for_lock=True) as repo,
        overridden(repo, root, overrides or {}),
    ):
        with repo.lock:  # DVC writes dvc.lock in place: without it half of one may be read
            graph = get_active_graph(repo.index.graph)
        chosen = [stage for target in targets for stage in _named(graph, target)]
        planner = _Planner(root, repo, unsettled, ParamsReader(repo))
        for stage in _in_order(repo, graph, plan_repro(graph, chosen or None)):
            planner.add(stage, list(graph.successors(stage)))
        return list(planner.planned.values())


@contextmanager
def faults_of_dvc(root: Path) -> Iterator[None]:
    """Makes one line of what DVC finds wrong with dvc.yaml, dvc.lock or its settings.

    Raises:
        PipelineError: in place of a `DvcException` of the block, or of an `OSError`.
    """
    from dvc.exceptions import DvcException

    try:
        yield
    except DvcException as error:
        mend = "; `git checkout dvc.lock` brings the committed one back, DVC's cache what was made since"
        raise PipelineError(f"{root}: {' '.join(str(error).split())}{mend if 'dvc.lock' in str(error) else ''}") from None
    except OSError as error:
        raise PipelineError(f"{error.filename or root}: cannot be read: {error.strerror or error}") from None


def _in_order(repo: "Repo", graph: "DiGraph", stages: Iterable["PipelineStage"]) -> Iterator["PipelineStage"]:
    """Parents first, else as dvc.yaml has them: DVC's own order of independent stages changes with Python's hash seed."""
    import networkx

    place = {stage.addressing: index for index, stage in enumerate(repo.index.stages)}
    chosen = graph.subgraph(stages).reverse(copy=False)  # DVC's edges point to what a stage reads
    yield from networkx.lexicographical_topological_sort(chosen, key=lambda stage: place[stage.addressing])


def _named(stages: Iterable["PipelineStage"], target: str) -> list["PipelineStage"]:
    found = [stage for stage in stages if target in (stage.name, stage.name.partition("@")[0])]
    if not found:
        near = difflib.get_close_matches(target, [stage.name for stage in stages], n=1)
        hint = f"did you mean `{near[0]}`?" if near else "`dvc stage list` names them"
        raise ParamsError(f"{target!r}: dvc.yaml has no such stage; {hint}")
    return found


@dataclass
class _Planner:
    """Judges stages, parents first.

    Attributes:
        planned: the judged ones by name.
        coming: digest by path of what stages before will have written anew; None where nobody knows yet.
    """

    root: Path
    repo: "Repo"
    unsettled: Collection[str]
    params: ParamsReader
    planned: dict[str, Planned] = field(default_factory=dict)
    coming: dict[str, str | None] = field(default_factory=dict)

    def add(self, stage: "PipelineStage", before: Sequence["PipelineStage"]) -> None:
        """Judges a stage whose parents are judged."""
        parents = sorted(parent.name for parent in before)
        if stage.name in self.unsettled:
            self.planned[stage.name] = Planned(stage.name, Verdict.RUNS, ["is running"], parents)
            self.coming |= {out.fs_path: None for out in stage.outs}
            return
        unknown = {parent.name for parent in before if any(self.coming.get(out.fs_path, "") is None for out in parent.outs)}
        waits = [name for name in parents if name in unknown and self._reads(stage, before, name)]
        causes = list(self._causes(stage))
        verdict, recipe = Verdict.UP_TO_DATE, None
        if causes:
            verdict = Verdict.RUNS
            if not waits and self._settle_inputs(stage):
                recipe = _recipe(stage)
                if (entry := self._in_run_cache(stage)) is not None:
                    verdict = Verdict.RESTORED
                    digests = {out["path"]: out["md5"] for out in entry["outs"]}
                    self.coming |= {out.fs_path: digests[out.def_path] for out in stage.outs}
        elif waits:
            verdict, causes = Verdict.MAY_RUN, [f"unless {name} comes out unchanged" for name in waits]
        if verdict in (Verdict.RUNS, Verdict.MAY_RUN):
            known = self._code if stage.name == "code" else {}
            self.coming |= {out.fs_path: _md5(known[out.def_path]) if out.def_path in known else None for out in stage.outs}
        params = {key: value for dep in stage.deps if is_params(dep) for key, value in flat_params(self.params.read(dep))}
        inputs = {dep.def_path: self._digest(dep, bool(causes)) for dep in stage.deps if not is_params(dep)}
        self.planned[stage.name] = Planned(stage.name, verdict, causes, parents, recipe, params, inputs)

    @cached_property
    def _code(self) -> dict[str, str]:
        """Text by path of what stage `code` writes for the code as it is."""
        return {f"data/code/{name}": text for name, text in code_files(self.root).items()}

    def _digest(self, dep: "Output", changed: bool) -> str | None:
        """Of an input as it will be read: as a stage before it leaves it, else, where its stage `changed`, as it lies there."""
        if dep.fs_path in self.coming:
            return self.coming[dep.fs_path]
        digest: str | None = dep.hash_info.value if not changed else dep.get_hash().value if dep.exists else None
        return digest

    def _reads(self, stage: "PipelineStage", before: Sequence["PipelineStage"], name: str) -> bool:
        """Whether the stage reads something of a parent that nobody knows yet."""
        outs = {out.fs_path for parent in before if parent.name == name for out in parent.outs}
        return any(dep.fs_path in outs and self.coming.get(dep.fs_path, "") is None for dep in stage.deps)

    def _causes(self, stage: "PipelineStage") -> Iterator[str]:
        """What differs from dvc.lock, what nobody knows yet left out."""
        if not any(entry.hash_info for entry in [*stage.deps, *stage.outs]):
            yield FIRST
            return
        if stage.cmd_changed:
            yield "command changed"
        for dep in stage.deps:
            if is_params(dep):
                yield from param_causes(dep.hash_info.value if dep.hash_info else {}, self.params.read(dep))
            else:
                yield from self._coming_causes(dep) if dep.fs_path in self.coming else self._file_causes(dep)
        gone: dict[str, list[str]] = {}
        for out in stage.outs:
            for path, change in out.status().items():
                gone.setdefault(_plainly(change), []).append(path)
        for change, paths in gone.items():
            yield f"{paths[0]} {change}" + (f", and {len(paths) - 1} more" if len(paths) > 1 else "")

    def _coming_causes(self, dep: "Output") -> Iterator[str]:
        digest, before = self.coming[dep.fs_path], dep.hash_info.value
        if digest is None or digest == before:
            return
        if dep.def_path in self._code and before is not None:
            yield from code_causes(self.root, before, json.loads(self._code[dep.def_path]))
        else:
            yield f"{dep.def_path} {'modified' if before else 'new'}"

    def _file_causes(self, dep: "Output") -> Iterator[str]:
        for path, change in dep.status().items():
            if change == "modified" and dep.hash_info.value:
                yield from file_causes(self.root, home(self.root), path, dep.hash_info.value)
            else:
                yield f"{path} {_plainly(change)}"

    def _settle_inputs(self, stage: "PipelineStage") -> bool:
        """Gives the stage the digests of the inputs that it is going to read; False where one is missing."""
        from dvc.exceptions import DvcException
        from dvc_data.hashfile.hash_info import HashInfo
        from dvc_data.hashfile.meta import Meta

        for dep in stage.deps:
            try:
                if is_params(dep):
                    values = self.params.read(dep)
                    if values.keys() < set(dep.params):
                        return False
                    dep.hash_info = HashInfo("params", values)  # type: ignore[arg-type]  # DVC keeps them there
                elif (digest := self.coming.get(dep.fs_path)) is not None:
                    dep.hash_info, dep.meta = HashInfo("md5", digest), Meta()  # the meta of before has the digest, too
                    dep.get_hash = partial(HashInfo, "md5", digest)  # type: ignore[method-assign]  # the file may be gone
                else:
                    dep.save()
            except DvcException:  # the stage itself will say so
                return False
        return True

    def _in_run_cache(self, stage: "PipelineStage") -> Mapping[str, Any] | None:
        """Lock entry of the results that DVC would restore for the settled inputs; None where there is none."""
        from dvc.stage import PipelineStage, create_stage
        from dvc.stage.cache import _can_hash
        from dvc.stage.loader import StageLoader

        if not _can_hash(stage):  # such as gate, which has no outputs: DVC has no key for it
            return None
        entry = self.repo.stage_cache._load(stage)  # what `restore` looks up, which does not say what it found
        if entry is None:
            return None
        outs = [out["path"] for out in entry["outs"]]
        found = create_stage(PipelineStage, repo=self.repo, path=stage.path, cmd=entry["cmd"], wdir=stage.wdir, outs=outs)
        StageLoader.fill_from_lock(found, entry)
        return entry if found.outs_cached() else None


def _plainly(change: str) -> str:
    """DVC says `deleted` of everything that is not there; in a new clone it never was."""
    return "missing" if change == "deleted" else change


def _recipe(stage: "PipelineStage") -> str:
    """What DVC's run cache looks results up by, as a digest."""
    from dvc.stage.serialize import to_single_stage_lockfile

    known = to_single_stage_lockfile(stage)
    recipe = [known.get("cmd"), known.get("deps"), known.get("params"), sorted(out.def_path for out in stage.outs)]
    return hashlib.sha256(json.dumps(recipe, default=str).encode()).hexdigest()[:16]


def _md5(text: str) -> str:
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
