"""How MLflow's pages show the experiment: its kind, and the saved views of its runs that the button `Views` lists.

MLflow keeps both as tags of the experiment. A saved view is the state of the page that its own "Save view" writes.
"""

import json
from typing import Any

from mlflow.entities import Experiment
from mlflow.tracking import MlflowClient

from pipeline.lineage.headlines import HEADLINES

LINEAGE, REINFORCEMENT, SUPERVISED = "lineage", "reinforcement", "supervised"
_VIEW = "mlflow.sharedViewState."
_CREATED_MS = 1767225600000  # a view has a date: the same for all, so that writing it again changes nothing

_NAME = "attributes.`Run Name`"
_LINKS = ("attributes.`Models`", "attributes.`Dataset`", "tags.`dvc.experiment`")
_REINFORCEMENT_CHARTS = {
    "reward": ("reward/mean", "reward/std"),
    "policy": ("policy/ref_kl", "policy/entropy", "policy/clip_frac"),
    "rollout": ("rollout/length_mean", "rollout/truncated_frac", "rollout/zero_std_frac"),
    "tool": ("tool/success", "tool/calls_mean"),
}
_SUPERVISED_CHARTS = {
    "val": ("val/loss", "val/accuracy"),
    "train": ("train/loss", "train/lr", "train/grad_norm"),
}


def describe_experiment(client: MlflowClient, experiment: Experiment) -> None:
    """Sets the tags that are not there; a view that somebody has changed in MLflow stays as it is.

    Raises:
        TRACKER_FAULTS: not all is done.
    """
    for key, value in _tags().items():
        if key not in experiment.tags:
            client.set_experiment_tag(experiment.experiment_id, key, value)


def page(experiment_id: str, view: str = LINEAGE) -> str:
    """The path of the page of training runs in a saved view, behind the address of the server."""
    return f"#/experiments/{experiment_id}/runs?workflowType=machine_learning&viewStateShareKey={view}"


def _tags() -> dict[str, str]:
    headlines = list(dict.fromkeys(next(iter(metrics)) for metrics in HEADLINES.values()))
    views = {
        LINEAGE: ("Lineage", _columns([*(f"metrics.`{key}`" for key in headlines), *_LINKS])),
        REINFORCEMENT: ("Reinforcement", _charts("reward/mean", _REINFORCEMENT_CHARTS, ascending=False)),
        SUPERVISED: ("Supervised", _charts("val/loss", _SUPERVISED_CHARTS, ascending=True)),
    }
    return {
        "mlflow.experimentKind": "custom_model_development",
        "mlflow.experiment.primaryMetric.name": "reward/mean",
        **{f"{_VIEW}{key}": _envelope(name, state) for key, (name, state) in views.items()},
    }


def _charts(metric: str, charts: dict[str, tuple[str, ...]], *, ascending: bool) -> dict[str, Any]:
    """Runs of stages that have a metric, best first: charts in the order in which they are read, and what is charted as columns.

    Sorted by date, MLflow would put them below their rebuilds, folded, and draw what is not folded: nothing.
    """
    keys = [key for section in charts.values() for key in section]
    return {
        "searchFilter": f"metrics.`{metric}` > -1e9 and tags.`run.uid` LIKE '%'",
        "orderByKey": f"metrics.`{metric}`",
        "orderByAsc": ascending,
        **_columns([*(f"metrics.`{key}`" for key in keys), *_LINKS]),
        "compareRunCharts": [_chart(section, key) for section, keys in charts.items() for key in keys],
        "compareRunSections": [
            {"uuid": section, "name": section, "display": True, "isReordered": True, "deleted": False, "isGenerated": True}
            for section in charts
        ],
        "isAccordionReordered": True,
    }


def _columns(chosen: list[str]) -> dict[str, Any]:
    """Columns beside those that are always there: name, which needs room, start and duration."""
    order = [_NAME, "runDateAndNestInfo", "duration", *chosen]
    return {"selectedColumns": chosen, "columnOrder": order, "columnWidths": {_NAME: 260}}


def _chart(section: str, key: str) -> dict[str, Any]:
    return {
        "uuid": key,
        "type": "LINE",
        "metricKey": key,
        "selectedMetricKeys": [key],
        "metricSectionId": section,
        "displayName": key.rpartition("/")[2],
        "xAxisKey": "step",
        "useGlobalXaxisKey": True,
        "lineSmoothness": 0,
        "useGlobalLineSmoothing": True,
        "isGenerated": True,
        "deleted": False,
    }


def _envelope(name: str, state: dict[str, Any]) -> str:
    kept = json.dumps(state, separators=(",", ":"))
    return json.dumps({"name": name, "createdAt": _CREATED_MS, "updatedAt": _CREATED_MS, "state": kept}, separators=(",", ":"))
