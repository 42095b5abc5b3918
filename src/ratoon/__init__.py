"""Reinforcement learning for language models, with every shared prompt computed once.

Importing this package imports neither torch nor transformers. The public names live in
the sub-packages: `ratoon.types`, `ratoon.layout`, `ratoon.attention`, `ratoon.ops`,
`ratoon.models`, `ratoon.planner`.
"""

__version__ = "0.1.0"
