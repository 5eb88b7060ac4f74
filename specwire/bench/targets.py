"""What load is put on: the interface, and the coordinator over gRPC."""

import logging
import secrets
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from specwire.bench.backend import grpc_backend
from specwire.bench.runner import Send
from specwire.bench.serve_options import ServeOptions
from specwire.bench.server_counts import Counts
from specwire.bench.workload import Prompt, PromptLine, file_prompts, repeat, synthetic_prompts
from specwire.client import AsyncClient
from specwire.errors import InvalidArgumentError, SpecwireError, UnavailableError, UnsupportedError
from specwire.messages import CoordinatorStatus, SpecStats
from specwire.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Workload = tuple[list[Prompt], list[Prompt]]
"""What is measured, and what is sent before it to warm up."""
_NUM_SYNTHETIC = 100


@dataclass(frozen=True, slots=True)
class ServerSide:
    """What a server itself says of a run. counts: of a coordinator; speculation: where the answers do not tell it."""

    counts: Counts | None = None
    speculation: SpecStats | None = None


class Target(Protocol):
    """A server, in `async with`."""

    backend: str
    address: str
    model_id: str

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

    async def connect(self, timeout_s: float) -> None:
        """Waits until it serves. Raises UnavailableError if it does not in time."""

    def workload(self, options: ServeOptions, lines: list[PromptLine] | None) -> Workload:
        """The prompts. Raises InvalidArgumentError if they can't be made."""

    def sender(self, options: ServeOptions) -> Send:
        """The backend for the load generator."""

    async def begin(self) -> None:
        """The measured part begins: counts from now on."""

    async def end(self) -> ServerSide:
        """What it says of the time since `begin`."""

    def text(self, token_ids: list[int]) -> str | None:
        """What the tokens say; None if it is not known."""


class GrpcTarget:
    """A coordinator. tenant_cache_key: requests find nothing in the prefix cache of those with another one."""

    backend = "specwire-grpc"

    def __init__(self, client: AsyncClient, address: str, *, tenant_cache_key: bytes = b"") -> None:
        self.address = address
        self.model_id = ""
        self._client = client
        self._tenant_cache_key = tenant_cache_key
        self._tokenizer: Tokenizer | None = None
        self._before: CoordinatorStatus | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._client.close()

    async def connect(self, timeout_s: float) -> None:
        self._tokenizer = await connect(self._client, timeout_s)
        self.model_id = self._tokenizer.to_spec().model_id if self._tokenizer else ""

    def workload(self, options: ServeOptions, lines: list[PromptLine] | None) -> Workload:
        if lines is None:
            return made_up(options, allowed_token_ids(self._tokenizer, options.vocab_size))
        if self._tokenizer is None:
            raise InvalidArgumentError("the coordinator serves no tokenizer, so a prompt file is of no use; leave --prompts out")
        return repeated(options, file_prompts(lines, self._tokenizer, options.lengths.output_len, as_chat=options.chat))

    def sender(self, options: ServeOptions) -> Send:
        label = f"bench-{secrets.token_hex(4)}"
        return grpc_backend(
            self._client,
            options.params,
            label=label,
            timeout_s=options.timeout_s,
            max_retries=options.max_retries,
            tenant_cache_key=self._tenant_cache_key,
        )

    async def begin(self) -> None:
        self._before = await self._status()

    async def end(self) -> ServerSide:
        after = await self._status()
        return ServerSide(Counts.of_status(self._before, after) if self._before and after else None)

    def text(self, token_ids: list[int]) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.decode(token_ids)

    async def _status(self) -> CoordinatorStatus | None:
        try:
            return await self._client.get_status()
        except SpecwireError as error:
            logger.warning("the coordinator's own counters are left out: %s", error)
            return None


async def connect(client: AsyncClient, timeout_s: float) -> Tokenizer | None:
    """Waits until the coordinator serves; its tokenizer, if it has one.

    Raises:
        UnavailableError: it does not serve in time.
    """
    try:
        await client.wait_ready(timeout_s)
        return await client.get_tokenizer()
    except UnsupportedError:
        return None
    except UnavailableError as error:
        raise UnavailableError(f"{error} (`specwire up` starts one on this machine)") from error


def made_up(options: ServeOptions, allowed_ids: list[int]) -> Workload:
    """Prompts of token ids; those to warm up are others, so that no measured one is in a cache."""
    count = options.num_prompts or _NUM_SYNTHETIC
    prompts = synthetic_prompts(count + options.num_warmups, options.lengths, allowed_ids, options.seed)
    return prompts[:count], prompts[count:]


def allowed_token_ids(tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
    """Ids that made-up prompts may hold: all but those that begin or end a text.

    Raises:
        InvalidArgumentError: the size of the vocabulary is not known, or smaller than said.
    """
    if tokenizer is None:
        if not vocab_size:
            raise InvalidArgumentError("the coordinator serves no tokenizer, so the size of its vocabulary must be given with --vocab-size")
        return list(range(vocab_size))
    if vocab_size > tokenizer.vocab_size:
        raise InvalidArgumentError(f"--vocab-size is {vocab_size}, but the served vocabulary has {tokenizer.vocab_size} ids; leave it out")
    special = {*tokenizer.eos_token_ids, tokenizer.bos_token_id}
    return [token_id for token_id in range(vocab_size or tokenizer.vocab_size) if token_id not in special]


def repeated(options: ServeOptions, prompts: list[Prompt]) -> Workload:
    """Of a file; to warm up with, as far as there are any, those behind the measured ones."""
    count = options.num_prompts or len(prompts)
    return repeat(prompts, count), repeat(prompts, options.num_warmups, first=count)
