"""The engines behind `RolloutEngine`; the only package that knows a serving engine."""
