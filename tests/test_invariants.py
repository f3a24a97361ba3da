"""Where each of the 47 numbered invariants of heads is tested; an entry whose test is gone fails."""

from __future__ import annotations

import ast
from pathlib import Path

HERE = Path(__file__).parent
TESTS = {
    1: "decode::test_greedy_equals_plain_greedy drelay::test_random_head_changes_no_token "
    "lilicorr::test_random_head_changes_no_token stacks::test_stacks_are_lossless",
    2: "head_laws::test_sampled_chain_is_exact head_laws::test_tree_is_exact head_laws::test_branches_are_exact",
    3: "walk::test_sampled_walk_reports_the_law_it_drew_from "
    "drelay::test_sampled_proposal_reports_the_law_it_drew_from "
    "lilicorr::test_sampled_proposal_reports_the_law_it_drew_from",
    4: "verify::test_ratio_never_accepts_what_the_target_excludes "
    "verify::test_ratio_accepts_everything_when_p_equals_q "
    "verify::test_a_residual_without_mass_falls_back_to_p",
    5: "walk::test_identity_is_bit_exact_with_ties",
    6: "stacks::test_new_heads_change_nothing dels::test_identity_bit_for_bit dels::test_rows_are_independent "
    "drelay::test_new_head_is_no_head_bit_for_bit lilicorr::test_identity_safe_head_starts_as_no_head",
    7: "generation::test_end_of_text_at_every_place_of_a_block generation::test_budget_is_exact "
    "dflash::test_slot_convention_shifted_by_one_loses_acceptance "
    "domino::test_slot_convention_shifted_by_one_loses_acceptance",
    8: "drelay::test_random_head_changes_no_token lilicorr::test_random_head_changes_no_token",
    9: "graph::test_pairs_replay_what_they_run",
    10: "drelay::test_gate_laws drelay::test_ties_keep_and_infinities_stay",
    11: "drelay::test_gate_laws drelay::test_new_head_is_no_head_bit_for_bit",
    12: "drelay::test_gate_laws",
    13: "drelay::test_walk_is_causal_once_the_block_was_read drelay::test_every_part_is_alive",
    14: "drelay::test_walk_is_causal_once_the_block_was_read",
    15: "drelay::test_unverified_history_is_never_seen",
    16: "drelay::test_no_rank_leaks",
    17: "drelay::test_null_takes_all_when_nothing_is_likely",
    18: "drelay::test_forced_scores_are_the_served_ones dels::test_step_equals_scan",
    19: "drelay::test_gradients_reach_what_they_should",
    20: "drelay::test_golden_credit drelay::test_credit_is_the_derivative_of_the_accepted_length",
    21: "drelay::test_gradients_reach_what_they_should head_training::test_joint_gradients_equal_those_of_the_parts",
    22: "lilicorr::test_bounded_and_better_paths_exist",
    23: "lilicorr::test_bounded_and_better_paths_exist lilicorr::test_golden_pair_walks",
    24: "lilicorr::test_without_coupling_every_slot_decides_alone",
    25: "lilicorr::test_sees_the_whole_lattice_and_walks_first_order",
    26: "lilicorr::test_step_equals_oracle",
    27: "lilicorr::test_no_anchor_equals_zero_anchor_after_projection",
    28: "lilicorr::test_golden_losses_and_gradients lilicorr::test_loss_equals_oracle",
    29: "lilicorr::test_new_head_is_no_dead_saddle",
    30: "lilicorr::test_hinge_and_penalty_vanish_where_they_should",
    31: "dels::test_identity_bit_for_bit",
    32: "dels::test_prior_constant_is_inert",
    33: "dels::test_only_the_past_counts dels::test_state_is_reset_every_block dels::test_step_equals_scan",
    34: "dels::test_merged_equals_two_steps",
    35: "dels::test_one_head_many_backbones",
    36: "dels::test_prefix_stays_native",
    37: "cure::test_no_budget_is_the_chain_bit_for_bit",
    38: "cure::test_tree_equals_the_oracle tree::test_from_candidates_equals_a_best_first_heap",
    39: "cure::test_tree_equals_the_oracle tree::test_from_candidates_equals_a_best_first_heap",
    40: "cure::test_a_block_accepts_no_less_than_its_chain",
    41: "cure::test_budgets_stay_in_range_and_fall_with_the_margin",
    42: "cure::test_forks_are_the_smallest_margins_below_the_threshold",
    43: "cure::test_caches_follow_the_accepted_path",
    44: "cure::test_the_tree_does_not_see_the_targets_choices",
    45: "cure::test_one_path_is_the_chain_down_to_the_counters walk::test_a_tree_of_width_one_is_the_chain",
    46: "cure::test_law_is_exact_and_a_node_accepts_the_sum_of_its_children "
    "cure::test_a_path_that_is_there_twice_changes_no_law_while_separate_draws_do",
    47: "cure::test_law_is_exact_and_a_node_accepts_the_sum_of_its_children",
}


def test_every_invariant_has_its_test():
    assert list(TESTS) == list(range(1, 48))
    for number, names in TESTS.items():
        for name in names.split():
            file, _, test = name.partition("::")
            module = ast.parse((HERE / f"test_{file}.py").read_text(encoding="utf-8"))
            found = [node.name for node in module.body if isinstance(node, ast.FunctionDef)]
            assert test in found, f"invariant {number}: test_{file}.py has no {test}"
