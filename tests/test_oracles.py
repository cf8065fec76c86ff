"""The losses against those of trl, by its own trainers on the same tensors and on the same weights; adapters against peft.

Where ours differ on purpose, the test says by how much. `make interop` installs trl and peft; without them this file is skipped,
and the types of its calls are all that `make check` looks at.
trl has no PPO: its critic, GAE and whitening are compared with the reference figures (tests/test_value.py).
"""

import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_runs import CPU, make_model, make_tokenizer
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"  # before trl asks; everything it needs is made here
peft, trl = pytest.importorskip("peft"), pytest.importorskip("trl")

import transformers  # noqa: E402
from datasets import Dataset  # noqa: E402

from pipeline.data.batches import PairBatch  # noqa: E402
from pipeline.maths.advantages import GROUP_STD_EPS, group_advantages  # noqa: E402
from pipeline.maths.metrics import combine  # noqa: E402
from pipeline.maths.policy import StepSize, group_policy_loss, ppo_policy_loss  # noqa: E402
from pipeline.maths.preference import bradley_terry_loss, dpo_loss  # noqa: E402
from pipeline.model.heads import RewardModel  # noqa: E402
from pipeline.model.interop import qwen3_config  # noqa: E402
from pipeline.model.lora import add_lora, lora_state_dict  # noqa: E402
from pipeline.model.transformer import CausalLM  # noqa: E402
from pipeline.rollout.records import StopReason, Trajectory  # noqa: E402
from pipeline.training.objectives import last_trained  # noqa: E402
from pipeline.training.preference_objective import answer_logprobs  # noqa: E402
from pipeline.training.rollouts import micro_batches, sampled_logprobs  # noqa: E402

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore::FutureWarning")]
CLOSE: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}
MAX_NEW_TOKENS = 6
GROUP: dict[str, Any] = {"clip_eps_low": 0.2, "clip_eps_high": 0.28, "ratio_cap": 1.25, "kl_coef": 0.1}
# what trl calls the losses; its cispo reads the cap from epsilon_high
TRL_LOSS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "dapo": {"loss_type": "dapo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo", "epsilon_high": GROUP["ratio_cap"]},
}
FROM_TRL: Any = {"cispo": "token"}  # the reduction in which we meet; ours is `sequence`


def make_qwen3(config: Any, weights: nn.Module, kind: str = "CausalLM", **changes: Any) -> Any:
    """transformers' Qwen3 with the weights of our model."""
    twin = getattr(transformers, f"Qwen3For{kind}")(transformers.Qwen3Config(**qwen3_config(config), **changes))
    twin.load_state_dict(weights.state_dict(), strict=True)
    return twin.eval()


class Trl:
    """trl's trainers over a tiny local model."""

    def __init__(self, folder: Path) -> None:
        make_tokenizer(folder)
        self.folder = folder
        self.tokenizer: Any = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        self.ours = make_model(SimpleNamespace(vocab_size=len(self.tokenizer)), sharpness=4.0)  # type: ignore[arg-type]
        self.reference = make_model(SimpleNamespace(vocab_size=len(self.tokenizer)), seed=5, sharpness=4.0)  # type: ignore[arg-type]
        make_qwen3(self.reference.config, self.reference).save_pretrained(folder)  # where the trainer looks for its reference

    def _arguments(self, **changes: Any) -> dict[str, Any]:
        plain = {"report_to": [], "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "disable_tqdm": True}
        return {"output_dir": str(self.folder / "out"), "per_device_train_batch_size": 4, **plain, **changes}

    def _model(self) -> Any:
        model = make_qwen3(self.ours.config, self.ours)
        model.config._name_or_path = str(self.folder)
        return model

    def grpo(self, reward: Callable[..., list[float]] = lambda completions, **_: [0.0] * len(completions), **changes: Any) -> Any:
        arguments = {"beta": GROUP["kl_coef"], "epsilon": GROUP["clip_eps_low"], "epsilon_high": GROUP["clip_eps_high"]}
        arguments |= {
            "max_completion_length": MAX_NEW_TOKENS,
            "num_generations": 4,
            "num_generations_eval": 4,
            "temperature": 0.6,
        }
        arguments |= {"loss_type": "grpo", "use_bias_correction_kl": False}
        trainer = trl.GRPOTrainer(
            model=self._model(),
            reward_funcs=reward,
            args=trl.GRPOConfig(**self._arguments(**arguments | changes)),
            train_dataset=Dataset.from_list([{"prompt": "red"}] * 8),
            processing_class=self.tokenizer,
        )
        trainer.model.eval()  # its losses are then those of one batch, neither split nor accumulated
        return trainer

    def dpo(self, **changes: Any) -> Any:
        trainer = trl.DPOTrainer(
            model=self._model(),
            args=trl.DPOConfig(**self._arguments(**changes)),
            train_dataset=Dataset.from_list([{"prompt": "red", "chosen": "blue", "rejected": "dog"}] * 4),
            processing_class=self.tokenizer,
        )
        trainer.model.eval()
        return trainer

    def reward(self, model: Any) -> Any:
        trainer = trl.RewardTrainer(
            model=model,
            args=trl.RewardConfig(**self._arguments()),
            train_dataset=Dataset.from_list([{"chosen": "blue", "rejected": "dog"}] * 4),
            processing_class=self.tokenizer,
        )
        trainer.model.eval()
        return trainer


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Trl:
    return Trl(tmp_path_factory.mktemp("trl"))


class Given:
    """Stands for a model whose forward pass finds these values, whatever it reads."""

    def __init__(self, **values: Tensor) -> None:
        self.values = values

    def __call__(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(**self.values)


def ragged(seed: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """logprobs (leaf), old, ref, entropy, all [4, 6], a mask with gaps but no empty row, and advantages [4]."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(4, 6, generator=generator) * 3
    logprobs, ref = (old + torch.randn(4, 6, generator=generator) * 0.4 for _ in range(2))
    mask = torch.tensor([[1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1], [0, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]], dtype=torch.bool)
    tensors = [logprobs.requires_grad_(), old, ref, torch.rand(4, 6, generator=generator)]
    return tensors, mask, torch.randn(4, generator=generator) * 2


def trl_group_loss(trainer: Any, tensors: list[Tensor], mask: Tensor, advantages: Tensor) -> Tensor:
    """trl's loss where the model found `tensors[0]` and the entropies `tensors[3]`."""
    ones = torch.ones_like(mask).long()
    inputs = {
        "prompt_ids": ones[:, :2],
        "prompt_mask": ones[:, :2],
        "completion_ids": ones,
        "completion_mask": ones,
        "tool_mask": mask.long(),
        "advantages": advantages,
        "old_per_token_logps": tensors[1],
        "ref_per_token_logps": tensors[2],
        "num_items_in_batch": mask.sum(),
    }
    loss: Tensor = trainer._compute_loss(Given(log_probs=tensors[0], entropy=tensors[3]), inputs)
    return loss


def our_group_loss(
    loss: Any, tensors: list[Tensor], mask: Tensor, advantages: Tensor, **changes: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    logprobs, old, ref, entropy = tensors
    size = StepSize(num_sequences=len(mask), num_tokens=int(mask.sum()), max_tokens=MAX_NEW_TOKENS)
    settings: dict[str, Any] = {"reduction": FROM_TRL.get(loss), "entropy": entropy, "size": size, **GROUP}
    return group_policy_loss(logprobs, old, ref, advantages, mask, loss=loss, **settings | changes)


def assert_same(ours: Tensor, theirs: Tensor, leaf: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, **CLOSE)
    gradients = [torch.autograd.grad(loss, leaf, retain_graph=True)[0] for loss in (ours, theirs)]
    assert float(gradients[1].abs().max()) > 1e-3
    torch.testing.assert_close(*gradients, **CLOSE)


@pytest.mark.parametrize("loss", TRL_LOSS)
def test_group_losses_and_their_gradients_equal_trl(oracle: Trl, loss: str) -> None:
    trainer = oracle.grpo(**TRL_LOSS[loss])
    clipped = 0.0
    for seed in range(20):
        tensors, mask, advantages = ragged(seed)
        ours, metrics = our_group_loss(loss, tensors, mask, advantages)
        assert_same(ours, trl_group_loss(trainer, tensors, mask, advantages), tensors[0])
        clipped += combine([metrics])["clip_frac"]
    assert clipped > 1  # the bounds were in play


@pytest.mark.parametrize("loss", ["grpo", "gspo"])
def test_metrics_equal_trl_and_where_they_differ(oracle: Trl, loss: str) -> None:
    """The KL is the same. Ours counts every ratio outside the range, trl's those whose gradient the clip takes away."""
    trainer = oracle.grpo(**TRL_LOSS[loss])
    tensors, mask, advantages = ragged(3)
    _, metrics = our_group_loss(loss, tensors, mask, advantages)
    trl_group_loss(trainer, tensors, mask, advantages)
    means, logged = combine([metrics]), trainer._metrics["eval"]
    assert means["ref_kl"] == pytest.approx(logged["kl"][0], abs=1e-5)
    if loss == "grpo":
        ratio = (tensors[0] - tensors[1]).exp()
        spared = (((ratio > 1.28) & (advantages[:, None] < 0)) | ((ratio < 0.8) & (advantages[:, None] > 0))) & mask
        difference = float(spared.sum() / mask.sum())
        assert difference > 0 and means["clip_frac"] - logged["clip_ratio/region_mean"][0] == pytest.approx(difference, abs=1e-6)


def test_ppos_surrogate_equals_trl_with_an_advantage_per_token(oracle: Trl) -> None:
    trainer = oracle.grpo(loss_type="dapo", epsilon_high=0.2, entropy_coef=0.3)
    for seed in range(20):
        tensors, mask, _ = ragged(seed)
        logprobs, old, ref, entropy = tensors
        entropy.requires_grad_()
        advantages = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        ours, _ = ppo_policy_loss(
            logprobs,
            old,
            ref,
            advantages,
            mask,
            clip_eps=0.2,
            kl_coef=0.1,
            entropy=entropy,
            entropy_coef=0.3,
            num_tokens=int(mask.sum()),
        )
        assert_same(ours, trl_group_loss(trainer, tensors, mask, advantages), tensors[0])


@pytest.mark.parametrize("loss", ["dapo", "grpo"])
def test_the_entropy_bonus_equals_trl_and_where_it_differs(oracle: Trl, loss: str) -> None:
    """trl's bonus is a mean over tokens for every loss; ours is reduced as its loss, which for `token` is the same."""
    trainer = oracle.grpo(**TRL_LOSS[loss], entropy_coef=0.3)
    tensors, mask, advantages = ragged(1)
    ours, _ = our_group_loss(loss, tensors, mask, advantages, entropy_coef=0.3)
    theirs = trl_group_loss(trainer, tensors, mask, advantages)
    entropy = tensors[3]
    by_row = torch.where(mask, entropy, 0.0).sum(1) / mask.sum(1)
    difference = 0.0 if loss == "dapo" else 0.3 * float(entropy[mask].mean() - by_row.mean())
    assert float((ours - theirs).detach()) == pytest.approx(difference, abs=1e-5)
    assert loss == "dapo" or abs(difference) > 5e-3


def test_differs_cispo_weighs_completions_alike(oracle: Trl) -> None:
    """`reduction: null` is MiniMind's mean of completions' means; trl's and the paper's is `token`, compared above."""
    trainer = oracle.grpo(**TRL_LOSS["cispo"])
    tensors, mask, advantages = ragged(1)
    ours, _ = our_group_loss("cispo", tensors, mask, advantages, reduction=None)
    by_hand, _ = our_group_loss("cispo", tensors, mask, advantages, reduction="sequence")
    assert ours == by_hand and float((ours - trl_group_loss(trainer, tensors, mask, advantages)).detach().abs()) > 0.05


def test_differs_k3_goes_on_linearly_beyond_5(oracle: Trl) -> None:
    """At ref - logp = 6 trl's estimate is e^6 - 7 = 396.4 and ours 2 e^5 - 7 = 289.8; below 5 they are the same."""
    trainer = oracle.grpo()
    for distance, difference in ((4.9, 0.0), (6.0, math.exp(6) - 2 * math.exp(5))):
        logprobs = torch.full((1, 1), -8.0, requires_grad=True)
        tensors = [logprobs, logprobs.detach(), logprobs.detach() + distance, torch.zeros(1, 1)]
        one = torch.ones(1, 1, dtype=torch.bool), torch.zeros(1)
        ours, _ = our_group_loss("grpo", tensors, *one)
        theirs = trl_group_loss(trainer, tensors, *one)
        assert float((theirs - ours).detach()) == pytest.approx(0.1 * difference, rel=1e-5, abs=1e-5)


def test_differs_kl_has_no_importance_weight(oracle: Trl) -> None:
    """By default trl multiplies the KL estimate by the ratio (DeepSeek-V3.2); the paper of grpo and ours do not."""
    trainer = oracle.grpo(use_bias_correction_kl=True)
    tensors, mask, advantages = ragged(1)
    ours, _ = our_group_loss("grpo", tensors, mask, advantages)
    logprobs, old, ref, _ = (tensor.detach() for tensor in tensors)
    weighted = ((logprobs - old).exp() - 1) * ((ref - logprobs).exp() - (ref - logprobs) - 1)
    difference = 0.1 * float((torch.where(mask, weighted, 0.0).sum(1) / mask.sum(1)).mean())
    assert abs(difference) > 1e-3
    theirs = trl_group_loss(trainer, tensors, mask, advantages)
    assert float((theirs - ours).detach()) == pytest.approx(difference, abs=1e-6)


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo"])
def test_differs_a_completion_without_a_token_is_not_counted(oracle: Trl, loss: str) -> None:
    """trl divides by all rows: with one of four empty, its loss is 3/4 of ours."""
    trainer = oracle.grpo(**TRL_LOSS[loss])
    tensors, mask, advantages = ragged(2)
    mask[2] = False
    size = StepSize(num_sequences=3, num_tokens=int(mask.sum()), max_tokens=MAX_NEW_TOKENS)
    ours, _ = our_group_loss(loss, tensors, mask, advantages, size=size)
    assert_same(0.75 * ours, trl_group_loss(trainer, tensors, mask, advantages), tensors[0])


REWARDS = [3.0, 1.0, 2.0, 2.5, -1.0, -1.0, 4.0, 0.5]


def completions_of(trainer: Any) -> dict[str, Any]:
    """trl's own rollout over two prompts x 4 completions, scored with `REWARDS`."""
    torch.manual_seed(0)
    prompts = [{"prompt": "red blue"}] * 4 + [{"prompt": "dog cat bird house"}] * 4
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: dict[str, Any] = trainer._generate_and_score_completions(prompts)
    return found


@pytest.mark.parametrize("scale", ["none", "group"])
def test_advantages_equal_trl_and_where_they_differ(oracle: Trl, scale: str) -> None:
    """Centred rewards are the same. trl divides by the std of a sample (n - 1), ours by that of the group: sqrt(4/3) larger."""
    trainer = oracle.grpo(reward=lambda completions, **_: REWARDS, scale_rewards=scale)
    theirs = completions_of(trainer)["advantages"]
    rewards = torch.tensor(REWARDS)
    ours = group_advantages(rewards, 4, divide_by_std=scale == "group")
    if scale == "group":
        std = rewards.view(2, 4).std(1, correction=0).repeat_interleave(4)
        ours = ours * (std + GROUP_STD_EPS) / (std * math.sqrt(4 / 3) + GROUP_STD_EPS)
    torch.testing.assert_close(ours, theirs, **CLOSE)


def test_equal_rewards_are_exactly_zero_there_and_here(oracle: Trl) -> None:
    trainer = oracle.grpo(reward=lambda completions, **_: [0.7] * 8)
    assert not completions_of(trainer)["advantages"].any()
    assert not group_advantages(torch.full((8,), 0.7), 4).any()


@pytest.mark.parametrize("loss", TRL_LOSS)
def test_a_rollout_of_trl_gives_its_loss_and_gradients_in_our_model(oracle: Trl, loss: str) -> None:
    """The same weights, completions and advantages at temperature 0.6: reference logprobs, loss and all gradients."""
    trainer = oracle.grpo(reward=lambda completions, **_: REWARDS, scale_rewards="none", **TRL_LOSS[loss])
    inputs = completions_of(trainer)
    inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
    noise = torch.Generator().manual_seed(1)
    inputs["old_per_token_logps"] = inputs["ref_per_token_logps"] + 0.4 * torch.randn(
        inputs["ref_per_token_logps"].shape, generator=noise
    )
    theirs = trainer._compute_loss(trainer.model, inputs)
    theirs.backward()

    trajectories = []
    for row in range(8):
        prompt, ids, old = (
            inputs[name][row][inputs[mask][row].bool()].tolist()
            for name, mask in (
                ("prompt_ids", "prompt_mask"),
                ("completion_ids", "completion_mask"),
                ("old_per_token_logps", "completion_mask"),
            )
        )
        trajectories.append(Trajectory(prompt, ids, [True] * len(ids), old, turns=[], stop=StopReason.LENGTH))
    (batch,) = micro_batches(trajectories, range(8), 8, CPU)
    with torch.no_grad():
        reference, _ = sampled_logprobs(oracle.reference, batch, 0.6, CPU)
    expected = torch.cat([inputs["ref_per_token_logps"][row][inputs["completion_mask"][row].bool()] for row in batch.rows])
    torch.testing.assert_close(reference[batch.loss_mask], expected, **CLOSE)
    oracle.ours.zero_grad()
    logprobs, entropy = sampled_logprobs(oracle.ours, batch, 0.6, CPU)
    advantages = group_advantages(torch.tensor(REWARDS), 4, divide_by_std=False)[batch.rows]
    ours, _ = our_group_loss(loss, [logprobs, batch.old_logprobs, reference, entropy], batch.loss_mask, advantages)
    ours.backward()
    torch.testing.assert_close(ours, theirs, **CLOSE)
    assert_same_gradients(oracle.ours, trainer.model)


def assert_same_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    """Of all weights, as a share of each one's largest."""
    expected, found = ({name: p.grad for name, p in model.named_parameters() if p.grad is not None} for model in (theirs, ours))
    assert found.keys() == expected.keys() and max(float(gradient.abs().max()) for gradient in expected.values()) > 0.05
    for name, gradient in expected.items():
        scale = max(float(gradient.abs().max()), 1.0)
        torch.testing.assert_close(
            found[name] / scale,
            gradient / scale,
            atol=1e-5,
            rtol=0,
            msg=lambda text, n=name: f"{n}: {text}",  # type: ignore[misc]
        )


PAIRS = 3
LENGTHS = [3, 5, 1, 4, 2, 6]  # of the chosen, then the rejected answers


def trl_dpo_loss(trainer: Any, token_logprobs: Tensor, reference: Tensor, lengths: list[int]) -> Tensor:
    """trl's loss where the model found `token_logprobs` [2N, L] at answers of `lengths` behind a prompt of one token."""
    width = token_logprobs.shape[1]
    mask = torch.arange(width + 1) < torch.tensor(lengths)[:, None] + 1
    mask[:, 0] = False
    zeros = torch.zeros_like(token_logprobs)
    inputs = {"input_ids": torch.ones(len(mask), width + 1).long(), "attention_mask": torch.ones_like(mask).long()}
    chosen, rejected = reference.sum(1).chunk(2)
    trainer.precompute_ref_logps = True
    model = Given(log_probs=token_logprobs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    known = {"completion_mask": mask.long(), "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    loss: Tensor = trainer._compute_loss(model, inputs | known, return_outputs=False)
    return loss


def answers(seed: int, lengths: list[int] = LENGTHS) -> tuple[Tensor, Tensor]:
    """Token logprobs of policy (leaf) and reference [2N, L], 0 behind each answer."""
    generator = torch.Generator().manual_seed(seed)
    inside = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    policy, reference = (
        torch.where(inside, -2 * torch.rand(len(lengths), max(lengths), generator=generator), 0.0) for _ in range(2)
    )
    return policy.requires_grad_(), reference


@pytest.mark.parametrize("loss", ["sigmoid", "hinge"])
def test_dpo_losses_gradients_and_metrics_equal_trl(oracle: Trl, loss: Any) -> None:
    trainer = oracle.dpo(loss_type=[loss], beta=0.3)
    for seed in range(20):
        policy, reference = answers(seed)
        ours, metrics = dpo_loss(policy.sum(1), reference.sum(1), beta=0.3, loss=loss, num_pairs=PAIRS)
        assert_same(ours, trl_dpo_loss(trainer, policy, reference, LENGTHS), policy)
        means, logged = combine([metrics]), trainer._metrics["eval"]
        names = {"margin": "rewards/margins", "accuracy": "rewards/accuracies", "chosen_reward": "rewards/chosen"}
        names |= {"rejected_reward": "rewards/rejected", "chosen_logprob": "logps/chosen", "rejected_logprob": "logps/rejected"}
        for own, other in names.items():
            assert means[own] == pytest.approx(logged[other][-1], abs=1e-5), own


def test_ipo_equals_trl_on_means_and_differs_on_sums(oracle: Trl) -> None:
    """trl divides each answer's log-ratio by its length; the paper and ours do not. With answers of one token they are one."""
    trainer = oracle.dpo(loss_type=["ipo"], beta=0.3)
    for seed in range(20):
        policy, reference = answers(seed)
        lengths = torch.tensor(LENGTHS)
        theirs = trl_dpo_loss(trainer, policy, reference, LENGTHS)
        means, _ = dpo_loss(policy.sum(1) / lengths, reference.sum(1) / lengths, beta=0.3, loss="ipo", num_pairs=PAIRS)
        assert_same(means, theirs, policy)
        sums, _ = dpo_loss(policy.sum(1), reference.sum(1), beta=0.3, loss="ipo", num_pairs=PAIRS)
        assert float((sums - theirs).detach().abs()) > 0.1
        single, known = answers(seed, [1] * 6)
        ours, _ = dpo_loss(single.sum(1), known.sum(1), beta=0.3, loss="ipo", num_pairs=PAIRS)
        assert_same(ours, trl_dpo_loss(trainer, single, known, [1] * 6), single)


def test_label_smoothing_is_a_mix_of_trls_losses_and_is_not_its_robust_one(oracle: Trl) -> None:
    """trl has no conservative DPO. Ours is (1 - e) of its sigmoid loss and e of that with the answers swapped; its `robust`, the
    unbiased one, puts -e for +e and divides by 1 - 2 e.
    """
    trainer, robust = oracle.dpo(loss_type=["sigmoid"], beta=0.3), oracle.dpo(loss_type=["robust"], beta=0.3, label_smoothing=0.1)
    for seed in range(20):
        policy, reference = answers(seed)
        ours, _ = dpo_loss(policy.sum(1), reference.sum(1), beta=0.3, label_smoothing=0.1, num_pairs=PAIRS)
        right = trl_dpo_loss(trainer, policy, reference, LENGTHS)
        order = [3, 4, 5, 0, 1, 2]
        wrong = trl_dpo_loss(trainer, policy[order], reference[order], [LENGTHS[row] for row in order])
        assert_same(ours, 0.9 * right + 0.1 * wrong, policy)
        theirs = trl_dpo_loss(robust, policy, reference, LENGTHS)
        assert_same(0.8 * theirs, 0.9 * right - 0.1 * wrong, policy)
        torch.testing.assert_close(ours - 0.8 * theirs, 0.2 * wrong, **CLOSE)


def pair_batch(vocab_size: int) -> tuple[PairBatch, Tensor, Tensor, Tensor]:
    """Three pairs with prompts of different lengths; beside them whole rows of ids, and where answers and anything stand."""
    generator = torch.Generator().manual_seed(0)
    prompts = [2, 4, 3, 2, 4, 3]
    width = max(p + n for p, n in zip(prompts, LENGTHS, strict=True))
    ids = torch.randint(10, vocab_size, (6, width), generator=generator)
    positions = torch.arange(width)
    starts, ends = torch.tensor(prompts)[:, None], torch.tensor([p + n for p, n in zip(prompts, LENGTHS, strict=True)])[:, None]
    labels = torch.where((positions >= starts) & (positions < ends), ids, -100)
    ids = torch.where(positions < ends, ids, 0)
    batch = PairBatch(ids[:, :-1], labels[:, 1:], sum(LENGTHS), [0, 1, 2], [False] * 3, "train")
    return batch, ids, labels != -100, positions < ends


def test_dpo_of_a_model_equals_trl(oracle: Trl) -> None:
    """The same weights and pairs: answer logprobs of policy and reference, loss and all gradients."""
    batch, ids, completion, attention = pair_batch(oracle.ours.config.vocab_size)
    trainer = oracle.dpo(beta=0.15)
    inputs = {"input_ids": ids, "attention_mask": attention.long(), "completion_mask": completion.long()}
    theirs = trainer._compute_loss(trainer.model, inputs, return_outputs=False)
    theirs.backward()
    oracle.ours.zero_grad()
    with torch.no_grad():
        reference = answer_logprobs(oracle.reference, batch, CPU)
    ours, metrics = dpo_loss(answer_logprobs(oracle.ours, batch, CPU), reference, beta=0.15, num_pairs=PAIRS)
    ours.backward()
    torch.testing.assert_close(ours, theirs, **CLOSE)
    assert combine([metrics])["chosen_logprob"] == pytest.approx(trainer._metrics["eval"]["logps/chosen"][0], abs=1e-4)
    assert_same_gradients(oracle.ours, trainer.model)


def test_reward_modelling_equals_trl(oracle: Trl) -> None:
    """Scores at each last token, loss, accuracy, margin and all gradients."""
    ours = RewardModel.from_causal_lm(oracle.ours, seed=1).eval()
    pad = oracle.tokenizer.pad_token_id
    theirs = make_qwen3(ours.config, ours, "SequenceClassification", num_labels=1, pad_token_id=pad)
    batch, ids, _, attention = pair_batch(ours.config.vocab_size)
    trainer = oracle.reward(theirs)
    inputs = {"input_ids": torch.where(attention, ids, pad), "attention_mask": attention.long()}
    expected = trainer.compute_loss(trainer.model, inputs)
    expected.backward()
    # the model reads whole rows; `batch` is cut for labels, so the last token stands one further on
    loss, metrics = bradley_terry_loss(ours(ids, last_trained(batch.labels) + 1), num_pairs=PAIRS)
    loss.backward()
    torch.testing.assert_close(loss, expected, **CLOSE)
    means = combine([metrics])
    assert means["accuracy"] == pytest.approx(trainer._metrics["eval"]["accuracy"][0])
    assert means["margin"] == pytest.approx(trainer._metrics["eval"]["margin"][0], abs=1e-5)
    assert_same_gradients(ours, trainer.model)


def test_adapters_train_as_in_peft(oracle: Trl) -> None:
    """Logits, then the gradients of both matrices of every adapter; the forward and the merge alone are in tests/test_lora.py."""
    ours: CausalLM = make_model(SimpleNamespace(vocab_size=len(oracle.tokenizer)), sharpness=4.0)  # type: ignore[arg-type]
    targets = ["q_proj", "v_proj", "down_proj"]
    settings = peft.LoraConfig(r=3, lora_alpha=7, target_modules=targets, lora_dropout=0.0)
    twin = peft.get_peft_model(make_qwen3(ours.config, ours), settings).eval()
    add_lora(ours, rank=3, alpha=7.0, targets=targets, seed=0)
    generator = torch.Generator().manual_seed(2)
    own = lora_state_dict(ours)
    for tensor in own.values():
        tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))

    def renamed(name: str) -> str:
        return "base_model.model." + name.replace(".lora.A.", ".lora_A.default.").replace(".lora.B.", ".lora_B.default.")

    twin.load_state_dict({renamed(name): tensor for name, tensor in own.items()}, strict=False)
    ids = torch.randint(len(oracle.tokenizer), (3, 9), generator=generator)
    upstream = torch.randn(3, 9, len(oracle.tokenizer), generator=generator) / 100
    logits = ours(ids), twin(ids).logits
    torch.testing.assert_close(*logits, **CLOSE)
    for found in logits:
        (found * upstream).sum().backward()
    expected = {name: p.grad for name, p in twin.named_parameters() if p.requires_grad}
    gradients = {renamed(name): p.grad for name, p in ours.named_parameters() if p.requires_grad}
    assert gradients.keys() == expected.keys() and len(expected) == 2 * 2 * 3
    for name, gradient in expected.items():
        assert float(gradient.abs().max()) > 1e-3
        torch.testing.assert_close(gradients[name], gradient, **CLOSE)
