"""Who holds which blocks: prompts their own, responses their prompt's and their own."""

# Shape letters: P prompt tokens, R response tokens.

from ratoon.rollout.engines.paged.blocks import BlockPool
from ratoon.rollout.engines.paged.requests import Family, Request, SharedPrompt
from ratoon.types import UserError


class Holdings:
    """A prompt is kept while a response of its group reads it or waits; one that none reads gives way to others."""

    def __init__(self, block_tokens: int, *, spare_tokens: int) -> None:
        """spare_tokens: that a response may draw behind its last one."""
        self._block_tokens = block_tokens
        self._spare_tokens = spare_tokens
        self._pool = BlockPool(0)
        # Families with a prompt, in the order in which the prompts came: a set that remembers it.
        self._keeping: dict[Family, None] = {}

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    def replace_pool(self, num_blocks: int) -> None:
        """Begin anew with as many blocks, all of them free. Nothing may be held."""
        assert self._pool.num_free == self._pool.num_blocks, (
            f"{self._pool.num_blocks - self._pool.num_free} blocks are held while the pool is replaced"
        )
        self._pool = BlockPool(num_blocks)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens)

    def most_own_blocks(self, max_response_tokens: int) -> int:
        """Blocks of the longest response; nothing reads its last token's keys, which are never written."""
        return self.blocks_for(max_response_tokens - 1 + self._spare_tokens)

    def check_fits(
        self, cache_tokens: int, prompt_id: str | int, num_prompt_tokens: int, max_response_tokens: int
    ) -> None:
        """Raise UserError where `cache_tokens` cannot hold even one response."""
        needed = self.blocks_for(num_prompt_tokens) + self.most_own_blocks(max_response_tokens)
        if needed > cache_tokens // self._block_tokens:
            raise UserError(
                f"prompt {prompt_id!r} of {num_prompt_tokens:,} tokens with a response of up to "
                f"{max_response_tokens:,} needs {needed * self._block_tokens:,} cache tokens in blocks of "
                f"{self._block_tokens}, over rollout.cache_tokens={cache_tokens:,}; raise it, lower "
                "rollout.max_response_tokens, or drop the prompt"
            )

    def seat(self, request: Request) -> bool:
        """Give a request its prompt and the blocks of the tokens it has, with room for its next pass; false where they
        are not free."""
        assert request.prompt is None and not request.own_blocks, "a request that holds blocks is given a seat"
        family = request.family
        group = family.group
        num_tokens = min(max(len(request.draft.token_ids), 1), group.max_response_tokens - 1)
        num_own = self.blocks_for(num_tokens)
        num_new = 0 if family.prompt is not None else self.blocks_for(group.prompt.num_tokens)
        if not self._make_free(num_new + num_own, for_family=family):
            return False
        if family.prompt is None:
            family.prompt = SharedPrompt(group.prompt.num_tokens, self._pool.allocate(num_new))
            self._keeping[family] = None
        self._pool.share(family.prompt.blocks)
        request.prompt = family.prompt
        request.own_blocks = self._pool.allocate(num_own)
        return True

    def grow(self, request: Request) -> bool:
        """One more block of its own; false where none is free."""
        # Its family's prompt gives way as well: under new weights it is another one than the request reads.
        if not self._make_free(1):
            return False
        request.own_blocks += self._pool.allocate(1)
        return True

    def leave(self, request: Request) -> None:
        """Free what the request holds. Its prompt stays while its group has a use for it."""
        assert request.prompt is not None, "a request without a seat leaves it"
        self._pool.release(request.own_blocks)
        self._pool.release(request.prompt.blocks)
        request.prompt = None
        request.own_blocks = []
        family = request.family
        if family.num_waiting == 0 and family.prompt is not None and not self._is_read(family.prompt):
            self.forget_prompt(family)

    def forget_prompt(self, family: Family) -> None:
        """The family's next response computes the prompt anew. Those that read it go on."""
        prompt = family.prompt
        if prompt is None:
            return
        prompt.logits_V = None
        self._pool.release(prompt.blocks)
        family.prompt = None
        del self._keeping[family]

    def forget_prompts(self) -> None:
        for family in list(self._keeping):
            self.forget_prompt(family)

    def _is_read(self, prompt: SharedPrompt) -> bool:
        # One holder is the prompt itself.
        return self._pool.num_holders(prompt.blocks[0]) > 1

    def _make_free(self, num_blocks: int, for_family: Family | None = None) -> bool:
        """Forget prompts that nobody reads, the latest first, until so many blocks are free. for_family: keeps its."""
        if self._pool.num_free >= num_blocks:
            return True
        idle = [
            family
            for family in self._keeping
            if family is not for_family and family.prompt is not None and not self._is_read(family.prompt)
        ]
        num_idle = sum(len(family.prompt.blocks) for family in idle if family.prompt is not None)
        if self._pool.num_free + num_idle < num_blocks:
            return False
        while self._pool.num_free < num_blocks:
            self.forget_prompt(idle.pop())
        return True
