"""From projections to log-softmax input: scale, softcap, temperature."""

import math
from dataclasses import dataclass

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """logits = softcap(logit_scale * z) / temperature, for z = hidden @ weight.T + bias.

    softcap(x) = cap * tanh(x / cap), or x where cap is None.

    It is evaluated as y = gain_in * z, folded into the matrix product, then y = tanh(y) where there is a cap, then
    logit = gain_out_bits * y in units of log 2, folded into the subtraction of the maximum. Hence softmax is `exp2`:
    on the CPU `torch.exp` is a hundred times slower where its result underflows, `torch.exp2` is not.
    """

    temperature: float
    logit_scale: float
    softcap: float | None

    @property
    def gain_in(self) -> float:
        """Multiplies z."""
        return self.logit_scale / (self.temperature if self.softcap is None else self.softcap)

    @property
    def gain_out(self) -> float:
        """Multiplies y; above 0, so that the largest y has the largest logit."""
        return 1.0 if self.softcap is None else self.softcap / self.temperature

    @property
    def gain_out_bits(self) -> float:
        """`gain_out`, for logits in units of log 2."""
        return self.gain_out * LOG2_E

    @property
    def slope(self) -> float:
        """d logit / d z in natural units; with a cap, times 1 - tanh^2."""
        return self.logit_scale / self.temperature
