"""What one request measured. Times are seconds of the run's clock."""

from dataclasses import dataclass, field

from specwire.messages import DraftReport, SpecStats, Usage

INTERRUPTED = "interrupted"
"""The error of a request that the end of the run cut off."""


@dataclass(slots=True)
class RequestRecord:
    """One request, from when it should have been sent to its last token.

    Attributes:
        index: number in the workload.
        start_s: where its latencies begin: its scheduled arrival; in a closed loop, when it was sent.
        sent_s: when it was handed to the client.
        chunk_times_s, chunk_sizes: when tokens came, and how many together.
        ended_s: when its end came.
        finish_reason: as the server says.
        drafts: the record of its verifications, if it was asked for.
        error: the kind of failure, or empty; error_text: what it says.
        num_retries: attempts before the one that counted.
        token_ids: what it gave, if they are kept; texts: the same as text, where the server sends that.
    """

    index: int
    num_prompt_tokens: int
    start_s: float
    sent_s: float
    ended_s: float = float("nan")
    chunk_times_s: list[float] = field(default_factory=list)
    chunk_sizes: list[int] = field(default_factory=list)
    finish_reason: str = ""
    usage: Usage | None = None
    spec: SpecStats | None = None
    drafts: DraftReport | None = None
    error: str = ""
    error_text: str = ""
    num_retries: int = 0
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        return not self.error

    @property
    def num_output_tokens(self) -> int:
        return sum(self.chunk_sizes)

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.chunk_times_s[0] - self.start_s

    @property
    def e2el_s(self) -> float:
        """Time to the end of the answer."""
        return self.ended_s - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of an output token after the first; None for answers of one token."""
        num_tokens = self.num_output_tokens
        return (self.e2el_s - self.ttft_s) / (num_tokens - 1) if num_tokens > 1 else None

    @property
    def wait_s(self) -> float:
        """How long the load generator held it back: for its turn under a limit of concurrent requests, or because it was busy."""
        return self.sent_s - self.start_s

    @property
    def chunk_gaps_s(self) -> list[float]:
        """Times between chunks, whatever is in them."""
        return [later - earlier for earlier, later in zip(self.chunk_times_s, self.chunk_times_s[1:], strict=False)]

    @property
    def token_gaps_s(self) -> list[float]:
        """One entry for each token after the first: its chunk's gap divided among the chunk's tokens; tokens that came with the first one took no
        time. Their sum is the time from the first chunk to the last."""
        if not self.chunk_sizes:
            return []
        gaps = [0.0] * (self.chunk_sizes[0] - 1)
        for gap, size in zip(self.chunk_gaps_s, self.chunk_sizes[1:], strict=True):
            gaps += [gap / size] * size
        return gaps
