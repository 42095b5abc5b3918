"""The synchronous loop: generate, score, compare, plan, update, publish; one policy version a step."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from ratoon.config.recipe import Recipe
from ratoon.data import PromptStream, StreamState
from ratoon.distributed import CollectiveError, DataParallel, clip_gradients, is_sharded, on_each_kept, on_main
from ratoon.loop.diagnosis import StepDiagnosis, StepFacts, explain_loss
from ratoon.loop.evaluation import Evaluation, evaluate
from ratoon.loop.inputs import Inputs
from ratoon.loop.memory_watch import MemoryWatch
from ratoon.loop.publisher import Publisher
from ratoon.loop.run_folder import RunFolder
from ratoon.loop.run_memory import row_counts
from ratoon.loop.soundness import Soundness, SpoiltPolicyError
from ratoon.loop.stages import MainScores, attach_advantages, plan_updates
from ratoon.loop.step_rollout import StepRollout, roll_out, without_truncated
from ratoon.loop.stop_rules import StopReason, StopRules
from ratoon.loop.waiting_groups import NONE_WAITING, WaitingGroups
from ratoon.metrics import MetricsLog, read_metrics
from ratoon.metrics.rows import MetricValue
from ratoon.models import can_keep_prompts, model_shape
from ratoon.planner import CostModel, peak_tflops
from ratoon.rollout import RolloutEngine
from ratoon.trainer import StepResult, Trainer, Update
from ratoon.trainer.best_checkpoint import best_step
from ratoon.trainer.checkpoint import checkpoint_step, load_checkpoint, require_free_bytes
from ratoon.trainer.model_folder import model_file_bytes, save_model
from ratoon.trainer.optimizer import learning_rate_at, scheduled_rate
from ratoon.trainer.optimizer_kinds import optimizer_kind
from ratoon.trainer.reference import ReferenceScore
from ratoon.trainer.rollout_table import write_rollouts
from ratoon.trainer.shared_checkpoint import restore_optimizer, save_shared_checkpoint, sharded_state_bytes
from ratoon.trainer.state_tree import capture_rng, restore_rng
from ratoon.types.rollouts import RolloutGroup
from ratoon.view import RunView, StepReport

_SILENCE_S = 10.0
"""After it the next step of the warm start is shown, which otherwise is one in five."""

_WAITING = "waiting_groups"  # in a checkpoint's state

_ASSUMED_FLOPS_PER_S = {"cpu": 5e10, "cuda": 4e14}
"""Of one rank, for the planner, whose choices depend on proportions only."""


class SynchronousRun:
    """One run, in one process or in several that call the same methods together.

    Every method leaves the run where `save` can be called. Rank 0 alone scores, and writes what the run leaves behind.
    """

    def __init__(
        self,
        recipe: Recipe,
        inputs: Inputs,
        model: PreTrainedModel,
        engine: RolloutEngine,
        *,
        sampled: PreTrainedModel,
        folder: RunFolder,
        metrics: MetricsLog,
        view: RunView,
        data_parallel: DataParallel,
        memory: MemoryWatch,
    ) -> None:
        """sampled: the whole model that the engine samples from: `model`, or a copy where that is cut over ranks."""
        self.recipe = recipe
        self.inputs = inputs
        self.model = model
        self.engine = engine
        self.sampled = sampled
        self.soundness = Soundness(model, sampled, inputs.prompts.train, inputs.eos_token_id, data_parallel)
        self.publisher = Publisher(recipe.rollout, model, engine, inputs.tokenizer, sampled=sampled)
        self.rewards = MainScores(inputs.rewards, data_parallel)
        self.folder = folder
        self.metrics = metrics
        self.view = view
        self.data_parallel = data_parallel
        self.memory = memory
        self.prompts = self._stream(shuffle=recipe.data.shuffle)
        self.waiting = NONE_WAITING
        """Begun and not trained on, under partial rollouts."""
        self.cost = CostModel.from_shape(model_shape(model.config), flops_per_s=_ASSUMED_FLOPS_PER_S[model.device.type])
        is_cuda = model.device.type == "cuda"
        self.peak_tflops = peak_tflops(torch.cuda.get_device_name(model.device)) if is_cuda else None
        self.trainer = self._trainer()
        self.stop_rules = StopRules(recipe.stop)
        self.stop_reason: StopReason | None = None
        """The rule that has ended the run."""
        self._explained = set[str]()
        self.num_steps_done = 0
        self.newest_checkpoint: Path | None = None
        self.is_stopping = False
        """Set, on any rank, to end the run after the step in progress."""
        self._all_stop = False

    async def restore(self, checkpoint: Path) -> None:
        """Goes on from a checkpoint whose weights the model already holds."""
        ranks = self.data_parallel
        saved = on_each_kept(
            ranks, "reading of a checkpoint", lambda: load_checkpoint(checkpoint, read_bytes=ranks.is_main)
        )
        restore_optimizer(saved, model=self.model, optimizer=self.trainer.optimizer, ranks=ranks)
        restore_rng(saved.state["rng"])
        if not ranks.is_main:  # whose generators they are
            torch.manual_seed(self.recipe.run.seed + saved.step + ranks.rank)
        for sentence in self.inputs.changed_files(saved.step, saved.position.get("user_files", {})):
            self.view.warn(sentence)
        self.prompts.restore(StreamState(**saved.position["prompts"]))
        if _WAITING in saved.state:
            self.waiting = WaitingGroups.restore(saved.state[_WAITING], self.prompts)
        self.num_steps_done = saved.step
        self.newest_checkpoint = checkpoint
        self.forget_after(saved.step)
        await self.publisher.publish(self.num_steps_done)

    def forget_after(self, step: int) -> None:
        """Removes rows and rollouts of steps after `step`; of everything where it is negative."""

        def forget() -> None:
            self.metrics.truncate_after(step)
            self.folder.remove_rollouts_after(max(step, 0))

        on_main(self.data_parallel, "removal of later steps", forget)

    def must_stop(self) -> bool:
        """Whether any rank was told to stop. All ranks ask together, and hear the same."""
        if self.data_parallel.world_size == 1:
            return self.is_stopping
        told = self.data_parallel.all_reduce_maxima({"stop": float(self.is_stopping or self._all_stop)})
        self._all_stop = told["stop"] > 0
        return self._all_stop

    def warm_start(self) -> bool:
        """The supervised stage: cross-entropy on the demonstrations, with an optimizer of its own.

        Returns whether it ran to its end: told to stop, it ends after the step in progress, and must begin anew.
        """
        sft = self.recipe.sft
        assert sft is not None, "the recipe has no [sft] stage"
        examples = self._stream(shuffle=True)
        shown_at = -math.inf
        for step in range(sft.num_steps):
            if self.must_stop():
                return False
            started = time.perf_counter()
            with self._phase("sft"):
                groups = self.inputs.supervised(examples.take(sft.prompts_per_step))
                (update,) = self._plan(groups, num_updates=1)
                rate = scheduled_rate(
                    step,
                    peak=sft.learning_rate,
                    schedule="linear",
                    warmup_steps=sft.warmup_steps,
                    num_steps=sft.num_steps,
                    final_fraction=0.1,
                )
                loss = self.trainer.supervised_step(update, learning_rate=rate)
            seconds = time.perf_counter() - started
            self.metrics.log(step + 1, "sft", loss=loss, learning_rate=rate, step_s=seconds)
            is_shown = (step + 1) % max(sft.num_steps // 5, 1) == 0 or step + 1 == sft.num_steps
            if is_shown or time.perf_counter() - shown_at >= _SILENCE_S:
                shown_at = time.perf_counter()
                self.view.step(
                    StepReport(stage="sft", step=step + 1, num_steps=sft.num_steps, seconds=seconds, loss=loss)
                )
        self.trainer = self._trainer()  # moments of its own, and masters of the weights as they are now
        self.publisher.refresh_sampled()
        return True

    def require_room(self) -> None:
        """Raises UserError if the disk has no room for one checkpoint: now, and not after the warm start."""
        optimizer = self.trainer.optimizer
        state_bytes = sharded_state_bytes(optimizer) if is_sharded(self.model) else optimizer.full_state_bytes
        num_bytes = model_file_bytes(self.sampled) + state_bytes
        on_main(
            self.data_parallel,
            "room for a checkpoint",
            lambda: require_free_bytes(self.folder.checkpoints, num_bytes),
        )

    def use_reference(self, reference: ReferenceScore | None) -> None:
        """Gives the trainer what a KL penalty is measured against."""
        self.trainer.reference = reference

    async def train(self) -> None:
        """Steps until the run is complete, told to stop or stopped by a rule, with a checkpoint in each case."""
        history = on_main(self.data_parallel, "earlier steps", self._history)
        self.stop_reason = self.stop_rules.after_step(history)
        for step in range(self.num_steps_done, self.recipe.trainer.num_steps):
            if self.must_stop() or self.stop_reason is not None:
                break
            history.append(await self._step(step))
            self.stop_reason = self.stop_rules.after_step(history)
            await self._after_step()
        if self.must_stop() or self.stop_reason is not None:
            self.save()

    async def _step(self, step: int) -> StepFacts:
        """Generate, score, compare, plan, update, publish."""
        recipe = self.recipe
        started = time.perf_counter()
        with self._saved_if_it_fails():
            rollout = await roll_out(
                step,
                recipe=recipe,
                prompts=self.prompts,
                engine=self.engine,
                rewards=self.rewards,
                metrics=self.metrics,
                enter=self._enter,
                ranks=self.data_parallel,
                waiting=self.waiting,
            )
        self.waiting = rollout.waiting
        await self.publisher.give_memory()
        kl = self._kl_in_rewards(rollout.groups)
        penalties = None if kl is None else [recipe.algorithm.kl_coefficient * kl_N for kl_N in kl]
        groups = attach_advantages(rollout.groups, recipe.algorithm, penalties=penalties)
        trained = without_truncated(groups) if recipe.algorithm.mask_truncated else groups
        with self._phase("plan"):
            updates = self._plan(trained, num_updates=recipe.algorithm.num_minibatches)
        result: StepResult | None = None
        if any(update.plan.num_loss_tokens for update in updates):
            with self._phase("update"):
                result = self.trainer.step(updates, learning_rate=learning_rate_at(step, recipe.trainer))
            if kl is not None:  # measured before the update, where the penalty was taken
                num_tokens = sum(sum(group.response_lengths) for group in groups)
                result = replace(result, kl_ref_mean=float(sum(kl_N.sum() for kl_N in kl)) / max(num_tokens, 1))
        self.num_steps_done = step + 1
        with self._phase("publish"):
            await self.publisher.publish(self.num_steps_done)
        seconds = time.perf_counter() - started
        return on_main(
            self.data_parallel,
            "report of a step",
            lambda: self._report(rollout, groups, updates, result, seconds=seconds),
        )

    def _kl_in_rewards(self, groups: Sequence[RolloutGroup]) -> list[NDArray[np.float64]] | None:
        """For each group [N] nats, each response's divergence from the reference; None where no reward is cut by it."""
        if self.recipe.algorithm.kl_in != "reward" or not groups:
            return None
        with self._phase("reference"):
            found = [self.trainer.kl_to_reference(update) for update in self._plan(groups, num_updates=1)]
        # Without shared prompts each response is a group of its own there; the order is the same.
        kl = np.concatenate([kl_N for update in found for kl_N in update])
        return np.split(kl, np.cumsum([group.group_size for group in groups])[:-1])

    async def evaluate(self) -> Evaluation | None:
        """The held-out reward now, once for each step: a resumed run does not repeat it."""
        if on_main(self.data_parallel, "earlier evaluations", self._is_evaluated):
            return None
        with self._phase("evaluate"):
            found = await evaluate(
                self.engine,
                self.inputs.prompts.heldout,
                config=self.recipe.evaluation,
                training=self.recipe.rollout.sampling_params(self.recipe.run.seed),
                score=self._score_heldout,
                reward_bounds=self.recipe.reward.bounds,
                ranks=self.data_parallel,
            )
        if found is not None:
            row = found.metrics()

            def log() -> None:
                self.metrics.log(self.num_steps_done, "evaluate", **row)

            on_main(self.data_parallel, "report of an evaluation", log)
            self.view.say(
                f"held-out reward after {self.num_steps_done} steps: {found.reward_in_words} "
                f"({found.num_responses} responses)"
            )
        return found

    def _is_evaluated(self) -> bool:
        return self.metrics.find("evaluate", self.num_steps_done) is not None

    async def _score_heldout(self, groups: Sequence[RolloutGroup]) -> Sequence[RolloutGroup]:
        scored = await self.rewards.score(groups)
        for kind, sentence in scored.warnings().items():
            self.view.warn(f"held-out prompts: {sentence}", kind=f"{kind} in evaluation")
        return scored.groups

    def save(self) -> None:
        """A checkpoint of this step, complete or absent; the best one so far is kept with the newest.

        Raises SpoiltPolicyError, and writes and removes nothing, where no run could go on from it.
        """
        best = self._best_step() if self.recipe.evaluation.keep_best else None
        with self._phase("checkpoint"):
            self.soundness.require(self.num_steps_done, newest=self.newest_checkpoint)
            self.newest_checkpoint = save_shared_checkpoint(
                self.folder.checkpoints,
                self.num_steps_done,
                model=self.model,
                optimizer=self.trainer.optimizer,
                ranks=self.data_parallel,
                model_writer=partial(save_model, self.sampled, self.inputs.tokenizer),
                model_bytes=model_file_bytes(self.sampled),
                state={"rng": capture_rng(), **({_WAITING: self.waiting.state()} if self.waiting.groups else {})},
                position={"prompts": asdict(self.prompts.state()), "user_files": dict(self.inputs.user_files)},
                keep_last=self.recipe.trainer.keep_checkpoints,
                keep_steps=() if best is None else (best,),
            )

    @contextmanager
    def _saved_if_it_fails(self) -> Iterator[None]:
        """Around what changes no weights: the steps done are not lost where a reward or the engine ends the run."""
        prompts = self.prompts.state()
        try:
            yield
        except CollectiveError:
            raise  # the ranks can write nothing together any more
        except Exception as error:
            newest = self.newest_checkpoint
            self.prompts.restore(prompts)
            try:  # the first failure is the cause
                self.soundness.require_innocent(error, self.num_steps_done, newest=newest)
                if newest is None or checkpoint_step(newest) != self.num_steps_done:
                    self.save()
            except SpoiltPolicyError as failure:
                self.view.warn(str(failure))
            except Exception as failure:
                self.view.warn(f"the steps since the last checkpoint could not be saved either: {failure}")
            raise

    def _best_step(self) -> int | None:
        """The best step that has a checkpoint, this one counted as if it had."""
        found = partial(best_step, self.folder.path, saving=self.num_steps_done)
        return on_main(self.data_parallel, "best step", found)

    @property
    def is_evaluation_due(self) -> bool:
        """At this step, as `evaluation.every_steps` says; the last step's is the run's own end."""
        every = self.recipe.evaluation.every_steps
        is_between = 0 < self.num_steps_done < self.recipe.trainer.num_steps
        return every is not None and is_between and self.num_steps_done % every == 0

    async def _after_step(self) -> None:
        config = self.recipe.trainer
        is_last = self.num_steps_done == config.num_steps
        is_new_best = False
        if self.is_evaluation_due:
            with self._saved_if_it_fails():
                await self.evaluate()
            is_new_best = self.recipe.evaluation.keep_best and self._best_step() == self.num_steps_done
        if is_last or is_new_best or self.num_steps_done % config.checkpoint_every_steps == 0:
            self.save()

    def _history(self) -> list[StepFacts]:
        """Of the last steps that were trained before this process began."""
        rows = [row for row in read_metrics(self.folder.metrics) if row.phase == "train"]
        return [StepFacts.of(row.values) for row in rows[-self.stop_rules.num_steps_needed :]]

    def _stream(self, *, shuffle: bool) -> PromptStream:
        split = self.inputs.prompts
        return PromptStream(split.train, seed=self.recipe.run.seed, shuffle=shuffle, weights=split.weights)

    def _trainer(self) -> Trainer:
        config = self.recipe.trainer
        optimizer = optimizer_kind(config)(
            self.model.parameters(),
            learning_rate=config.learning_rate,
            weight_decay=config.weight_decay,
            betas=config.betas,
            clip=partial(clip_gradients, self.model) if is_sharded(self.model) else None,
        )
        return Trainer(
            self.model,
            optimizer,
            algorithm=self.recipe.algorithm,
            temperature=self.recipe.rollout.temperature,
            max_grad_norm=config.max_grad_norm,
            data_parallel=self.data_parallel,
            max_response_tokens=self.recipe.rollout.max_response_tokens,
        )

    def _plan(self, groups: Sequence[RolloutGroup], *, num_updates: int) -> tuple[Update, ...]:
        return plan_updates(
            groups,
            num_updates=num_updates,
            num_ranks=self.trainer.sequence_group.num_data_ranks,
            max_rows_per_microbatch=self.recipe.planner.max_rows_per_microbatch,
            cost=self.cost,
            share_prompts=self.recipe.planner.share_prompts,
            ranks_meet="microbatch" if is_sharded(self.model) else "step",
            keeps_prompts=can_keep_prompts(self.model),
        )

    def _report(
        self,
        rollout: StepRollout,
        groups: Sequence[RolloutGroup],
        updates: Sequence[Update],
        result: StepResult | None,
        *,
        seconds: float,
    ) -> StepFacts:
        """The step in metrics.jsonl, in rollouts/, and before the user's eyes.

        groups: those trained on, with advantages, truncated responses included. result: None where nothing was left.
        """
        diagnosis = replace(
            StepDiagnosis.of(groups, policy_version=self.num_steps_done - 1),
            num_lost_responses=rollout.num_lost,
            reward_mean=rollout.reward_mean,
            reward_std=rollout.reward_std,
        )
        memory = self.memory.of_step([row_counts(update, self.trainer.sequence_group.data_rank) for update in updates])
        row = self.metrics.log(
            self.num_steps_done,
            "train",
            **diagnosis.metrics(),
            **rollout.scored.metrics(),
            **{f"reward_of_{name}": mean for name, mean in rollout.reward_mean_by_source.items()},
            num_sampling_rounds=rollout.num_rounds,
            num_sampled_groups=rollout.num_groups_asked,
            num_generated_tokens=rollout.num_generated_tokens,
            num_waiting_groups=len(rollout.waiting.groups),
            **({"num_loss_tokens": 0} if result is None else self._update_figures(result)),
            **memory.metrics(),
            **self.publisher.metrics(),
            planner_imbalance=max((update.plan.imbalance for update in updates), default=1.0),
            step_s=seconds,
        )
        write_rollouts(self.folder.rollouts, self.num_steps_done, groups)
        self.view.step(
            StepReport(
                stage=self.recipe.algorithm.name,
                step=self.num_steps_done,
                num_steps=self.recipe.trainer.num_steps,
                seconds=seconds,
                reward_mean=diagnosis.reward_mean if rollout.scored.groups else None,
                loss=None if result is None else result.loss,
                logical_tokens_per_s=None if result is None else result.logical_tokens_per_s,
                computed_tokens_per_s=None if result is None else result.computed_tokens_per_s,
                dedup_ratio=None if result is None else result.dedup_ratio,
            )
        )
        facts = StepFacts.of(row.values)
        self._explain_zero_once(facts)
        warnings = rollout.scored.warnings() | rollout.warnings() | diagnosis.warnings(facts)
        if not self.recipe.algorithm.needs_rollout_logprobs:
            warnings |= diagnosis.staleness_warnings()
        for kind, warning in warnings.items():
            self.view.warn(warning, kind=kind)
        if memory.warning is not None:
            self.view.warn(memory.warning, kind="memory beyond prediction")
        return facts

    def _explain_zero_once(self, facts: StepFacts) -> None:
        """A loss that prints as 0 worries people also where nothing is wrong."""
        cause = explain_loss(facts)
        if cause is not None and cause.is_normal and cause.kind not in self._explained:
            self._explained.add(cause.kind)
            self.view.say(cause.sentence)

    def _update_figures(self, result: StepResult) -> dict[str, MetricValue]:
        tflops_per_s = result.useful_flops / result.update_s / 1e12
        peak_tflops = None if self.peak_tflops is None else self.peak_tflops * self.data_parallel.world_size
        return {
            **asdict(result),
            "dedup_ratio": result.dedup_ratio,
            "logical_tokens_per_s": result.logical_tokens_per_s,
            "computed_tokens_per_s": result.computed_tokens_per_s,
            "useful_tflops_per_s": tflops_per_s,
            "useful_mfu": None if peak_tflops is None else tflops_per_s / peak_tflops,
        }

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._enter(name)
        with self.metrics.span(name):
            yield

    def _enter(self, name: str) -> None:
        self.view.phase(name)
        self.memory.enter(name)
