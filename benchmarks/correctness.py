"""What must hold before a rate means anything, on the device and by the kernels that are timed: fp32, random weights."""

from dataclasses import replace

import torch
from scipy.stats import chisquare

from benchmarks.models import config_of, make_model
from benchmarks.report import Bar, Report
from benchmarks.sampling import Workload, draw_workload, open_ours
from benchmarks.setting import Setting
from pipeline.model.transformer import CausalLM
from pipeline.rollout.records import Completion

SHARPNESS = 3.0
"""Scales the matrices, so that distributions are far from uniform."""
SAMPLES = 20000
LEAST_EXPECTED = 5
"""Rarer ids count together, for the test to hold."""


def correctness(setting: Setting) -> Report:
    """Greedy ids against the model without a cache, recorded logprobs against one forward pass, samples against the softmax."""
    precise = replace(setting.device, autocast_dtype=None)
    model = make_model(config_of("micro"), precise.device)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(SHARPNESS)
    work = draw_workload(6, 4, prompt_lengths=(3, 40), new_tokens=(8, 40), vocabulary=model.config.vocab_size)
    same = _share_of_greedy_rows(model, work)
    largest, p_value = _largest_difference(model, work), _p_value(model)
    rows = [
        ("greedy completions equal to those of the uncached model", f"{same:.0%}"),
        ("largest difference of a recorded logprob to a full forward", f"{largest:.1e}"),
        (f"chi-square of {SAMPLES:,} first ids against the softmax, p", f"{p_value:.3f}"),
    ]
    bars = [
        Bar("greedy ids as without a cache", same, 1.0),
        Bar("1e-4 over the largest logprob difference", 1e-4 / max(largest, 1e-12), 1.0),
        Bar("p of the samples' distribution", p_value, 0.001),
    ]
    return Report("correctness", "24 rows in groups of four, the engine that is timed below.", ("", ""), rows, bars)


def _completions(model: CausalLM, work: Workload, *, greedy: bool) -> list[Completion]:
    engine = open_ours(model, len(work.prompts) // 2)  # half of the rows wait
    keys = range(len(work.prompts))
    return engine.generate(work.prompts, keys=keys, max_new_tokens=work.lengths, temperature=1.0, greedy=greedy)


@torch.inference_mode()
def _logprobs(model: CausalLM, prompt: list[int], ids: list[int]) -> torch.Tensor:
    """[ids, V] of one forward over the whole row."""
    row = torch.tensor([[*prompt, *ids[:-1]]], device=model.lm_head.weight.device)
    return model(row)[0, len(prompt) - 1 :].log_softmax(dim=-1)


def _share_of_greedy_rows(model: CausalLM, work: Workload) -> float:
    done = _completions(model, work, greedy=True)
    same = [
        _logprobs(model, prompt, completion.ids).argmax(dim=-1).tolist() == completion.ids
        for prompt, completion in zip(work.prompts, done, strict=True)
    ]
    return sum(same) / len(same)


def _largest_difference(model: CausalLM, work: Workload) -> float:
    largest = 0.0
    for prompt, completion in zip(work.prompts, _completions(model, work, greedy=False), strict=True):
        own = _logprobs(model, prompt, completion.ids).cpu().gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
        largest = max(largest, float((own - torch.tensor(completion.logprobs)).abs().max()))
    return largest


def _p_value(model: CausalLM) -> float:
    prompt = [3, 5, 8]
    rows = Workload([prompt] * SAMPLES, [1] * SAMPLES)
    drawn = torch.tensor([completion.ids[0] for completion in _completions(model, rows, greedy=False)])
    expected = _logprobs(model, prompt, [0])[0].double().exp().cpu() * SAMPLES
    counts = drawn.bincount(minlength=len(expected)).double()
    often = expected >= LEAST_EXPECTED
    observed, wanted = (torch.cat((values[often], values[~often].sum()[None])) for values in (counts, expected))
    return float(chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)
