"""An update of vLLM's weights: one session of its own, whichever side of vLLM takes the layers apart for it."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ratoon.rollout.engines.vllm.versions import Interfaces

if TYPE_CHECKING:
    from ratoon.rollout.engines.vllm.transfer import InProcessTransfer


class UpdateSession:
    """Once each: `open`, any number of buckets, `close`. Fused and cut weights may come in several buckets.

    vLLM 0.24's worker takes the layers apart and puts them together; later ones have the transfer engine do it. So
    what is to be known of a session is noted here, around either.
    """

    def __init__(self, llm: Any, interfaces: Interfaces) -> None:
        """llm: `vllm.LLM` with its core in this process, and our transfer back end."""
        self._llm = llm
        self._interfaces = interfaces
        (self._worker,) = llm.collective_rpc(_itself)
        self._has_failed = False

    def open(self) -> None:
        self._transfer.begin()
        self._llm.start_weight_update()

    def hand_over(self, bucket: list[tuple[str, Tensor]]) -> None:
        """Raises whatever vLLM raises for a tensor that it does not know, or of another shape."""
        try:
            self._llm.update_weights({"update_info": {"weights": bucket}})
        except BaseException:
            self._has_failed = True
            raise

    def close(self, version: int) -> list[str]:
        """Names of what no tensor went into. To be called whatever happened: layers would stay without memory, and the
        next session would be refused."""
        transfer = self._transfer
        transfer.note_partial()
        if self._has_failed:
            # vLLM has closed the session, but not put the layers together.
            transfer.put_together(self._worker.device, self._worker.model_config)
        elif self._interfaces.names_versions:
            self._llm.finish_weight_update(str(version))
        else:
            self._llm.finish_weight_update()
        transfer.pack_tied()
        return transfer.missing

    @property
    def _transfer(self) -> "InProcessTransfer":
        return self._worker.weight_transfer_engine


def _itself(worker: Any) -> Any:
    return worker
