"""A rank that stays away from a backward pass: no rank trains on, and none writes a checkpoint."""

import pytest
import training_runs
from nightly import at_night

pytest.importorskip("megatron.core")


@pytest.mark.parametrize("lateness", [at_night("prompt"), "late"])
def test_nothing_of_the_failed_pass_is_kept(tmp_path, lateness):
    recipe, out = training_runs.RECIPES / "tiny_moe_cpu.yaml", tmp_path / "run"
    texts = training_runs.run_with_a_stalled_rank(recipe, out, "cpu", lateness)
    training_runs.assert_nothing_was_kept(texts, out)
