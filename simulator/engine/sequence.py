"""The state of one request inside an engine."""

from simulator.engine.profiles import EngineProfile
from simulator.engine.records import EngineRequest

NOT_RUNNING = -1


class Sequence:
    """Mutable, and changed by the scheduler only.

    While it decodes, its counts follow from the iteration number: after v iterations it has
    emitted v + index_offset tokens, and s scheduled ones leave s + token_offset in the cache.
    """

    __slots__ = (
        "arrival_s",
        "cached_tokens",
        "computed",
        "decoding",
        "emitted",
        "filled",
        "final_blocks",
        "final_tokens",
        "first_scheduled_s",
        "hashes",
        "held",
        "hold",
        "id",
        "index_offset",
        "limit",
        "order",
        "output_tokens",
        "prompt_tokens",
        "queue_s",
        "rank",
        "remote",
        "run",
        "started_v",
        "target",
        "token_offset",
    )

    def __init__(
        self, request: EngineRequest, profile: EngineProfile, order: int, now_s: float
    ) -> None:
        prompt = request.prompt_tokens
        self.id = request.id
        self.order = order
        self.rank = request.priority if profile.scheduling == "priority" else 0
        self.arrival_s = now_s
        self.first_scheduled_s: float | None = None
        self.queue_s = 0.0  # from submission to first service
        self.prompt_tokens = prompt
        self.output_tokens = request.output_tokens
        final = prompt + request.output_tokens
        self.final_tokens = min(final, profile.max_model_len)
        self.final_blocks = -(-self.final_tokens // profile.block_tokens)
        self.limit = self.final_tokens - prompt  # output tokens until it ends
        self.hold = request.hold
        self.remote = prompt - 1 if request.remote else 0  # the last one gives the first token
        self.run = NOT_RUNNING  # number of its admission, unique in the engine
        self.started_v = 0
        self.target = prompt  # tokens to prefill; more than the prompt after a preemption
        self.computed = 0  # of them, scheduled so far
        self.emitted = 0  # output tokens before its last admission
        self.decoding = False
        self.index_offset = 0
        self.token_offset = 0
        self.cached_tokens = 0
        self.hashes = request.block_hashes[: prompt // profile.block_tokens]
        self.filled = 0  # leading blocks that are computed, whether shareable or not
        self.held: list[int] = []  # hashes of the shareable blocks it uses
