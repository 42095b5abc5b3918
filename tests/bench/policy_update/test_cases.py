"""The shapes are the published ones, and their work is counted as the design says."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from ratoon.bench.policy_update.cases import CASES, choose_cases
from ratoon.bench.policy_update.microbatches import alone_groups
from ratoon.bench.policy_update.random_model import decoder_config
from ratoon.bench.policy_update.variants import OUR_VARIANTS, PEER_VARIANTS, PEERS_TODAY, Variant
from ratoon.layout import pack_groups
from ratoon.models import model_shape
from ratoon.planner import useful_flops
from ratoon.types import UserError


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("1.7b-p8192-r512-n16", 1_720_574_976),
        ("8b-p8192-r1024-n16", 8_190_735_360),
        ("30b-a3b-cut-p8192-r512-n16", 8 * 623_120_640 + 2 * 151_936 * 2048 + 2048),
    ],
)
def test_models_have_the_published_number_of_weights(name: str, parameters: int):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(decoder_config(CASES[name].decoder))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_useful_work_of_the_main_case():
    """6 · weights · T + 6 · C · V · M + 3.5 · 4 · H · D · pairs · L, of the shared layout."""
    case = CASES["1.7b-p8192-r512-n16"]
    shape = model_shape(decoder_config(case.decoder))
    P, R, N = 8192, 512, 16
    rows, scored = P + N * R, N * R
    weights = 28 * (2048 * 128 * 2 * (16 + 8) + 3 * 2048 * 6144)
    pairs = P * (P + 1) // 2 + N * (R * P + R * (R + 1) // 2)
    wanted = 6 * weights * rows + 6 * 2048 * 151_936 * scored + 14 * 16 * 128 * pairs * 28
    assert useful_flops(shape, pack_groups(case.groups)) == pytest.approx(wanted, rel=1e-9)
    alone = pack_groups(alone_groups(case.groups))
    assert (alone.num_rows, alone.num_scored) == (N * (P + R), scored)


@pytest.mark.parametrize(
    ("name", "sequences"), [("1.7b-p8192-r512-n16", 2), ("1.7b-p2048-r2048-n16", 8), ("8b-p8192-r1024-n16", 2)]
)
def test_a_peers_microbatch_has_about_our_rows(name: str, sequences: int):
    assert CASES[name].sequences_of_peers == sequences


def test_what_cases_name_exists():
    for case in CASES.values():
        assert set(case.ours) <= set(OUR_VARIANTS)
        assert set(case.peers) <= set(PEER_VARIANTS)
    assert Variant.named(PEERS_TODAY).sequences == 4
    assert len(OUR_VARIANTS) == 6
    assert [case.name for case in choose_cases(None, has_gpu=False)] == ["tiny"]
    assert len(choose_cases(None, has_gpu=True)) == 3
    with pytest.raises(UserError, match="too large for a CPU"):
        choose_cases(["8b-p8192-r1024-n16"], has_gpu=False)
