"""What the API's paths do with requests."""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from specwire.config import HttpConfig
from specwire.errors import SpecwireError
from specwire.http.board import Board
from specwire.http.encoding import decode, encode, encode_text, token_texts
from specwire.http.exposition import Exposition
from specwire.http.failures import Refusal, refusal_of
from specwire.http.fields import Body, read_fields
from specwire.http.generate import Generations
from specwire.http.lifetime import Lifetime
from specwire.http.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from specwire.http.spans import HttpSpans
from specwire.http.upstream import Caller, Upstream
from specwire.token_ids import check_token_ids
from specwire.tokenizer import Tokenizer

MAX_CONTAINERS = 100_000
"""Lists and objects that a body may have."""
_JSON = "application/json"


class HttpService:
    """Answers requests through the coordinator.

    Args:
        config: of the process.
        upstream: the coordinator.
        lifetime: of the process's requests.
        board: counts.
        spans: of traced requests.

    Attributes:
        serves: whether the coordinator takes requests; kept by whoever watches it.
    """

    def __init__(self, config: HttpConfig, upstream: Upstream, lifetime: Lifetime, board: Board, spans: HttpSpans) -> None:
        self.lifetime = lifetime
        self.board = board
        self.serves = False
        self._started_s = int(time.time())
        self._upstream = upstream
        self._generations = Generations(upstream, lifetime, board, spans)
        self._exposition = Exposition(board, upstream.own if config.vllm_metrics else None, config.served_model_name)

    @property
    def why_not_ready(self) -> str:
        """Empty if requests are taken."""
        if self.lifetime.is_draining:
            return "the process is about to stop"
        return "" if self.serves else "the coordinator does not serve, or can't be reached; its own health and log say why"

    async def completions(self, request: Request) -> Response:
        """Continues prompts."""
        return await self._generations.answer(request, await _read(request, CompletionRequest, self.lifetime))

    async def chat_completions(self, request: Request) -> Response:
        """Answers a conversation."""
        return await self._generations.answer(request, await _read(request, ChatRequest, self.lifetime))

    async def models(self, request: Request) -> Response:
        """What may be asked for as `model`."""
        return JSONResponse({"object": "list", "data": await self._call(request, self._list_models)})

    async def model(self, request: Request) -> Response:
        """One of them."""
        name = request.path_params["model"]
        for model in await self._call(request, self._list_models):
            if model["id"] == name:
                return JSONResponse(model)
        raise Refusal(f"the model {name[:200]!r} is not served; GET /v1/models lists what is", status=404, param="model", code="model_not_found")

    async def status(self, request: Request) -> Response:
        """What the coordinator, its verifiers and its drafters do now."""
        return JSONResponse(dataclasses.asdict(await self._call(request, lambda caller: caller.client.get_status())))

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a conversation."""
        body = await _read(request, TokenizeRequest, self.lifetime)

        async def tokenize(caller: Caller) -> dict[str, Any]:
            model, tokenizer = await caller.check_model(body.model), _need(await caller.tokenizer())
            content = body.content
            if isinstance(content, str):
                token_ids = await encode_text(content, tokenizer, add_special_tokens=body.add_special_tokens)
            else:
                token_ids = await encode(content, tokenizer)
            answer = {"count": len(token_ids), "max_model_len": model.max_model_len, "tokens": token_ids}
            return answer | {"token_strs": await token_texts(token_ids, tokenizer) if body.return_token_strs else None}

        return JSONResponse(await self._call(request, tokenize, body.names))

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        body = await _read(request, DetokenizeRequest, self.lifetime)

        async def detokenize(caller: Caller) -> dict[str, Any]:
            await caller.check_model(body.model)
            tokenizer = _need(await caller.tokenizer())
            check_token_ids(body.tokens, tokenizer.vocab_size, "tokens")
            return {"prompt": await decode(body.tokens, tokenizer)}

        return JSONResponse(await self._call(request, detokenize, body.names))

    async def render_metrics(self) -> bytes:
        """For Prometheus."""
        return await self._exposition.render()

    async def _call(self, request: Request, work: Callable[[Caller], Any], names: Mapping[str, str] | None = None) -> Any:
        """What the work gives with the coordinator as this request's caller may use it.

        Args:
            names: as of `refusal_of`.

        Raises:
            Refusal: the request is wrong, or can't be served.
        """
        try:
            with self._upstream.caller(request.headers.get("authorization")) as caller:
                return await self.lifetime.run(request.receive, work(caller))
        except SpecwireError as error:
            raise refusal_of(error, names or {}) from error

    async def _list_models(self, caller: Caller) -> list[dict[str, Any]]:
        model = await caller.model()
        shown = {"object": "model", "created": self._started_s, "owned_by": "specwire", "root": model.name, "max_model_len": model.max_model_len}
        return [{"id": name, **shown} for name in caller.names(model)]


async def _read(request: Request, kind: type[Body], lifetime: Lifetime) -> Body:
    """The body of a request.

    Raises:
        Refusal: it is not JSON, or not what it must be.
        UnavailableError: it did not come before the process stopped.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Web pages may send other types anywhere, without asking first.
    if content_type != _JSON:
        text = f"the body's Content-Type is {content_type[:80]!r}, but must be {_JSON}; set that header"
        raise Refusal(text, status=415, code="unsupported_media_type")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        text = f"the body's Content-Encoding is {encoding[:80]!r}, but bodies are read as they are; send it without compression"
        raise Refusal(text, status=415, code="unsupported_media_type")
    content = await lifetime.read(request.body())
    num_containers = _count_containers(content)
    if num_containers > MAX_CONTAINERS:
        text = f"the body has {num_containers} lists and objects, but may have {MAX_CONTAINERS}; send several requests"
        raise Refusal(text, code="request_too_large")
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        reason = (
            str(error) if isinstance(error, json.JSONDecodeError) else "it is no UTF-8, nested too deeply, or has a number of thousands of digits"
        )
        raise Refusal(f"the body is no JSON ({reason}); correct it", code="invalid_json") from None
    return read_fields(kind, data)


def _count_containers(content: bytes) -> int:
    """Brackets and braces that open, where there may be too many outside of texts. Each one takes a hundred bytes as an object, and reading
    millions of them takes seconds, in which nothing else happens."""
    number = content.count(b"[") + content.count(b"{")
    if number <= MAX_CONTAINERS:
        return number
    outside = b"".join(content.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    return outside.count(b"[") + outside.count(b"{")


def _need(tokenizer: Tokenizer | None) -> Tokenizer:
    if tokenizer is None:
        raise Refusal("no tokenizer is served; the coordinator's verifiers run with skip_tokenizer", code="unsupported")
    return tokenizer
