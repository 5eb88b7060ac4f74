"""Who may call: API keys, what each of them may still ask for, and caches that no other key's requests can reach."""

import dataclasses
import datetime
import hashlib
import hmac
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable

from specwire.api_keys import ApiKey, load_api_keys
from specwire.errors import InvalidArgumentError, ResourceExhaustedError, UnauthenticatedError
from specwire.messages import GenerateRequest
from specwire.tls import FileWatch

from .admission import RETRY_AFTER_MS
from .engine import Engine, RequestHandle
from .metrics import Metrics
from .sink import Sink

logger = logging.getLogger(__name__)

_HEADER = "authorization"
_SCHEME = "bearer"


class Budget:
    """So many of something a minute, refilled evenly, with at most a minute's worth saved up. May be overdrawn."""

    __slots__ = ("_at", "_used")

    def __init__(self) -> None:
        self._used = 0.0
        self._at = 0.0

    def wait_s(self, per_minute: int, now: float) -> float:
        """Seconds until one more may be taken; 0 = now."""
        self._refill(per_minute, now)
        return max(0.0, (self._used + 1 - per_minute) * 60 / per_minute)

    def take(self, amount: int, per_minute: int, now: float) -> None:
        self._refill(per_minute, now)
        self._used += amount

    def _refill(self, per_minute: int, now: float) -> None:
        self._used = max(0.0, self._used - (now - self._at) * per_minute / 60)
        self._at = now


@dataclasses.dataclass(slots=True)
class Usage:
    """What the requests of one name have used; kept when the file changes, as long as it has the name or requests run."""

    num_choices: int = 0
    requests: Budget = dataclasses.field(default_factory=Budget)
    tokens: Budget = dataclasses.field(default_factory=Budget)


class KeyRing:
    """The keys of a file, read again when it has changed. A file that has become wrong changes nothing.

    Args:
        path: of the file (specwire.api_keys).
        check_interval_s: least time between two looks at the file.
        clock: seconds that never go back.
        now: the time of day.

    Attributes:
        num_refused: calls and requests that were refused, by cause.
        num_failed_reloads: changes of the file that could not be used.

    Raises:
        InvalidArgumentError: the file can't be used.
    """

    def __init__(
        self,
        path: str,
        *,
        check_interval_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC),
    ) -> None:
        self.num_refused: Counter[str] = Counter()
        self.num_failed_reloads = 0
        self._path = path
        self._check_interval_s = check_interval_s
        self.clock = clock
        self._now = now
        self._watch = FileWatch((path,))
        self._checked_at = clock()
        self._keys = load_api_keys(path)
        self._usage: dict[str, Usage] = {}
        self._log_number("")

    def authenticate(self, metadata: Iterable[tuple[str, str | bytes]]) -> bytes:
        """The hash of the key that a call brings.

        Raises:
            UnauthenticatedError: it brings none, or one that is not known or has expired.
        """
        values = [value for name, value in metadata if name == _HEADER]
        scheme, _, key = str(values[0]).partition(" ") if len(values) == 1 else ("", "", "")
        if scheme.lower() != _SCHEME or not key:
            self.num_refused["no_key"] += 1
            raise UnauthenticatedError(
                "the call needs one API key; send it in the metadata as `authorization: Bearer KEY` "
                "(Client(api_key=...), --api-key or SPECWIRE_API_KEY)"
            )
        digest = hashlib.sha256(key.strip().encode()).digest()
        self.find(digest)
        return digest

    def find(self, digest: bytes) -> ApiKey:
        """The entry of a key by the hash of the key, as the file has it now.

        Raises:
            UnauthenticatedError: it is not known, or not any more, or has expired.
        """
        self._refresh()
        found = None
        # All of them, whether or not it is found: how long this takes says nothing about the keys.
        for key in self._keys:
            if hmac.compare_digest(bytes.fromhex(key.hash), digest):
                found = key
        if found is None:
            self.num_refused["unknown_key"] += 1
            raise UnauthenticatedError("the API key is not known here, or was revoked; check it, or ask for a new one (`specwire keys new`)")
        if found.has_expired(self._now()):
            self.num_refused["expired_key"] += 1
            raise UnauthenticatedError(f"the API key {found.name!r} has expired; ask for a new one (`specwire keys new`)")
        return found

    def check_operator(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Raise UnauthenticatedError unless a call's key may change what the coordinator does for all."""
        key = self.find(self.authenticate(metadata))
        if not key.may_operate:
            raise UnauthenticatedError(f"the API key {key.name!r} may send requests only; use one whose entry has may_operate: true")

    def usage(self, name: str) -> Usage:
        """Of the keys of this name."""
        return self._usage.setdefault(name, Usage())

    def _log_number(self, remark: str) -> None:
        if self._keys:
            logger.info("%d API keys from %s%s", len(self._keys), self._path, remark)
        else:
            logger.warning("no API keys in %s%s: every call is refused", self._path, remark)

    def _refresh(self) -> None:
        if self.clock() - self._checked_at < self._check_interval_s:
            return
        self._checked_at = self.clock()
        if not self._watch.has_changed():
            return
        try:
            self._keys = load_api_keys(self._path)
        except InvalidArgumentError as error:
            self.num_failed_reloads += 1
            logger.error("the changed API keys are not used, the ones before stay: %s", error)
            return
        self._log_number(", which has changed")
        names = {key.name for key in self._keys}
        self._usage = {name: usage for name, usage in self._usage.items() if name in names or usage.num_choices}


class Tenant:
    """The engine for the caller of one API key.

    Args:
        engine: generates.
        keys: all keys.
        digest: the hash of the caller's.
    """

    def __init__(self, engine: Engine, keys: KeyRing, digest: bytes) -> None:
        self._engine = engine
        self._keys = keys
        self._digest = digest

    @property
    def metrics(self) -> Metrics:
        return self._engine.metrics

    def submit(self, message: GenerateRequest, sink: Sink) -> RequestHandle:
        """Engine.submit, within the key's limits and with its caches.

        Raises:
            UnauthenticatedError: the key was revoked or has expired since the call began.
            ResourceExhaustedError: a limit of the key is reached.
            SpecwireError: what Engine.submit raises.
        """
        keys = self._keys
        key = keys.find(self._digest)
        usage = keys.usage(key.name)
        try:
            _check(key, usage, message, keys.clock())
        except ResourceExhaustedError:
            keys.num_refused["over_limit"] += 1
            raise
        num_choices = message.sampling.n

        def ended(num_generated_tokens: int) -> None:
            usage.num_choices -= num_choices
            _charge(usage.tokens, num_generated_tokens, key.tokens_per_minute, keys.clock())

        handle = self._engine.submit(
            dataclasses.replace(message, tenant_cache_key=tenant_cache_key(key.name, message.tenant_cache_key)), sink, on_end=ended
        )
        usage.num_choices += num_choices
        _charge(usage.requests, 1, key.requests_per_minute, keys.clock())
        _charge(usage.tokens, len(message.prompt_token_ids), key.tokens_per_minute, keys.clock())
        return handle


def tenant_cache_key(name: str, own: bytes) -> bytes:
    """What separates the caches of a key's requests: of different names never equal, whatever the clients choose."""
    return hashlib.sha256(b"%d:%b:%b" % (len(name.encode()), name.encode(), own)).digest()


def _check(key: ApiKey, usage: Usage, message: GenerateRequest, now: float) -> None:
    """Raise ResourceExhaustedError for the first limit that a request passes."""
    num_choices, max_tokens, priority = message.sampling.n, message.sampling.max_tokens, message.sampling.priority
    if key.min_priority is not None and priority < key.min_priority:
        text = f"priority is {priority}, but min_priority of the API key {key.name!r} is {key.min_priority}"
        raise ResourceExhaustedError(f"{text}; a lower number would go before others: send {key.min_priority} or more")
    if limit := key.max_tokens_per_request:
        num_prompt = len(message.prompt_token_ids)
        if max_tokens is None or num_prompt + num_choices * max_tokens > limit:
            asked = "the rest of the context" if max_tokens is None else f"{num_choices} x {max_tokens}"
            text = f"the request has {num_prompt} prompt tokens and asks for {asked}"
            raise ResourceExhaustedError(f"{text}, but max_tokens_per_request of the API key {key.name!r} is {limit}; set max_tokens lower")
    if limit := key.max_concurrent_requests:
        if num_choices > limit:
            raise ResourceExhaustedError(f"n is {num_choices}, but max_concurrent_requests of the API key {key.name!r} is {limit}; ask for fewer")
        if usage.num_choices + num_choices > limit:
            text = f"{usage.num_choices} requests of the API key {key.name!r} are not done, and max_concurrent_requests is {limit}"
            raise ResourceExhaustedError(f"{text}; wait for one to end", retry_after_ms=RETRY_AFTER_MS)
    for name, budget in (("requests_per_minute", usage.requests), ("tokens_per_minute", usage.tokens)):
        limit = getattr(key, name)
        if limit and (wait_s := budget.wait_s(limit, now)):
            text = f"{name} of the API key {key.name!r} is {limit}, and that is used up"
            raise ResourceExhaustedError(f"{text}; try again in {math.ceil(wait_s)} s", retry_after_ms=math.ceil(1000 * wait_s))


def _charge(budget: Budget, amount: int, per_minute: int, now: float) -> None:
    if per_minute:
        budget.take(amount, per_minute, now)
