"""What other libraries call the keys of a recipe: hints for those who come from there."""

from typing import NamedTuple


class PeerNames(NamedTuple):
    """One of our keys, and the keys elsewhere that come nearest to it; values and defaults may differ."""

    ours: str
    trl: tuple[str, ...] = ()
    """Of GRPOConfig, with what it has from transformers' TrainingArguments, and of ModelConfig."""

    verl: tuple[str, ...] = ()
    """The last part of the dotted key."""

    openrlhf: tuple[str, ...] = ()


PEER_NAMES = (
    PeerNames("model.path", ("model_name_or_path",), (), ("pretrain",)),
    PeerNames("model.dtype", ("bf16",), (), ("bf16",)),
    PeerNames("model.attention", ("attn_implementation",), (), ("attn_implementation",)),
    PeerNames(
        "model.recompute", ("gradient_checkpointing",), ("enable_gradient_checkpointing",), ("gradient_checkpointing",)
    ),
    PeerNames("model.lora.rank", ("lora_r",), ("lora_rank",), ("lora_rank",)),
    PeerNames("data.source", ("dataset_name",), ("train_files",), ("prompt_data",)),
    PeerNames("data.prompt_column", (), ("prompt_key",), ("input_key",)),
    PeerNames("data.answer_column", (), (), ("label_key",)),
    PeerNames("data.max_prompt_tokens", (), ("max_prompt_length",), ("prompt_max_len",)),
    PeerNames("rollout.group_size", ("num_generations",), ("n",), ("n_samples_per_prompt",)),
    PeerNames("rollout.prompts_per_step", ("generation_batch_size",), ("train_batch_size",), ("rollout_batch_size",)),
    PeerNames(
        "rollout.max_response_tokens", ("max_completion_length",), ("max_response_length",), ("generate_max_len",)
    ),
    PeerNames("reward.function", ("reward_funcs",), ("custom_reward_function",), ("remote_rm_url",)),
    PeerNames("reward.components", ("reward_weights",)),
    PeerNames("algorithm.name", ("loss_type",), ("adv_estimator",), ("advantage_estimator",)),
    PeerNames("algorithm.normalize_by_std", ("scale_rewards",), ("norm_adv_by_std_in_grpo",)),
    PeerNames("algorithm.clip_low", ("epsilon",), ("clip_ratio", "clip_ratio_low"), ("eps_clip",)),
    PeerNames("algorithm.clip_high", ("epsilon_high",), ("clip_ratio_high",)),
    PeerNames("algorithm.dual_clip", ("delta",), ("clip_ratio_c",)),
    PeerNames("algorithm.loss_mean", (), ("loss_agg_mode",)),
    PeerNames("algorithm.entropy_coefficient", (), ("entropy_coeff",), ("entropy_loss_coef",)),
    PeerNames("algorithm.kl_coefficient", ("beta",), ("kl_coef", "kl_loss_coef"), ("init_kl_coef",)),
    PeerNames("algorithm.kl_in", (), ("use_kl_in_reward", "use_kl_loss"), ("use_kl_loss",)),
    PeerNames("algorithm.kl_estimator", (), ("kl_loss_type", "kl_penalty")),
    PeerNames("algorithm.dynamic_sampling", (), ("filter_groups",), ("dynamic_filtering",)),
    PeerNames("algorithm.mask_truncated", ("mask_truncated_completions",)),
    PeerNames("algorithm.num_minibatches", (), ("ppo_mini_batch_size",)),
    PeerNames(
        "planner.max_rows_per_microbatch",
        ("per_device_train_batch_size",),
        ("ppo_max_token_len_per_gpu",),
        ("train_max_tokens_per_gpu",),
    ),
    PeerNames("trainer.num_steps", ("max_steps",), ("total_training_steps",)),
    PeerNames("trainer.learning_rate", (), ("lr",), ("actor_learning_rate",)),
    PeerNames("trainer.sequence_parallel", (), ("ulysses_sequence_parallel_size",), ("ring_attn_size",)),
    PeerNames("trainer.schedule", ("lr_scheduler_type",), (), ("lr_scheduler",)),
    PeerNames("trainer.warmup_steps", (), ("lr_warmup_steps",)),
    PeerNames("trainer.weight_decay", (), (), ("l2",)),
    PeerNames("trainer.betas", (), (), ("adam_betas",)),
    PeerNames("trainer.max_grad_norm", (), ("grad_clip",), ("max_norm",)),
    PeerNames("trainer.checkpoint_every_steps", ("save_steps",), ("save_freq",), ("save_steps",)),
    PeerNames("trainer.keep_checkpoints", ("save_total_limit",), ("max_actor_ckpt_to_keep",), ("max_ckpt_num",)),
    PeerNames("evaluation.every_steps", ("eval_steps",), ("test_freq",), ("eval_steps",)),
    PeerNames("logging.sinks", ("report_to",), ("logger",)),
    PeerNames("logging.project", (), ("project_name",), ("wandb_project",)),
    PeerNames("run.name", ("run_name",), ("experiment_name",), ("wandb_run_name",)),
    PeerNames("run.output_dir", (), ("default_local_dir",), ("ckpt_path",)),
)

OUR_KEYS = {name: row.ours for row in PEER_NAMES for name in (*row.trl, *row.verl, *row.openrlhf)}
"""By a name elsewhere, the dotted key here."""
