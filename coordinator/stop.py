"""When a sequence ends, applied token by token, so that a block of accepted tokens ends where a one-token-a-step decoder would."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from specwire.messages import FinishReason
from specwire.sampling_params import SamplingParams
from specwire.tokenizer import IncrementalDecoder, Tokenizer


class StopOutcome(NamedTuple):
    """What became of pushed tokens: the first num_taken are output, the rest are not. stop_cause is the token id (EOS or stop id) or
    stop string that fired. text is set iff the request has stop strings: what may be shown now, in addition to earlier text."""

    num_taken: int
    finish_reason: FinishReason | None = None
    stop_cause: int | str | None = None
    text: str | None = None


_GO_ON = tuple(StopOutcome(num_taken) for num_taken in range(130))
"""What nearly every step gives; made once, since a step makes hundreds."""


class StopRules:
    """The stop rules of one sequence. After each token, in this order:

    1. below min_tokens generated tokens only the length rule (4) applies,
    2. EOS (unless ignore_eos) and stop_token_ids: the id stays in the tokens, its text is left out,
    3. stop strings: the match that ends first wins, of several that end together the longest; the text is cut at its start, or at its
       end with include_stop_str_in_output,
    4. max_tokens and max_model_len.

    Args:
        eos_token_ids: the model's.
        max_model_len: most tokens of prompt and output together; more than num_prompt_tokens.
        tokenizer: needed iff params.stop is not empty.
    """

    def __init__(
        self, params: SamplingParams, eos_token_ids: Iterable[int], num_prompt_tokens: int, max_model_len: int, tokenizer: Tokenizer | None
    ) -> None:
        room = max_model_len - num_prompt_tokens
        assert room > 0, f"a prompt of {num_prompt_tokens} tokens leaves no room in {max_model_len}; admission must refuse it"
        self._max_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
        self._min_tokens = params.min_tokens
        self._stop_ids = frozenset(params.stop_token_ids) if params.ignore_eos else frozenset(params.stop_token_ids).union(eos_token_ids)
        self._num_generated = 0
        self._finished = False
        self._matcher: _StopStrings | None = None
        if params.stop:
            assert tokenizer is not None, f"stop strings {params.stop} need a tokenizer; admission must refuse them without one"
            self._matcher = _StopStrings(params.stop, tokenizer.incremental_decoder(), include_match=params.include_stop_str_in_output)

    def push(self, token_ids: Sequence[int]) -> StopOutcome:
        """Applies the rules to the sequence's next tokens; not to be called again once a finish_reason was given."""
        assert not self._finished, f"{len(token_ids)} tokens pushed after the end at {self._num_generated}"
        num_after = self._num_generated + len(token_ids)
        if self._matcher is None and num_after < self._max_tokens and self._stop_ids.isdisjoint(token_ids):
            self._num_generated = num_after
            return _GO_ON[len(token_ids)] if len(token_ids) < len(_GO_ON) else StopOutcome(len(token_ids))
        return self._push_one_by_one(token_ids)

    def _push_one_by_one(self, token_ids: Sequence[int]) -> StopOutcome:
        matcher = self._matcher
        text = ""
        for num_taken, token_id in enumerate(token_ids, start=1):
            self._num_generated += 1
            may_stop = self._num_generated >= self._min_tokens
            if may_stop and token_id in self._stop_ids:
                return self._finish(num_taken, FinishReason.STOP, token_id, text)
            if matcher is not None:
                piece, match = matcher.push(token_id, may_match=may_stop)
                text += piece
                if match is not None:
                    self._finished = True
                    return StopOutcome(num_taken, FinishReason.STOP, match, text)
            if self._num_generated >= self._max_tokens:
                return self._finish(num_taken, FinishReason.LENGTH, None, text)
        return StopOutcome(len(token_ids), text=None if matcher is None else text)

    def _finish(self, num_taken: int, reason: FinishReason, cause: int | None, text: str) -> StopOutcome:
        self._finished = True
        return StopOutcome(num_taken, reason, cause, None if self._matcher is None else text + self._matcher.flush())


class _StopStrings:
    """Looks for stop strings in the decoded text and holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str], decoder: IncrementalDecoder, *, include_match: bool) -> None:
        self._searches = [_Search(stop) for stop in stops]
        self._decoder = decoder
        self._include_match = include_match
        self._held = ""  # the longest end of the text that begins a stop string, so every match that goes on from it lies inside

    def push(self, token_id: int, *, may_match: bool) -> tuple[str, str | None]:
        """(text that may be shown, stop string that ends in this token's text or None); after a match nothing is held back."""
        piece = self._decoder.push(token_id)
        if not piece:
            return "", None
        text = self._held + piece
        match = self._first_match(piece)
        if match is not None and may_match:
            end, length = len(self._held) + match[0], match[1]
            self._held = ""
            return text[: end if self._include_match else end - length], text[end - length : end]
        num_held = max(search.num_matched for search in self._searches)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], None

    def flush(self) -> str:
        """What is held back, when something other than a stop string ended the sequence."""
        return self._held + self._decoder.flush()

    def _first_match(self, piece: str) -> tuple[int, int] | None:
        """(end in the piece, length) of the match that ends first; the longest of those. All searches go to the piece's end."""
        matches = [(end, -len(search.stop)) for search in self._searches if (end := search.push(piece))]
        if not matches:
            return None
        end, length = min(matches)
        return end, -length


class _Search:
    """Looks for one string in a text that comes in pieces, in a time that goes by the text's length alone, whatever the string (Knuth, Morris and
    Pratt 1977): one that nearly repeats itself would otherwise cost its length at each character, and all clients wait meanwhile.

    Attributes:
        num_matched: length of the longest end of the text that begins the string and is not all of it.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._borders = [0]
        """By length of a beginning, less 1: its longest shorter beginning that is also its end. Filled as far as texts have matched."""

    def push(self, piece: str) -> int:
        """Characters of the piece up to the end of the first match in it; 0 = none."""
        stop, num_matched, end = self.stop, self.num_matched, 0
        if not num_matched and stop[0] not in piece:
            return 0
        for position, character in enumerate(piece, start=1):
            while num_matched and stop[num_matched] != character:
                num_matched = self._border(num_matched)
            num_matched += stop[num_matched] == character
            if num_matched == len(stop):
                end = end or position
                num_matched = self._border(num_matched)
        self.num_matched = num_matched
        return end

    def _border(self, length: int) -> int:
        stop, borders = self.stop, self._borders
        while len(borders) < length:
            character, border = stop[len(borders)], borders[-1]
            while border and stop[border] != character:
                border = borders[border - 1]
            borders.append(border + (stop[border] == character))
        return borders[length - 1]
