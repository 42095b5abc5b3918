"""What is tested of the transformers engine holds of this one: the same tests, on this folder's engine."""

# ruff: noqa: F401

from tests.rollout.test_engine import (
    test_a_group_larger_than_the_engine_is_drawn_in_parts,
    test_a_stop_string_ends_a_response_where_its_text_first_holds_it,
    test_draws_are_those_of_one_response_at_a_time,
    test_engine_is_a_rollout_engine,
    test_eos_ends_a_response_and_is_its_last_token,
    test_greedy_and_sampled_groups_share_a_batch,
    test_new_weights_draw_from_the_next_token_on,
    test_no_draw_depends_on_the_batch,
    test_temperature_zero_is_greedy_and_has_no_logprobs,
    test_the_global_generator_is_not_read_or_moved,
    test_the_trainers_model_is_left_as_it_was,
    test_what_cannot_be_held_is_the_users_error,
)
from tests.rollout.test_failures import (
    test_a_failed_forward_pass_ends_every_call_with_its_cause,
    test_close_does_not_wait_for_ever_and_lets_the_thread_end,
    test_weights_that_are_not_finite_are_named,
)
from tests.rollout.test_lifecycle import (
    test_abort_hands_out_what_there_is,
    test_close_aborts_what_is_in_flight,
    test_close_leaves_no_thread_and_can_be_called_twice,
    test_pause_draws_nothing_and_resume_goes_on,
    test_tokens_are_stamped_with_the_weights_that_drew_them,
)
from tests.rollout.test_partial import (
    test_a_cancelled_call_leaves_what_it_was_to_go_on_with,
    test_a_group_that_has_ended_is_handed_back_at_once,
    test_a_response_in_parts_is_the_undivided_one,
    test_a_stop_string_across_the_border_of_two_calls_ends_a_response,
    test_an_aborted_group_goes_on_as_if_nothing_had_been,
    test_eos_as_the_first_token_of_a_call_ends_a_response,
    test_log_probs_in_float32_are_equal_to_rounding,
    test_prompts_of_one_id_go_on_as_two_groups,
    test_supports_of_earlier_calls_count_towards_the_share,
    test_the_last_position_of_the_context_is_reached_in_parts,
)
from tests.rollout.test_partial_updates import (
    test_an_update_every_twenty_steps_loses_and_doubles_nothing,
    test_parts_drawn_between_updates_keep_the_stamps_of_their_time,
)
from tests.rollout.test_truncated_rollouts import (
    test_a_stop_string_cuts_tokens_log_probs_and_sets_alike,
    test_an_aborted_response_keeps_the_sets_of_its_tokens,
    test_groups_of_every_distribution_share_a_batch,
    test_supports_that_outgrow_their_share_are_the_users_error,
)
