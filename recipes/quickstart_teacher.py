"""The careless teacher of the quick start: about two times in three it copies the word instead of reversing it.

Supervised training imitates the teacher, mistakes included, and can be no better. What is better comes from the reward.
"""

import zlib

MISTAKES_PER_HUNDRED = 65


def demonstrate(prompt: str, answer: str) -> str:
    """The text to imitate for this prompt: its answer, or the word as it stands."""
    is_mistake = zlib.crc32(prompt.encode()) % 100 < MISTAKES_PER_HUNDRED
    return answer[::-1] if is_mistake else answer
