"""The sizes of a decoder, read from its configuration, for counting work and memory."""

# Shape letters: L layers, H heads, D head dim, C channels, V vocabulary, E experts, K experts per token.

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of one decoder-only transformer."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    intermediate_size: int
    """Width of the dense MLP, or of one expert."""

    num_experts: int = 0
    """0 for a dense model."""

    experts_per_token: int = 0
    tied_embeddings: bool = False
    windows: tuple[int | None, ...] = ()
    """[L] sliding window of each layer in tokens, None where attention is global; empty: all global."""

    @property
    def attention_parameters(self) -> int:
        """Projection weights of one layer."""
        return self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)

    @property
    def active_mlp_parameters(self) -> int:
        """MLP weights of one layer that one token meets."""
        width = self.intermediate_size * max(self.experts_per_token, 1)
        return 3 * self.hidden_size * width + self.hidden_size * self.num_experts

    @property
    def active_parameters(self) -> int:
        """Weights one token meets in all layers, embedding and head left out."""
        return self.num_layers * (self.attention_parameters + self.active_mlp_parameters)
