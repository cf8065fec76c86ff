"""The first token in which the samples of runs differ: by the ids that were sampled, else by those of the text."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import write_run
from tiny_runs import WORDS
from typer.testing import CliRunner

from pipeline.__main__ import app
from pipeline.digests import digest
from pipeline.pages.compare_page import compare_page
from pipeline.reading.compare import Comparison, as_json, compare
from pipeline.reading.samples import Parting
from pipeline.reading.tokens import ids_of_text
from pipeline.rollout.records import StopReason, Trajectory
from pipeline.text.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from pipeline.tracking.rollouts import read_ids, write_rollouts

PROMPT = "<|im_start|>user\nred<|im_end|>\n"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """One to which every word is a token, with the space before it where there is one."""
    train_tokenizer([" ".join(WORDS)] * 3, tmp_path / "data/tokenizer", vocab_size=400, split_digits=True)
    return load_tokenizer(tmp_path / "data/tokenizer")


def runs(root: Path, *texts: str, read: str | None = None) -> list[Path]:
    """A run per text, each with that sample."""
    inputs = {"data/tokenizer": read or digest(root / "data/tokenizer")}
    return [
        write_run(root, number, inputs=inputs, samples=[{"step": 5, "prompt": PROMPT, "completion": text}])
        for number, text in enumerate(texts, start=1)
    ]


def compared(root: Path, count: int = 2) -> Comparison:
    return compare(root, root, [f"mlflow{number}" for number in range(1, count + 1)])


def parting(root: Path, count: int = 2) -> Parting | None:
    (sample,) = compared(root, count).samples
    return sample.parting


def keep(folder: Path, *answers: tuple[list[int], list[int]]) -> None:
    trajectories = [
        Trajectory(prompt, ids, [True] * len(ids), [0.0] * len(ids), [], [], StopReason.EOS) for prompt, ids in answers
    ]
    write_rollouts(folder / "rollouts/00000005.npz", dict(enumerate(trajectories)))


def test_ids_of_text_are_those_of_its_parts(tokenizer: Tokenizer) -> None:
    ids = [1, *tokenizer.encode_text("red cat"), 2, *tokenizer.encode_text("\n\n"), tokenizer.control_id("<think>")]
    assert ids_of_text(tokenizer, tokenizer.decode_all(ids)) == ids and ids_of_text(tokenizer, "") == []


def test_texts_part_at_a_token(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Space and `r` are the same in both, and yet the tokens differ."""
    runs(tmp_path, "red river<|im_end|>", "red red<|im_end|>", "red river<|im_end|>")
    assert parting(tmp_path) == Parting(3, 2, (" river", " "))  # in the corpus no space is before `red`
    assert parting(tmp_path, 3) == Parting(3, 2, (" river", " ", " river"))


def test_equal_texts_do_not_part(tmp_path: Path, tokenizer: Tokenizer) -> None:
    runs(tmp_path, "red cat<|im_end|>", "red cat<|im_end|>")
    assert parting(tmp_path) is None


def test_one_that_ends_parts_with_nothing(tmp_path: Path, tokenizer: Tokenizer) -> None:
    runs(tmp_path, "red cat", "red cat<|im_end|>")
    assert parting(tmp_path) == Parting(7, 3, ("", "<|im_end|>"))


def test_a_character_of_several_tokens_is_marked_from_its_first(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """小 is E5 B0 8F, 尔 is E5 B0 94, and no merge knows them: the third byte differs, of the first character behind `red`."""
    runs(tmp_path, "red小", "red尔")
    assert parting(tmp_path) == Parting(3, 4, ("\ufffd", "\ufffd"))


def test_sampled_ids_count_before_the_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Both say `red cat`, one of them letter by letter."""
    left, right = runs(tmp_path, "red cat", "red cat")
    prompt, word, cat = ids_of_text(tokenizer, PROMPT), tokenizer.encode_text("red"), tokenizer.encode_text(" cat")
    letters = [id_ for letter in "red" for id_ in tokenizer.encode_text(letter)]
    other = tokenizer.encode_text("dog")
    keep(left, (other, word + cat), (prompt, other), (prompt, word + cat))
    assert parting(tmp_path) is None  # the other side has none: both by their text
    keep(right, (prompt, letters + cat), (prompt, word))
    assert parting(tmp_path) == Parting(0, 1, ("red", "r"))
    assert read_ids(right / "rollouts/00000005.npz") == [(prompt, letters + cat), (prompt, word)]
    (right / "rollouts/00000005.npz").write_bytes(b"torn")
    assert parting(tmp_path) is None


def test_without_a_common_tokenizer_characters_count(tmp_path: Path, tokenizer: Tokenizer) -> None:
    runs(tmp_path, "red river", "red red", read="e" * 32 + ".dir")  # nobody has it any more
    assert parting(tmp_path) == Parting(5)
    about = json.loads((tmp_path / ".runs/grpo/key1/1/run.json").read_text())
    about["tags"]["dvc.data/tokenizer"] = digest(tmp_path / "data/tokenizer")
    (tmp_path / ".runs/grpo/key1/1/run.json").write_text(json.dumps(about))
    assert parting(tmp_path) == Parting(5)  # the runs read different ones


def test_an_older_tokenizer_is_taken_from_the_cache(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = tmp_path / "data/tokenizer"
    runs(tmp_path, "red river", "red red")
    entries = [{"md5": digest(path), "relpath": path.name} for path in sorted(folder.iterdir())]
    cache = tmp_path / ".dvc/cache/files/md5"
    for name, content in [
        (digest(folder), json.dumps(entries).encode()),
        *((entry["md5"], (folder / entry["relpath"]).read_bytes()) for entry in entries),
    ]:
        (cache / name[:2]).mkdir(parents=True, exist_ok=True)
        (cache / name[:2] / name[2:]).write_bytes(content)
    shutil.rmtree(folder)
    assert parting(tmp_path) == Parting(3, 2, (" river", " "))


def test_the_parting_is_shown(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    runs(tmp_path, "red river<b>", "red")
    monkeypatch.chdir(tmp_path)
    printed = CliRunner().invoke(app, ["compare", "mlflow1", "mlflow2"]).stdout
    assert 'parts at token 2: " river" | (end)\n' in printed and "   red▶ river<b>\n" in printed
    found = compared(tmp_path)
    told: list[dict[str, Any]] = json.loads(as_json(found))["samples"]
    assert told[0]["parting"] == {"at": 3, "token": 2, "texts": [" river", ""]}
    html = compare_page(found)
    assert "parts at <b>token 2: &#34; river&#34; | (end)</b>" in html
    assert 'red<mark> river</mark><span class="parts">&lt;b&gt;</span>' in html and "red<mark>∎</mark>" in html
