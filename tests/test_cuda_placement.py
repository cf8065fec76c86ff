"""Where tensors lie on a GPU, looked at without one: `fake_cuda` runs every stage on a device that only says it is CUDA.

What this cannot show is in docs/architecture.md, "CUDA without a GPU"; test_cuda.py and test_static_decode.py need a real one.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="session")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """guard.cpp, compiled."""
    built, library = tmp_path_factory.mktemp("guard") / "guard.so", Path(torch.__file__).parent
    options = ["-std=c++20", "-O0", "-shared", "-fPIC", f"-I{library / 'include'}", f"-L{library / 'lib'}"]
    linked = ["-ltorch_cpu", "-lc10", f"-Wl,-rpath,{library / 'lib'}"]
    subprocess.run(["g++", *options, TESTS / "fake_cuda/guard.cpp", *linked, "-o", built], check=True)
    return built


def python(guard: Path, script: Path, *arguments: str) -> list[str]:
    """Lines of a script in a process of its own: the guard cannot be taken back."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(TESTS), str(TESTS.parent))), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, os.fspath(script), os.fspath(guard), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


STAGES = {"pretrain", "full_sft", "lora", "dpo", "reward", "ppo", "grpo", "agent", "evaluation", "chat", "export"}
SAMPLING = {"sampling in blocks", "sampling, truncated"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "experts"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stages_keep_their_tensors_together(guard: Path, dtype: str, kind: str) -> None:
    """One process for all cases, as its start takes as long as they do; what fails is named by case."""
    found = [json.loads(line) for line in python(guard, TESTS / "fake_cuda/steps.py", dtype, kind)]
    faults = [f"{each['case']}: {each['fault']}" for each in found if each["fault"]]
    assert STAGES | SAMPLING <= {each["case"] for each in found} and not faults, "\n".join(faults)


MEETINGS = """
import sys, torch
torch.ops.load_library(sys.argv[1])
from pretend import Apart, Pretended, pretended_cuda
with pretended_cuda():
    here, there = torch.ones(3), torch.ones(3, device="cuda")
    place, index = torch.tensor([0, 2]), torch.tensor([0, 2], device="cuda")
    table = torch.ones(4, 3, device="cuda")
    allowed = {
        "number": lambda: there + torch.tensor(2.0),
        "copy": lambda: here.copy_(there),
        "index of the CPU": lambda: there[place],
        "write by an index of the CPU": lambda: there.clone().index_put_((place,), torch.tensor(1.0)),
        "number that is written": lambda: table.clone()[:, 0].fill_(torch.tensor(2.0)),
        "move": lambda: here.to("cuda") + there,
        "read": lambda: torch.tensor(there.sum().item()) + torch.tensor(there.tolist()),
    }
    refused = {
        "add": lambda: here + there,
        "matmul": lambda: table @ here,
        "cat": lambda: torch.cat((here, there)),
        "stack of numbers": lambda: torch.stack((torch.tensor(1.0), there.sum())),
        "index of CUDA": lambda: here[index],
        "values": lambda: there.index_put_((index,), here[:2]),
        "embedding": lambda: torch.nn.functional.embedding(place, table),
        "gather": lambda: table.gather(1, place[:, None]),
        "where": lambda: torch.where(here > 0, there, there),
        "loss": lambda: torch.nn.functional.cross_entropy(table, torch.tensor([0, 1, 2, 0])),
    }
    for name, what in allowed.items():
        what()
        print(name, "together")
    for name, what in refused.items():
        try:
            what()
            print(name, "together")
        except Apart:
            print(name, "apart")
    weights = torch.ones(3, 3, device="cuda", requires_grad=True)
    (weights @ there).sum().backward()
    print(type(weights.grad).__name__, weights.grad.device, weights.grad.tolist())
"""


def test_the_pretended_device_complains_where_cuda_would(guard: Path, tmp_path: Path) -> None:
    script = tmp_path / "meetings.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(TESTS / 'fake_cuda')!r})\n{MEETINGS}", encoding="utf-8")
    *lines, gradient = python(guard, script)
    verdicts = dict(line.rsplit(" ", 1) for line in lines)
    assert list(verdicts.values()) == ["together"] * 7 + ["apart"] * 10
    assert gradient == f"Pretended cuda:0 {[[1.0] * 3] * 3}"
