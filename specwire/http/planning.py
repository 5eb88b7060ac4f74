"""From a request's body to its generation: prompts as token ids, parameters, and the form of the answer."""

from specwire.http.encoding import encode
from specwire.http.failures import Refusal
from specwire.http.formats import AnswerHead, ChatFormat, CompletionFormat, Format
from specwire.http.generation import Generation
from specwire.http.requests import ChatRequest, CompletionRequest, SamplingFields
from specwire.http.token_text import TokenTexts
from specwire.http.upstream import Caller
from specwire.tokenizer import Tokenizer

_MAX_USER = 128
"""Characters of `user` that a label of logs and traces has."""


async def plan(body: SamplingFields, caller: Caller, answer_id: str, variant: str) -> Generation:
    """What the request asks for.

    Args:
        variant: of the coordinator's configuration; empty = by share.

    Raises:
        Refusal: something in it is wrong, or not supported.
        SpecwireError: a value is out of its range, or the coordinator can't be asked.
    """
    model = await caller.check_model(body.model)
    tokenizer = await caller.tokenizer()
    params = body.sampling_params(tokenizer)
    if tokenizer is None and not body.return_token_ids:
        raise Refusal("no tokenizer is served, so that answers have no text; set return_token_ids to get token ids", param="return_token_ids")
    texts = None if tokenizer is None or params.logprobs is None else caller.texts(tokenizer)
    if isinstance(body, ChatRequest):
        prompts = [await encode(body.chat(), tokenizer, model.max_model_len)]
        form: Format = ChatFormat(texts, prompts if body.return_token_ids else None, shows_origins=body.return_token_origins)
    else:
        assert isinstance(body, CompletionRequest), f"{type(body).__name__} is neither a chat nor a completion"
        given = body.prompts
        prompts = [await encode(prompt, tokenizer, model.max_model_len) for prompt in given]
        form = _completion_format(body, given, prompts, tokenizer, texts)
    head = AnswerHead.make(answer_id, caller.names(model)[0] if body.model is None else body.model)
    label = f"{answer_id} {body.user[:_MAX_USER]}" if body.user else answer_id
    return Generation(caller.client, prompts, params, form, head, label, variant)


def _completion_format(
    body: CompletionRequest, given: list[str | list[int]], prompts: list[list[int]], tokenizer: Tokenizer | None, texts: TokenTexts | None
) -> CompletionFormat:
    echoed = None
    if body.echo:
        if tokenizer is None:
            raise Refusal("echo is true, but no tokenizer is served; leave it out", param="echo")
        echoed = [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in given]
    shown_ids = prompts if body.return_token_ids else None
    return CompletionFormat(tokenizer, texts, echoed, shown_ids, body.n, shows_origins=body.return_token_origins)
