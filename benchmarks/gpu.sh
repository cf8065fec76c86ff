#!/bin/sh
# Correctness on a CUDA device first, then its figures: no data, no trained weights, no network, about five minutes.
#   benchmarks/gpu.sh            writes benchmarks/results/<gpu>.md; PYTHON names another interpreter
set -eu
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD" PYTHONUNBUFFERED=1
python=${PYTHON:-python}
"$python" -m pytest -o addopts= -m gpu -q tests
exec "$python" benchmarks/run.py --device cuda --repeats 3 correctness rollout rollout-micro mfu growth
