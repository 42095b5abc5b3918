"""Endpoints that vLLM's and SGLang's servers have alike."""

from ratoon.rollout.engines.http.protocol import ServerFacts, ServerLostError, shortened
from ratoon.rollout.engines.http.transport import Transport
from ratoon.rollout.errors import RolloutError


async def is_healthy(transport: Transport) -> bool:
    """Whether `/health` says so; false where nobody answers."""
    try:
        return await transport.status("/health") == 200
    except ServerLostError:
        return False


async def facts_of_models(transport: Transport, name: str, version: str) -> ServerFacts:
    """From `/v1/models`. Raises RolloutError where a server, of that name and version, lists no model."""
    models = await transport.get("/v1/models")
    cards = models.get("data") if isinstance(models, dict) else None
    if not isinstance(cards, list) or not cards or not all(isinstance(card, dict) for card in cards):
        raise RolloutError(f"{name} at {transport.url} lists no model: {shortened(models)}")
    longest = cards[0].get("max_model_len")
    names = tuple(str(card.get("id")) for card in cards)
    return ServerFacts(version, names, longest if isinstance(longest, int) else None)
