"""The bodies of the API's requests, and what they ask of the client."""

from typing import Any

from pydantic import Field

from specwire.client import Chat
from specwire.http.failures import Refusal
from specwire.http.fields import Fields, ListOf
from specwire.http.values import encode_bad_words, read_biases, read_messages
from specwire.sampling_params import SamplingParams
from specwire.text import is_unicode
from specwire.tokenizer import Tokenizer

MAX_PROMPTS = 1024
"""Of one request: each one is a generation of its own."""
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
_NUM_SEEDS = 1 << 64
_OF_CHATS = dict.fromkeys(("prompt", "prompt_token_ids", "chat"), "messages")


class StreamOptions(Fields):
    """What a stream has beside the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class SamplingFields(Fields):
    """What completions and chats have in common; the defaults are OpenAI's."""

    model: str | None = None
    n: int = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | ListOf[str] | None = Field(None, description="text or a list of texts")
    stop_token_ids: ListOf[int] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = Field(default_factory=dict, description="an object of token ids and numbers")
    allowed_token_ids: ListOf[int] | None = None
    bad_words: ListOf[str] = Field(default_factory=list)
    max_draft_tokens: int | None = None
    priority: int = 0
    user: str = ""
    return_token_ids: bool = False
    return_token_origins: bool = False

    def sampling_params(self, tokenizer: Tokenizer | None) -> SamplingParams:
        """What it asks of sampling.

        Args:
            tokenizer: the served one, for bad words.

        Raises:
            Refusal: fields that contradict each other.
            InvalidArgumentError: a value that is not in its range.
        """
        if not is_unicode(self.user):
            raise Refusal(f"user is {self.user[:40]!r}, which is not valid UTF-8; send valid text", param="user")
        if self.stream_options is not None and not self.stream:
            raise Refusal("stream_options is given, but stream is not true; set stream, or leave it out", param="stream_options")
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            text = "stream_options.include_obfuscation is true, which is not supported; leave it out"
            raise Refusal(text, param="stream_options", code="unsupported_parameter")
        return SamplingParams(
            n=self.n,
            max_tokens=self._max_tokens(),
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self._noise_key(),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            include_stop_str_in_output=self.include_stop_str_in_output,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logit_bias=read_biases(self.logit_bias),
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            bad_words_token_ids=encode_bad_words(self.bad_words, tokenizer),
            logprobs=self.num_logprobs,
            max_draft_tokens=self.max_draft_tokens,
            priority=self.priority,
        )

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def counts_on(self) -> bool:
        """Whether each part of such a stream has the counts so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives to each token are wanted; None = no log-probabilities at all."""
        raise NotImplementedError

    @property
    def names(self) -> dict[str, str]:
        renamed = {"bad_words_token_ids": "bad_words"}
        if self.max_tokens is None and self.max_completion_tokens is not None:
            renamed["max_tokens"] = "max_completion_tokens"
        return super().names | renamed

    def _max_tokens(self) -> int | None:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            text = f"max_tokens is {self.max_tokens}, but max_completion_tokens, its other name, is {self.max_completion_tokens}; send one of them"
            raise Refusal(text, param="max_tokens")
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    def _noise_key(self) -> int | None:
        """The seed: OpenAI's are signed, the noise's key is their two's complement."""
        if self.seed is None:
            return None
        if not -_NUM_SEEDS // 2 <= self.seed < _NUM_SEEDS:
            shown = str(self.seed) if abs(self.seed) < 10**40 else "an integer of more than 40 digits"
            raise Refusal(f"seed is {shown}, but must be from {-_NUM_SEEDS // 2} to {_NUM_SEEDS - 1}; choose one in that range", param="seed")
        return self.seed % _NUM_SEEDS


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: str | ListOf[str] | ListOf[int] | ListOf[ListOf[int]] = Field(
        description="text, a list of texts, token ids, or a list of lists of token ids"
    )
    echo: bool = False
    logprobs: int | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """All of them. Raises Refusal if there are none, or too many."""
        prompt = self.prompt
        # A list of ids, and not of prompts, is one prompt; an empty one is neither.
        prompts = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else list(prompt)
        if not 1 <= len(prompts) <= MAX_PROMPTS:
            text = f"prompt holds {len(prompts)} prompts, but must hold 1 to {MAX_PROMPTS}"
            raise Refusal(f"{text}; {'send several requests' if prompts else 'send text or token ids'}", param="prompt")
        return prompts  # type: ignore[return-value]  # which of the types it has was checked when it was read

    def sampling_params(self, tokenizer: Tokenizer | None) -> SamplingParams:
        if self.echo and self.logprobs is not None:
            text = "echo is true and logprobs are asked for, but only generated tokens have log-probabilities; leave one of them out"
            raise Refusal(text, param="echo", code="unsupported_parameter")
        return super().sampling_params(tokenizer)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def names(self) -> dict[str, str]:
        return super().names | {"prompt_token_ids": "prompt"}

    def _max_tokens(self) -> int | None:
        given = super()._max_tokens()
        return _DEFAULT_COMPLETION_TOKENS if given is None else given


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions."""

    messages: ListOf[dict[str, Any]]
    tools: ListOf[dict[str, Any]] | None = None
    tool_choice: Any = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None

    def chat(self) -> Chat:
        """The conversation.

        Raises:
            Refusal: it has content that is no text, or asks for calls of tools.
            InvalidArgumentError: there are no messages, or one is none.
        """
        if self.tool_choice not in (None, "auto", "none"):
            text = "tool_choice must be auto or none: calls of tools are not read from the answer; leave it out and read them from the text"
            raise Refusal(text, param="tool_choice", code="unsupported_parameter")
        tools = None if self.tool_choice == "none" else self.tools
        return Chat(read_messages(self.messages), tools, self.add_generation_prompt, self.chat_template_kwargs)

    @property
    def num_logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise Refusal("top_logprobs is given, but logprobs is not true; set it, or leave top_logprobs out", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def names(self) -> dict[str, str]:
        return super().names | _OF_CHATS | {"logprobs": "top_logprobs"}


class TokenizeRequest(Fields):
    """POST /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: ListOf[dict[str, Any]] | None = None
    tools: ListOf[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @property
    def content(self) -> str | Chat:
        """What to tokenize. Raises Refusal, or InvalidArgumentError as of a chat."""
        if (self.prompt is None) == (self.messages is None):
            raise Refusal("prompt or messages must be given, and only one of them; send the other without it", param="prompt")
        if self.messages is None:
            return self.prompt or ""
        return Chat(read_messages(self.messages), self.tools, self.add_generation_prompt, self.chat_template_kwargs)

    @property
    def names(self) -> dict[str, str]:
        return super().names | (_OF_CHATS if self.prompt is None else {})


class DetokenizeRequest(Fields):
    """POST /detokenize."""

    model: str | None = None
    tokens: ListOf[int]
