"""The prefill that each worker has ahead of it: bound here and without a first token yet.

The expected wait (the paper's W-hat) is the predicted prefill of all that is bound to a worker,
less what of the one in progress should be done by now. By no more than that does it fall until
first tokens come, so a worker that stalls, or whose slots are full, keeps the rest of its backlog.
"""

from collections.abc import Sequence

from gateway.policy.scheduling.scheduler import Job


class Backlogs:
    """Of one pool's workers."""

    __slots__ = (
        "_oldest_s",
        "_since_s",
        "_told",
        "bound_s",
        "others_s",
        "replicas",
        "sent",
        "sent_tokens",
    )

    def __init__(self, workers: int) -> None:
        self.replicas = 1
        """Gateways that share the workers, >= 1."""
        self.bound_s = [0.0] * workers
        """Predicted prefill of the jobs bound here without a first token; >= 0."""
        self.others_s = [0.0] * workers
        """The same of the other gateways, as last told."""
        self.sent: list[dict[Job, int]] = [{} for _ in range(workers)]
        """Of those, the jobs sent, oldest first, with their uncached tokens."""
        self.sent_tokens = [0] * workers
        """The sum of these tokens."""
        self._oldest_s = [0.0] * workers
        """Predicted prefill of the oldest one sent; 0 where there is none."""
        self._since_s = [0.0] * workers
        """When that may have begun."""
        self._told = False

    def waits_s(self, workers: Sequence[int], now_s: float) -> list[float]:
        """W-hat of each, >= 0: seconds until a newcomer's prefill may begin."""
        bound, others, oldest, since = self.bound_s, self.others_s, self._oldest_s, self._since_s
        share = 1 if self._told else self.replicas  # untold, the others are taken to have as much
        waits_s = []
        for worker in workers:
            wait_s = bound[worker] * share + others[worker]
            done_s = now_s - since[worker]
            if done_s > 0.0:
                wait_s -= min(done_s, oldest[worker])
            waits_s.append(max(0.0, wait_s))
        return waits_s

    def behind_tokens(self, worker: int) -> int:
        """Uncached tokens sent, behind the prefill in progress."""
        for tokens in self.sent[worker].values():
            return self.sent_tokens[worker] - tokens
        return 0

    def bind(self, job: Job) -> None:
        """A job will go to its worker, and take its `mean_s` there."""
        self.bound_s[job.worker] += job.mean_s

    def unbind(self, job: Job) -> None:
        """It needs no prefill there any more: it has its first token, or never will."""
        worker = job.worker
        left_s = self.bound_s[worker] - job.mean_s
        self.bound_s[worker] = left_s if left_s > 1e-9 else 0.0

    def send(self, job: Job, tokens: int, now_s: float) -> None:
        """A bound job is sent; so many of its tokens are not cached."""
        sent = self.sent[job.worker]
        if not sent:
            self._oldest_s[job.worker] = job.mean_s
            self._since_s[job.worker] = now_s
        sent[job] = tokens
        self.sent_tokens[job.worker] += tokens

    def leave(self, job: Job, now_s: float) -> None:
        """A sent job has its first token, or has ended without."""
        worker = job.worker
        sent = self.sent[worker]
        self.sent_tokens[worker] -= sent.pop(job)
        self._oldest_s[worker] = next(iter(sent)).mean_s if sent else 0.0
        self._since_s[worker] = now_s
        self.unbind(job)

    def tell(self, others_s: Sequence[float]) -> None:
        """Take in what the other gateways have bound and not seen answered, by worker."""
        self._told = True
        self.others_s = list(others_s)
