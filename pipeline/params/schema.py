"""The schema of `params.yaml`: every key, its type, its range, and the combinations that are impossible.

There are no defaults: the file is complete, so what you read is what ran. A section is listed by exactly the stages whose
result depends on it (see dvc.yaml); `runtime` is listed by none. Units are in the names; `*_frac` are in [0, 1].
"""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pipeline.params.ranges import (
    Count,
    Epochs,
    Few,
    Frac,
    OpenFrac,
    Positive,
    PositiveFloat,
    Rate,
    Rotations,
    Rows,
    Seconds,
    Seed,
    Temperature,
    Weight,
    Width,
    Window,
)
from pipeline.yarn import band_faults

SetName = Literal["pretrain", "full_sft", "lora", "dpo", "rlaif", "agent"]


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values are never coerced across types, nothing mutates them."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())

    def _faults(self) -> Iterator[str]:
        """Impossible combinations of values that are valid by themselves, a line each, which begins with a key."""
        yield from ()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if faults := list(self._faults()):
            raise ValueError("\n".join(faults))
        return self


class DataSource(Section):
    source: Annotated[str, Field(min_length=1)]


class DataSets(Section):
    pretrain: DataSource
    full_sft: DataSource
    lora: DataSource
    dpo: DataSource
    rlaif: DataSource
    agent: DataSource


class Data(Section):
    sets: DataSets
    held_out_frac: OpenFrac
    held_out_max_rows: Positive
    max_dropped_frac: Frac
    seed: Seed


class TokenizerParams(Section):
    init_from: str | None
    vocab_size: Annotated[int, Field(ge=292, le=2**20)]  # 36 added tokens + 256 bytes
    split_digits: bool
    max_rows_per_set: Positive


class RopeScaling(Section):
    """YaRN (arXiv:2309.00071); null in `model.rope_scaling` means plain RoPE."""

    factor: Annotated[float, Field(gt=1, le=1e4)]
    original_max_position_embeddings: Window
    beta_fast: Rotations
    beta_slow: Rotations
    attention_factor: PositiveFloat


class ModelParams(Section):
    hidden_size: Width
    num_hidden_layers: Few
    num_attention_heads: Few
    num_key_value_heads: Few
    head_dim: Annotated[int, Field(ge=2, le=1024, multiple_of=2)]
    intermediate_size: Width
    max_position_embeddings: Window
    rope_theta: Annotated[float, Field(gt=1, le=1e12, allow_inf_nan=False)]  # at 1 all pairs of dimensions turn alike
    rope_scaling: RopeScaling | None
    rms_norm_eps: Annotated[float, Field(ge=1e-12, le=1)]
    dropout: Annotated[float, Field(ge=0, le=0.99)]
    use_moe: bool
    num_experts: Few
    num_experts_per_tok: Few
    moe_intermediate_size: Width
    norm_topk_prob: bool
    router_aux_loss_coef: Weight

    def _faults(self) -> Iterator[str]:
        if self.num_attention_heads % self.num_key_value_heads:
            yield f"num_key_value_heads={self.num_key_value_heads}: must divide num_attention_heads={self.num_attention_heads}"
        if self.num_experts_per_tok > self.num_experts:
            yield f"num_experts_per_tok={self.num_experts_per_tok}: must be <= num_experts={self.num_experts}"
        if (scaling := self.rope_scaling) is not None:
            original = scaling.original_max_position_embeddings
            if self.max_position_embeddings <= original:
                yield (
                    f"max_position_embeddings={self.max_position_embeddings}: must be > "
                    f"rope_scaling.original_max_position_embeddings={original}, or there is nothing to stretch; raise it, or "
                    "write rope_scaling: null"
                )
            yield from band_faults(self.head_dim, self.rope_theta, original, scaling.beta_fast, scaling.beta_slow)


class Optimizer(Section):
    """AdamW with linear warm-up and a cosine to `min_lr_frac` of the peak; one optimizer step per accumulation window."""

    seed: Seed
    epochs: Epochs
    batch_size: Rows
    lr: Rate
    warmup_steps: Count
    min_lr_frac: Frac
    betas: Annotated[tuple[OpenFrac, OpenFrac], Field(strict=False)]
    weight_decay: Weight
    max_grad_norm: PositiveFloat
    plot_every: Positive


class Supervised(Optimizer):
    accumulation_steps: Rows
    val_every: Positive


class Encoded(Supervised):
    """A supervised stage with a set of its own, whose rows `encode` cuts or refuses by their length in tokens."""

    max_seq_len: Annotated[int, Field(ge=8, le=2**20)]


class FromElsewhere(Encoded):
    """A stage that may start from weights trained elsewhere; with 0 epochs it takes over what it starts from."""

    epochs: Annotated[int, Field(ge=0, le=10**6)]
    init_from: str | None


class Pretrain(FromElsewhere):
    def _faults(self) -> Iterator[str]:
        if self.epochs == 0 and self.init_from is None:
            yield "epochs=0: must be >= 1 with init_from: null, or the model stays random; 0 takes over what init_from names"


class Chat(Encoded):
    """Supervised chat training; both augmentations are drawn once per row and epoch."""

    system_prompt_frac: Frac
    drop_empty_think_frac: Frac


class FullSft(FromElsewhere, Chat):
    pass


class Lora(Chat):
    rank: Annotated[int, Field(ge=1, le=2**12)]
    alpha: PositiveFloat
    targets: Annotated[
        tuple[Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], ...],
        Field(min_length=1, strict=False),
    ]


class Dpo(Encoded):
    beta: PositiveFloat
    loss: Literal["sigmoid", "ipo", "hinge"]
    label_smoothing: Annotated[float, Field(ge=0, le=0.49)]
    reference: Literal["cached", "live"]
    drop_empty_think_frac: Frac

    def _faults(self) -> Iterator[str]:
        if self.label_smoothing and self.loss != "sigmoid":
            yield f"label_smoothing={self.label_smoothing}: must be 0 with loss: {self.loss}, only sigmoid has it"


class Reward(Supervised):
    """Trains on dpo's encoded pairs, so it has no length of its own."""

    external: str | None


class Sampling(Optimizer):
    """What the stages that sample share. Temperature applies to old, new and reference logprobs alike."""

    max_steps: Positive | None  # ends the run early; null runs all epochs
    max_prompt_len: Annotated[int, Field(ge=8, le=2**20)]
    max_new_tokens: Window
    temperature: Temperature
    thinking_ratio: Frac
    max_rows: Rows  # completions that are decoded together
    cache_gib: Annotated[float, Field(gt=0, le=2**20)]  # memory for their keys and values, which bounds their number as well
    micro_batch_size: Rows
    kl_coef: Weight
    system_prompt_frac: Frac
    sample_every: Positive


class Ppo(Sampling):
    critic_lr: Rate
    mini_batch_size: Rows
    updates_per_rollout: Few
    clip_eps: OpenFrac
    value_clip_eps: PositiveFloat
    kl_estimator: Literal["k1", "k2", "k3"]
    kl_in_reward: bool  # subtract kl_coef * k1 from each token's reward instead of adding KL to the loss
    entropy_coef: Weight
    bootstrap_truncated: bool  # a cut completion goes on with the critic's value instead of 0
    vf_coef: Weight
    gamma: Frac
    gae_lambda: Frac
    early_stop_kl: PositiveFloat
    critic_warmup_steps: Count

    def _faults(self) -> Iterator[str]:
        if self.batch_size < 2:
            yield f"batch_size={self.batch_size}: must be >= 2, advantages are whitened over the completions of a step"
        if self.mini_batch_size > self.batch_size:
            yield f"mini_batch_size={self.mini_batch_size}: must be <= batch_size={self.batch_size}"
        if self.max_steps is not None and self.critic_warmup_steps >= self.max_steps:
            yield f"critic_warmup_steps={self.critic_warmup_steps}: must be < max_steps={self.max_steps} to train the policy"


class DynamicSampling(Section):
    """DAPO's dynamic sampling (arXiv:2503.14476, section 3.2): groups without signal give their places to other prompts."""

    max_rounds: Annotated[int, Field(ge=0, le=1024)]  # of further sampling per step; 0 switches it off


class Overlong(Section):
    """Completions at their length limit: a soft penalty before it (arXiv:2503.14476 eq. 13), and whether cut ones are trained."""

    buffer: Count  # the last tokens before the limit, over which the penalty grows from 0; 0: no penalty
    penalty: Weight  # at the limit
    train_truncated: bool


class Group(Sampling):
    """Group-relative policy optimisation; docs/algorithms.md has the losses side by side."""

    group_size: Annotated[int, Field(ge=2, le=2**12)]
    loss: Literal["cispo", "grpo", "dapo", "gspo", "dr_grpo"]
    reduction: Literal["sequence", "token", "constant"] | None  # null: as the paper of the loss
    advantage_std: bool | None  # divide advantages by the group's std; null: as the paper of the loss
    clip_eps_low: PositiveFloat
    clip_eps_high: PositiveFloat
    ratio_cap: Annotated[float, Field(gt=1, le=1e6)]
    kl_estimator: Literal["k1", "k2", "k3"]
    entropy_coef: Weight
    old_logprobs: Literal["sampled", "recomputed"]
    dynamic_sampling: DynamicSampling
    overlong: Overlong
    updates_per_rollout: Few

    def _faults(self) -> Iterator[str]:
        if self.clip_eps_low >= 1:
            yield f"clip_eps_low={self.clip_eps_low}: must be < 1, a distance below the ratio 1"
        if self.overlong.buffer >= self.max_new_tokens:
            yield f"overlong.buffer={self.overlong.buffer}: must be < max_new_tokens={self.max_new_tokens}"


class Grpo(Group):
    pass


class Agent(Group):
    max_turns: Few
    max_total_len: Window

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        length = self.max_prompt_len + self.max_new_tokens
        if length > self.max_total_len:
            yield f"max_total_len={self.max_total_len}: must hold max_prompt_len + max_new_tokens = {length}"


class Span(Section):
    """A closed range of character counts and the reward for lying inside (`weight`) or outside (`-penalty`)."""

    min_chars: Count
    max_chars: Positive
    weight: Weight
    penalty: Weight

    def _faults(self) -> Iterator[str]:
        if self.min_chars > self.max_chars:
            yield f"min_chars={self.min_chars}: must be <= max_chars={self.max_chars}"


class Rewards(Section):
    """Weights of the reward terms; each term is logged by name (docs/rewards.md)."""

    preset: Literal["default", "minimind"]  # minimind: its own rules and constants, to which no key below applies
    length: Span
    thinking: Span
    think_close: Weight
    repetition: Weight
    model: Weight
    model_clip: PositiveFloat
    answer: Weight
    tool_call: Weight
    unfinished: Weight
    agent_clip: PositiveFloat


class Tools(Section):
    """What answers the calls of a policy; the embedded world's rows were made with the default preset."""

    preset: Literal["default", "minimind"]
    extra: str | None  # a Python file below external/ with tools of the user's own


GatedMetric = Literal[
    "bits_per_byte",
    "stops_frac",
    "qa_exact",
    "qa_exact_greedy",
    "qa_exact_tools_greedy",
    "subject_exact_greedy",
    "preference_accuracy",
    "reward_mean",
    "tool_success",
    "tool_success_greedy",
    "tool_earned",
    "tool_valid_frac",
]


class Eval(Section):
    seed: Seed
    panel_rows: Positive
    temperature: Temperature
    thinking_ratio: Frac
    max_new_tokens: Window
    max_turns: Few
    batch_size: Rows
    confidence: OpenFrac
    gate: list[GatedMetric] | None  # in which no model may be worse than its parent


class Runtime(Section):
    """Execution only: no stage lists it, changing it reruns nothing."""

    device: Literal["auto", "cpu", "cuda"]
    dtype: Literal["auto", "float32", "bfloat16"]
    threads: Annotated[int, Field(ge=0, le=1024)]
    ranks: Few  # data-parallel processes of a stage that trains
    gpus: Literal["auto"] | Few  # that flow runs of this machine may use at once
    save_every_s: Seconds
    keep_saves: Positive  # the newest, of an unfinished run
    keep_every_steps: Positive | None  # saves at multiples of it stay, also when the run has finished
    keep_rollouts: bool  # every trajectory that ppo, grpo and agent sample, for `python -m pipeline replay-step`
    replay_every_steps: Positive | None  # their saves at multiples of it stay with the newest run: a replay begins there
    progress: Literal["auto", "on", "off"]
    mlflow: bool
    guard: Literal["off", "warn", "stop"]  # what a problem in a run's signals does to it: docs/diagnosis.md
    gradient_checkpointing: bool
    compile: bool


class Params(Section):
    data: Data
    tokenizer: TokenizerParams
    model: ModelParams
    pretrain: Pretrain
    full_sft: FullSft
    lora: Lora
    dpo: Dpo
    reward: Reward
    ppo: Ppo
    grpo: Grpo
    agent: Agent
    rewards: Rewards
    tools: Tools
    eval: Eval
    runtime: Runtime
