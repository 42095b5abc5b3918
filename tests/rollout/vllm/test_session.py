"""An update of vLLM's weights, over stand-ins of the versions that do it in different ways. No vLLM is needed."""

import pytest
import torch
from tests.rollout.vllm.stand_ins import VERSIONS, Llm, make_llm
from torch import Tensor

from ratoon.rollout.engines.vllm.session import UpdateSession
from ratoon.rollout.engines.vllm.versions import interfaces_of

Bucket = list[tuple[str, Tensor]]


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch, version: str) -> Llm:
    return make_llm(monkeypatch, version)


def checkpoint(value: float) -> list[Bucket]:
    """The two halves of the fused layer in buckets of their own."""
    q, k = torch.full((2, 3), value), torch.full((2, 3), -value)
    return [[("q.weight", q)], [("norm.weight", torch.full((3,), value)), ("k.weight", k)]]


def update(llm: Llm, version: str, buckets: list[Bucket], number: int) -> list[str]:
    session = UpdateSession(llm, interfaces_of(version))
    session.open()
    try:
        for bucket in buckets:
            session.hand_over(bucket)
    finally:
        missing = session.close(number)
    return missing


def test_all_weights_arrive_whoever_takes_the_layers_apart(llm: Llm, version: str):
    reload = llm.worker.reload
    for number in (1, 2):
        assert update(llm, version, checkpoint(number), number) == []
        assert reload.model.qk.weight.tolist() == [[number] * 3] * 2 + [[-number] * 3] * 2
        assert reload.model.norm.weight.tolist() == [number] * 3
        assert reload.num_finalized == number and not llm.worker.is_active
    assert llm.names == (["1", "2"] if version == "0.32.0" else [])


def test_what_a_session_lacks_is_named_though_the_one_before_had_it(llm: Llm, version: str):
    update(llm, version, checkpoint(1.0), 1)
    assert update(llm, version, [checkpoint(2.0)[0]], 2) == ["norm.weight", "qk"]
    assert update(llm, version, [], 3) == ["norm.weight", "qk.weight"]
    assert update(llm, version, checkpoint(4.0), 4) == []


def test_after_a_refused_tensor_the_layers_are_together_and_the_next_session_is_well(llm: Llm, version: str):
    """TRL#5892: after a transfer that raised, the session was never finished and the engine was left half loaded."""
    wrong: Bucket = [("strange.weight", torch.zeros(2))]
    with pytest.raises(AttributeError, match="strange"):
        update(llm, version, [checkpoint(1.0)[0], wrong], 1)
    assert not llm.worker.reload.model.is_apart and llm.names == []
    assert update(llm, version, checkpoint(2.0), 2) == []
    assert llm.worker.reload.num_finalized == 2


def test_a_session_that_the_trainer_breaks_off_is_closed(llm: Llm, version: str):
    assert update(llm, version, [checkpoint(1.0)[0]], 1) == ["norm.weight", "qk"]
    assert not llm.worker.is_active and not llm.worker.reload.model.is_apart
