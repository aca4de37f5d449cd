"""Tests docs/pipelines.md: its commands, run from an installed wheel, and its tables."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from blocks_support import ROOT, block
from installed_support import Installed

TESTED = {
    "the model": "pipeline/test_cut_chain.py::test_stages_are_equal_to_the_whole, test_compiled_blocks; "
    "pipeline/test_units_of_users_models.py::test_gradients_do_not_depend_on_the_plan",
    "models of `transformers`": "pipeline/test_transformers_models.py::test_stages_are_equal_to_the_whole; "
    "strategies/test_pipelines_train.py::test_a_llama_trains_as_one_process",
    "convolutional nets": "pipeline/test_checking.py::test_a_residual_net_is_the_same_in_stages, "
    "test_statistics_count_once_and_come_back; pipeline/test_step.py::test_buffers_are_averaged_over_micro_batches",
    "`torch.compile`": "pipeline/test_cut_chain.py::test_compiled_blocks",
    "frozen layers": "pipeline/test_executor.py::test_frozen_layers; "
    "pipeline/test_describe.py::test_frozen_and_unused_parameters_have_no_optimizer_state",
    "few samples": "pipeline/test_executor.py::test_gradients_are_those_of_one_process, "
    "test_an_empty_micro_batch_has_no_units; strategies/test_pipelines_train.py::test_plans_do_not_matter",
    "random augmentation": "data/test_steps.py::test_augmentation_is_the_same_wherever_and_whenever_a_micro_batch_is_"
    "fetched",
    "optimizers": "strategies/test_pipeline_refusals.py::test_torchs_optimizers_that_were_read_are_accepted, "
    "test_others_are_accepted_if_their_step_is_known_or_they_say_so",
    "clipping": "pipeline/test_engine_steps.py::test_members_clip_alike_by_the_norm_of_the_whole; "
    "strategies/test_pipelines_train.py::test_hooks_see_what_is_owned_and_the_norm_is_that_of_the_whole",
    "validation in fit": "strategies/test_pipeline_evaluation.py::test_every_member_hears_what_one_process_hears",
    "`validate`, `test`, `predict` without": "strategies/test_pipeline_front.py::"
    "test_outside_of_fit_the_whole_model_is_run_by_one_process",
    "checkpoints": "strategies/test_pipelines_train.py::test_checkpoints_are_lightnings_own",
    "a death": "strategies/test_pipelines_train.py::test_a_stage_that_dies_within_a_step_costs_nothing_but_time",
    "one pipeline": "pipeline/test_preview.py::test_one_pipeline_is_told_to_end_with_any_loss; "
    "membership/test_planned_pipelines.py::test_a_job_whose_parts_are_lost_waits_if_that_is_asked_for, "
    "test_a_job_whose_parts_are_lost_ends_with_their_names_and_the_newest_checkpoint",
    "a join": "strategies/test_pipelines_train.py::test_a_member_leaves_and_nobody_redoes_anything",
    "an error of your code": "pipeline/test_executor.py::test_a_layer_that_raises_ends_with_its_name, "
    "test_a_layer_that_raises_in_backward_is_named; "
    "strategies/test_pipelines_train.py::test_a_stage_that_dies_within_a_step_costs_nothing_but_time",
    "a NaN": "pipeline/test_told.py::test_what_is_not_finite_is_told_and_is_no_error, "
    "test_the_coefficient_is_that_of_torch; pipeline/test_cut_chain.py::test_the_users_own_nan_is_no_refusal",
    "a planner that fails": "membership/test_planned_pipelines.py::"
    "test_a_planner_that_fails_is_survived_and_an_answer_for_other_members_is_dropped; "
    "pipeline/test_border_tensors.py::test_hostile_heads_are_refused_by_name; "
    "pipeline/test_borders.py::test_a_refused_border_breaks_the_link_by_name",
    "several calls": "pipeline/test_undo.py::test_all_that_a_step_counts_is_put_back_as_often_as_it_runs",
    "random numbers": "strategies/test_pipelines_train.py::test_plans_do_not_matter; "
    "pipeline/test_randomness.py::test_dropout_is_the_same_wherever_layers_run",
    "sums": "strategies/test_pipelines_train.py::test_two_stages_train_as_one_process",
    "each process reads": "data/test_steps.py::test_workers_fetch_what_is_expected_and_nothing_else",
    "hooks and callbacks": "strategies/test_pipeline_front.py::"
    "test_hooks_that_look_at_gradients_are_told_once_what_they_see; strategies/test_pipelines_train.py::"
    "test_hooks_see_what_is_owned_and_the_norm_is_that_of_the_whole",
    "more members": "pipeline/test_preview.py::test_members_that_are_idle_are_named; "
    "planning/pipelines/test_pipeliner.py::test_a_newcomer_takes_a_vacant_place_or_stands_by",
    "`transfer`": "strategies/test_pipeline_front.py::test_settings_that_are_not_honoured_are_told",
    "several training loaders": "strategies/test_pipeline_front.py::test_several_training_loaders_are_refused; "
    "strategies/test_pipeline_refusals.py::test_refused_before_the_first_batch",
    "a cluster of `chaos_diloco`": "strategies/test_pipeline_front.py::test_a_cluster_of_outer_sync_has_no_stages, "
    "test_fabric_has_no_pipelines",
    "other policies": "configs/test_settings.py::test_a_setting_of_pipelines_is_checked",
    "no chain": "strategies/test_pipeline_front.py::test_a_chain_that_there_is_not_is_refused; "
    "pipeline/test_cut_chain.py::test_blocks_out_of_order_are_refused, test_a_reentrant_checkpoint_is_refused",
    "blocks that return": "pipeline/test_cut_chain.py::test_a_block_that_returns_something_else_is_refused, "
    "test_a_skip_over_a_border_is_refused, test_a_loss_that_looks_at_all_blocks_is_refused",
    "a loss that a block": "strategies/test_pipeline_front.py::"
    "test_a_model_that_gives_something_else_in_stages_is_refused, "
    "test_the_comparison_before_training_leaves_no_trace",
    "a plan without room": "pipeline/test_preview.py::test_what_does_not_fit_is_told_with_bytes_and_the_number_that_"
    "would; strategies/test_pipeline_front.py::test_a_dry_run_says_the_plan_and_trains_nothing",
    "a member with other": "membership/test_planned_pipelines.py::"
    "test_who_asks_for_something_else_is_refused_with_both_values; "
    "data/test_steps.py::test_members_agree_on_micro_batches_and_batch_size",
    "a collective": "strategies/test_pipeline_logs.py::test_collectives_within_a_unit_are_refused_by_name; "
    "strategies/test_pipeline_evaluation.py::test_a_collective_in_validation_step_is_refused",
    "`generate()`": "strategies/test_pipeline_evaluation.py::test_a_model_that_is_called_twice_is_refused_with_advice, "
    "test_a_call_of_the_whole_model_in_a_hook_is_refused_by_name",
    "`validate`, `test`, `predict` behind": "strategies/test_pipeline_evaluation.py::"
    "test_a_model_without_all_layers_is_not_evaluated_alone",
    "a write in place": "pipeline/test_executor.py::test_a_write_to_a_tensor_that_was_sent_is_found_and_named",
} | dict.fromkeys(
    ("`accumulate_grad_batches`", "several optimizers", "fp16", "`data=", "averages of weights", "LBFGS",
     "SyncBatchNorm", "DDP", "`LearningRateFinder`"),
    "strategies/test_pipeline_refusals.py::test_refused_before_the_first_batch",
)  # fmt: skip
"""Tests of each row of the tables of what works, changes and is refused, by what the row begins with."""


def test_each_row_of_what_works_changes_and_is_refused_has_a_test() -> None:
    page = (ROOT / "docs" / "pipelines.md").read_text()
    _, _, section = page.partition("## What works, what changes, what is refused\n")
    rows = re.findall(r"^\| (.+?) +\| ", section.partition("\n## ")[0], re.MULTILINE)
    heads = {"works", "changes", "is refused, by name"}
    assert heads < set(rows)
    assert sorted(row for row in rows if row not in heads and sum(map(row.startswith, TESTED)) != 1) == []
    assert [start for start in TESTED if not any(row.startswith(start) for row in rows)] == []
    for tests in TESTED.values():
        for file, names in (each.split("::") for each in tests.split("; ")):
            defined = re.findall(r"^def (test_\w+)", (ROOT / "tests" / file).read_text(), re.MULTILINE)
            assert set(names.split(", ")) <= set(defined), file


def test_the_page_shows_what_the_command_prints(installed: Installed, tmp_path: Path) -> None:
    """The page has the output of its command in a terminal of 100 columns; CHAOS_REWRITE=1 updates the page."""
    shutil.copytree(ROOT / "examples" / "plans", tmp_path / "examples" / "plans")
    path = ROOT / "docs" / "pipelines.md"
    command = block("docs/pipelines.md", "chaos-lightning plan examples/plans/llama7b.yaml")
    said = installed.run(command, tmp_path, COLUMNS="100")
    before, _, rest = path.read_text().partition(f"```bash\n{command}```\n\n```text\n")
    shown, _, after = rest.partition("```")
    if os.environ.get("CHAOS_REWRITE"):
        path.write_text(f"{before}```bash\n{command}```\n\n```text\n{said}```{after}")
        shown = said
    assert shown == said
    assert max(map(len, said.splitlines())) <= 100


@pytest.mark.slow
def test_the_commands_plan_for_the_file(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(block("docs/pipelines.md", "micro_batches: 24"))
    said = installed.run(block("docs/pipelines.md", "chaos-lightning plan fleet.yaml"), tmp_path, COLUMNS="100")
    heads = re.findall(r"^(\S+): (\d+) layers, (\d+) devices", said, re.MULTILINE)
    assert heads == [("fleet", "26", "14"), ("fleet", "26", "15"), ("fleet", "26", "14"), ("gpt:32,4096", "34", "64")]
    assert "lost: d3, d7" in said


SCRIPT = """
import sys
import torch
from torch import nn

assert sys.argv[1:] == ["--lr", "0.1"]
model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(8)])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
while True:
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_script_is_profiled_and_planned_for(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    said = installed.run(block("docs/pipelines.md", "chaos-lightning profile"), tmp_path, COLUMNS="100")
    assert "8 blocks of Linear in the model" in said
    assert "profile: 8 layers, 8 devices" in said


@pytest.mark.slow
def test_a_model_in_stages_is_trained(installed: Installed, tmp_path: Path) -> None:
    """Three processes with memory for half of the model each train it; only one of them prints the plan."""
    (tmp_path / "train.py").write_text(block("docs/pipelines.md", "import lightning as L"))
    said = installed.run(block("docs/pipelines.md", "CHAOS_DRY_RUN=1 python train.py"), tmp_path)
    assert "min_nodes=2 assumed" in said
    assert re.search(r"^\d pipelines? of .* stages; a step of 8 micro-batches \(128 samples\) takes about", said, re.M)
    said = installed.run(block("docs/pipelines.md", "for i in 1 2 3; do python train.py & done; wait"), tmp_path)
    assert "chaos: I am rank 2 of 3" in said
    assert len(re.findall(r"^chaos: \d pipelines? of .* stages; a step of 8 micro-batches", said, re.M)) == 1
    assert "`Trainer.fit` stopped: `max_epochs=3` reached." in said
