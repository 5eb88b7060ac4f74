"""Text to token ids and back, special ids and chat templates; loads a model's folder or what a server sends. No torch."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from specwire.chat_template import ChatTemplate
from specwire.errors import FailedPreconditionError, InvalidArgumentError
from specwire.json_files import read_json_object, token_ids
from specwire.messages import TokenizerSpec

REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 4
_MAX_WINDOW_TOKENS = 16
_LONG_TEXT = 2_000
_LONG_IDS = 1_000
"""From so many characters or ids on, other threads run meanwhile: only the library's calls for batches let them."""
_CHAT_VARIABLES = frozenset(("messages", "tools", "add_generation_prompt", "bos_token", "eos_token"))
"""What `render_chat` itself gives to a template."""


class Tokenizer:
    """A tokenizer with its special ids and chat template.

    Args:
        spec: what `to_spec` gave, or a server sent.

    Raises:
        InvalidArgumentError: spec.tokenizer_json is no tokenizer.
    """

    def __init__(self, spec: TokenizerSpec) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(spec.tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise InvalidArgumentError(f"tokenizer.json ({len(spec.tokenizer_json)} bytes) can't be read: {error}") from error
        self._spec = spec
        self._chat_template = ChatTemplate(spec.chat_template) if spec.chat_template is not None else None

    @classmethod
    def from_folder(cls, folder: Path, model_id: str = "") -> "Tokenizer":
        """Loads tokenizer.json, tokenizer_config.json, chat_template.jinja, generation_config.json and config.json of a model's folder.

        Raises:
            InvalidArgumentError: there is no tokenizer.json, or it can't be read.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise InvalidArgumentError(f"{folder} has no tokenizer.json; save the model's tokenizer in the fast format (save_pretrained does)")
        content = path.read_bytes()
        settings, model = _read_json(folder / "tokenizer_config.json"), _read_json(folder / "config.json")
        generation = _read_json(folder / "generation_config.json")
        try:
            parsed = json.loads(content)
            ids, digest = _token_ids(parsed), fingerprint(parsed)
            vocab_size = max(ids.values(), default=-1) + 1
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidArgumentError(f"{path} can't be read as a tokenizer: {type(error).__name__}: {error}") from error
        eos_text, bos_text = (_token_text(settings.get(key)) for key in ("eos_token", "bos_token"))
        # The tokenizer's own EOS token comes first: templates call it eos_token.
        eos = [ids.get(eos_text), *token_ids(generation, "eos_token_id"), *token_ids(model, "eos_token_id")]
        bos = [ids[bos_text]] if bos_text in ids else token_ids(model, "bos_token_id")
        template_path, length = folder / "chat_template.jinja", model.get("max_position_embeddings")
        return cls(
            TokenizerSpec(
                tokenizer_json=content,
                fingerprint=digest,
                eos_token_ids=tuple(dict.fromkeys(token_id for token_id in eos if token_id is not None)),
                vocab_size=vocab_size,
                chat_template=_read_template(template_path, settings),
                bos_token_id=next(iter(bos), None),
                add_bos_token=bool(settings.get("add_bos_token", False)),
                model_id=model_id,
                max_model_len=length if isinstance(length, int) else 0,
            )
        )

    def to_spec(self) -> TokenizerSpec:
        """What another process needs to build an equal tokenizer."""
        return self._spec

    @property
    def fingerprint(self) -> str:
        """Hex sha256 of everything that decides which ids a text gets; equal fingerprints mean interchangeable ids."""
        return self._spec.fingerprint

    @property
    def vocab_size(self) -> int:
        """Highest id + 1; a model's logits may be padded beyond it."""
        return self._spec.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text, the tokenizer's own EOS token first."""
        return self._spec.eos_token_ids

    @property
    def bos_token_id(self) -> int | None:
        """Id that begins a text, where the model has one."""
        return self._spec.bos_token_id

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; with `add_special_tokens` also those that the model wants around a text (usually none or BOS)."""
        if len(text) < _LONG_TEXT:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        ids: list[int] = encoding.ids
        bos = self._spec.bos_token_id
        if add_special_tokens and self._spec.add_bos_token and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD."""
        ids = list(token_ids)
        if len(ids) < _LONG_IDS:
            text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        else:
            text = self._tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
        return text

    def token_text(self, token_id: int) -> str | None:
        """The vocabulary's entry of an id; None where there is none."""
        text: str | None = self._tokenizer.id_to_token(token_id)
        return text

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation by the model's own chat template.

        Args:
            messages: {"role", "content", ...} in order.
            tools: JSON schemas of functions that the model may call.
            add_generation_prompt: end with the beginning of the assistant's answer.
            variables: further variables that the template knows (enable_thinking, say).

        Raises:
            FailedPreconditionError: the model has no chat template.
            InvalidArgumentError: the template refuses the messages, or does not know tools or one of the variables.
        """
        if self._chat_template is None:
            raise FailedPreconditionError("messages were sent, but the model has no chat template; send a prompt instead")
        known = self._chat_template.variables
        if tools and "tools" not in known:
            raise InvalidArgumentError(f"tools has {len(tools)} of them, but the model's chat template knows none; leave tools out")
        for name in variables or ():
            if name in _CHAT_VARIABLES or name not in known:
                others = ", ".join(sorted(known - _CHAT_VARIABLES)) or "no others"
                raise InvalidArgumentError(
                    f"chat_template_kwargs has {name}, which the model's chat template does not read; besides messages and tools it reads {others}"
                )
        eos_token = self.token_text(self._spec.eos_token_ids[0]) if self._spec.eos_token_ids else None
        bos_token = self.token_text(self._spec.bos_token_id) if self._spec.bos_token_id is not None else None
        return self._chat_template.render(
            messages=[dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] if tools else None,
            add_generation_prompt=add_generation_prompt,
            bos_token=bos_token or "",
            eos_token=eos_token or "",
            **(variables or {}),
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of `render_chat`'s text; the template writes special tokens itself, so none are added."""
        text = self.render_chat(messages, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables)
        return self.encode(text, add_special_tokens=False)

    def incremental_decoder(self, *, skip_special_tokens: bool = True) -> "IncrementalDecoder":
        """A decoder for one stream of tokens."""
        return IncrementalDecoder(self, skip_special_tokens=skip_special_tokens)


class IncrementalDecoder:
    """Turns a stream of token ids into pieces of text that never hold part of a character; the pieces add up to `decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []  # the last tokens: enough context for what is not emitted yet
        self._num_emitted = 0  # characters of the window's text that are emitted

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty where it ends inside a character."""
        self._window.append(token_id)
        text = self._text(self._window)
        # The bytes of an incomplete character show as trailing replacement characters, at most three of them.
        held = min(len(text) - len(text.rstrip(REPLACEMENT)), 3)
        end = max(len(text) - held, self._num_emitted)
        piece = text[self._num_emitted : end]
        self._num_emitted = end
        if held == 0 and len(self._window) > _MAX_WINDOW_TOKENS:
            self._shrink(text)
        return piece

    def flush(self) -> str:
        """What is still held back, at the end of the stream: bytes that will never become a character, as U+FFFD."""
        text = self._text(self._window)
        piece = text[self._num_emitted :]
        self._num_emitted = len(text)
        return piece

    def _shrink(self, text: str) -> None:
        """Drops all but the last tokens, unless the text of those alone is not how `text` ends (a cut character)."""
        tail = self._window[-_CONTEXT_TOKENS:]
        tail_text = self._text(tail)
        if text.endswith(tail_text):
            self._window = tail
            self._num_emitted = len(tail_text)

    def _text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


def fingerprint(tokenizer_json: Mapping[str, Any]) -> str:
    """Hex sha256 over the canonical form of what decides a text's ids: vocabulary, merges, normalizer, splitter, added tokens."""
    relevant = {key: tokenizer_json.get(key) for key in ("model", "normalizer", "pre_tokenizer", "added_tokens")}
    canonical = json.dumps(_canonical(relevant), sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def _canonical(value: Any) -> Any:
    """Removes what writers of tokenizer.json do differently: fields left at null or false, merges as "a b" or ["a", "b"]."""
    if isinstance(value, Mapping):
        kept = {key: _canonical(item) for key, item in value.items() if item is not None and item is not False}
        if isinstance(kept.get("merges"), list):
            kept["merges"] = [merge if isinstance(merge, str) else " ".join(merge) for merge in kept["merges"]]
        return kept
    return [_canonical(item) for item in value] if isinstance(value, list) else value


def _token_ids(tokenizer_json: Mapping[str, Any]) -> dict[str, int]:
    """Token text -> id, of the vocabulary and the added tokens."""
    vocab = tokenizer_json["model"]["vocab"]
    ids = dict(vocab) if isinstance(vocab, Mapping) else {entry[0]: index for index, entry in enumerate(vocab)}
    added: Iterable[Mapping[str, Any]] = tokenizer_json.get("added_tokens") or ()
    return ids | {token["content"]: token["id"] for token in added}


def _token_text(value: Any) -> str:
    """tokenizer_config.json names a token by its text or by an object that holds it."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else ""


def _read_template(path: Path, settings: Mapping[str, Any]) -> str | None:
    """The file's, else that of the settings, of several the one named "default"."""
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgumentError(f"{path} can't be read ({error}); fetch or save it again") from error
    value = settings.get("chat_template")
    if isinstance(value, list):
        named = [entry for entry in value if isinstance(entry, dict) and entry.get("name") == "default"]
        value = named[0].get("template") if named else None
    if not isinstance(value, str | None):
        raise InvalidArgumentError(f"chat_template in {path.parent / 'tokenizer_config.json'} is no text, but {type(value).__name__}; save it again")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}
