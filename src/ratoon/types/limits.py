"""The most that a recipe's counts may be: far above what anyone uses, and few enough that a plan of them is made within
seconds. What fits a machine is another question, which is asked of the machine."""

MAX_STEPS = 1_000_000_000

MAX_RESPONSES = 1 << 17
"""Of all groups of one step, and so its prompts: each is planned for."""

MAX_EVALUATED = 1 << 20
"""Responses of one evaluation, and so its prompts."""

MAX_GROUP_SIZE = 1 << 16
"""Responses to one prompt; and those that generate at a time."""

MAX_TOKENS = 1 << 27
"""Of one sequence, or of one forward pass."""

MAX_CACHE_TOKENS = 1 << 32

MAX_VOCABULARY = 1 << 24

MAX_ROWS = 1_000_000_000
"""Of a data set."""

MAX_MIB = 1 << 24
"""16 TiB."""

MAX_FACTOR = 1_000_000
"""Of a loss, a gradient or a probability ratio: float32 holds what they come to."""

MAX_PROCESSES = 1 << 16
"""Of all hosts. Each has microbatches of its own, which takes this many half a minute to plan."""

MAX_PROCESSES_OF_HOST = 1 << 10

MAX_REPEATS = 1_000_000
"""How often one thing is tried again."""

MAX_LAYERS = 1 << 9
MAX_HEADS = 1 << 12
"""Also of one head's width."""

MAX_WIDTH = 1 << 20
"""Of a layer."""
