"""A disk that fills up: one clear line, the save before it, and the same command goes on once there is space again."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.trainers import Lineage, Moment, fill_disk, memory_folder, run_folders, start
from test_kills import Result

from pipeline.tracking.run_folder import RunFolder, read_json
from pipeline.tracking.space import _trained_bytes

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

SETTINGS = {"runtime.save_every_s": 0.001, "pretrain": {"epochs": 2, "batch_size": 8, "val_every": 5}}
FILLED = {
    "in a save": Moment("pipeline.tracking.saves:_ChecksumWriter.write", 900, fault="fill the disk"),
    "at a save's sidecar": Moment("pipeline.tracking.saves:write_json", 3, fault="fill the disk"),
    "at a line of metrics": Moment("pipeline.tracking.recorder:JsonLines.append", 8, fault="fill the disk"),
    "at the checkpoint": Moment("pipeline.checkpoint.files:write_atomically", 1, fault="fill the disk"),
    "at the curve": Moment("pipeline.curves:_read_lines", 1, fault="fill the disk"),
    "at exit.json": Moment("pipeline.stage:write_json", 1, fault="fill the disk"),
}


@pytest.fixture(scope="module")
def lineage() -> Iterator[Lineage]:
    with memory_folder() as folder:
        yield Lineage(folder / "lineage", SETTINGS)


@pytest.fixture(scope="module")
def twin(lineage: Lineage) -> Result:
    root = lineage.copy_for("pretrain", lineage.project.root.parent / "twin", {}).root
    trainer = start(root, "pretrain")
    assert trainer.wait() == 0, trainer.said()
    return Result.of(root, "pretrain")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder that is a disk of 24 MB."""
    folder = tmp_path / "project"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(folder)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("where", FILLED)
def test_a_full_disk_costs_at_most_the_steps_since_the_last_save(lineage: Lineage, twin: Result, disk: Path, where: str) -> None:
    root = lineage.copy_for("pretrain", disk, {}).root
    trainer = start(root, "pretrain", at=FILLED[where])
    assert trainer.wait() == 8, trainer.said()
    first, *lines = trainer.said().splitlines()
    assert "(new)" in first and len(lines) == 1 and lines[0].startswith("pretrain: ") and "no space left; free some" in lines[0]
    (folder,) = map(RunFolder, run_folders(root, "pretrain"))
    before = folder.commits()
    assert before and read_json(folder.exit).get("code") in (8, None)
    (root / "filler").unlink()
    again = start(root, "pretrain")
    assert again.wait() == 0, again.said()
    assert f"(resumes at step {before[0]})" in again.said()
    assert Result.of(root, "pretrain") == twin


def test_too_small_a_disk_is_found_before_training(lineage: Lineage, disk: Path) -> None:
    root = lineage.copy_for("pretrain", disk, {}).root
    fill_disk(root, leave=200_000)
    trainer = start(root, "pretrain")
    assert trainer.wait() == 8
    (line,) = trainer.said().splitlines()
    assert "needs about" in line and "0.2 MB are free; `python -m pipeline gc` frees some, or lower runtime.keep_saves=2" in line
    (exit_file,) = (root / ".runs/pretrain").glob("*/*/exit.json")
    assert read_json(exit_file)["code"] == 8 and read_json(root / ".runs/pretrain/exit.json")["code"] == 8
    (root / "filler").unlink()
    assert start(root, "pretrain").wait() == 0


@pytest.mark.parametrize(("stage", "least"), [("pretrain", 0.9), ("lora", 0.0), ("ppo", 0.9)])
def test_the_estimate_is_what_is_written(lineage: Lineage, tmp_path: Path, stage: str, least: float) -> None:
    """Of adapters it is what all matrices would need, and not all are adapted."""
    project = lineage.copy_for(stage, tmp_path / stage, {})
    assert start(project.root, stage).wait() == 0
    (folder,) = map(RunFolder, run_folders(project.root, stage))
    state = folder.state(folder.commits()[0])
    params = read_json(folder.about)["params"]
    names = [path.relative_to(project.root) for path in (project.root / "checkpoints").glob("*.pth") if path.stem != stage]
    weights = _trained_bytes(stage, project.root, params, names)
    expected = 3 * weights * (2 if stage == "ppo" else 1)
    assert least * expected < state.stat().st_size < 1.1 * expected + 100_000  # names and headers weigh much in a tiny model
