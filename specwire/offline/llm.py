"""LLM: from a model's name to lists of answers, with the services in the background."""

import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from specwire.client import Chat, Client, Prompt
from specwire.errors import SpecwireError, UnavailableError, UnsupportedError
from specwire.extras import check_engine
from specwire.offline.background import BackgroundStack
from specwire.offline.metrics import Metric, read_metrics
from specwire.offline.options import StackFlags, make_options
from specwire.offline.outputs import RequestOutput, make_output
from specwire.offline.progress import show_progress
from specwire.offline.prompts import OfflinePrompt, check_params, list_conversations, list_prompts, prompt_text, prompt_token_ids
from specwire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specwire.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class LLM:
    """A model and the services that run it: a verifier, a drafter and a coordinator as processes of this machine, which end with this object.

    Use it in `with`, or call `close`. One that is forgotten closes itself when it is collected or the program ends. Threads may share it.

    Args:
        model: a Hugging Face folder, a GGUF file or a hub id; by default that of `specwire up`.
        speculative_config: speculation, as everywhere in Specwire; what is left out has its default, {"method": None} decodes plainly.
        config: a specwire.yaml to begin with; no file is read that is not named.
        overrides: any key of the file, as "SECTION.KEY=VALUE".
        **flags: see StackFlags.

    Raises:
        InvalidArgumentError: an argument is wrong or unknown.
        FailedPreconditionError: what runs models is not installed.
        UnavailableError: a service does not start; it has the service's last lines.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        speculative_config: Mapping[str, Any] | None = None,
        config: str | PathLike[str] | None = None,
        overrides: Sequence[str] = (),
        **flags: Unpack[StackFlags],
    ) -> None:
        check_engine()
        options = make_options(model, speculative_config, config, overrides, flags)
        self._services = BackgroundStack(options)
        self._client = Client(self._services.address, api_key="")
        # Before the services: a client that is closed with calls under way has nothing to repeat.
        self._finalizer = weakref.finalize(self, _close, self._client, self._services)

    def generate(
        self,
        prompts: OfflinePrompt | Sequence[OfflinePrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        timeout: float | None = None,
        request_id: str = "",
    ) -> list[RequestOutput]:
        """Continues prompts, all together; returns an output for each, in their order.

        A prompt that fails has its error in its output (and raises it from `outputs`), and the others go on; how many failed is logged.

        Args:
            prompts: one or a list of: text, token ids, {"prompt": text}, {"prompt_token_ids": ids}, or a Chat.
            sampling_params: for all, or a list with those of each prompt.
            progress: show a progress bar, where standard error is a terminal or a notebook.
            timeout: seconds for each prompt, from when it is sent.
            request_id: a label for logs and traces; prompts get it with their number.

        Raises:
            InvalidArgumentError: arguments of a wrong kind, or fewer or more parameters than prompts; nothing was generated.
            UnavailableError: the services have ended.
            FailedPreconditionError: they were stopped.
        """
        return self._run(list_prompts(prompts), sampling_params, progress, timeout, request_id)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool = True,
        timeout: float | None = None,
        request_id: str = "",
    ) -> list[RequestOutput]:
        """Answers a conversation, or each of a list of them: `generate` with the model's chat template; other arguments as there and in Chat."""
        conversations = list_conversations(messages)
        chats = [Chat(each, tools, add_generation_prompt, chat_template_kwargs) for each in conversations]
        return self._run(chats, sampling_params, progress, timeout, request_id)

    def get_metrics(self) -> list[Metric]:
        """What the coordinator has counted since the start, under vLLM's names, such as vllm:spec_decode_num_drafts."""
        self._services.check()
        return read_metrics(self._client.get_status())

    def get_tokenizer(self) -> "Tokenizer":
        """The model's tokenizer. Raises UnsupportedError if there is none."""
        self._services.check()
        return self._client.get_tokenizer()

    @property
    def client(self) -> Client:
        """A client of the coordinator, for streams and everything else that it can do; closed with this object."""
        return self._client

    @property
    def pids(self) -> dict[str, int]:
        """The service processes that run, by name."""
        return self._services.pids

    def close(self) -> None:
        """Ends what runs and stops the services, in order; may be called again."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _run(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool,
        timeout: float | None,
        request_id: str,
    ) -> list[RequestOutput]:
        check_params(sampling_params, len(prompts))
        self._services.check()
        tokenizer = self._tokenizer()
        outputs: list[RequestOutput | None] = [None] * len(prompts)
        arrival_time = time.time()
        batch = self._client.generate_batch(prompts, sampling_params, timeout=timeout, request_id=request_id)
        with batch, show_progress(len(prompts), wanted=progress) as ended:
            for index, result in batch:
                prompt, label = prompts[index], f"{request_id}-{index}" if request_id else str(index)
                if isinstance(result, SpecwireError):
                    if isinstance(result, UnavailableError):
                        self._services.check()
                    output = RequestOutput(label, prompt_text(prompt, [], None), prompt_token_ids(prompt), error=result)
                else:
                    text = prompt_text(prompt, result.prompt_token_ids, tokenizer)
                    output = make_output(label, text, result, tokenizer, arrival_time, time.time())
                outputs[index] = output
                ended(output)
        done = [output for output in outputs if output is not None]
        assert len(done) == len(prompts), f"a batch of {len(prompts)} prompts gave {len(done)} outputs"
        if failed := [output for output in done if output.error is not None]:
            logger.warning("%d of %d prompts failed; the first one, number %s: %s", len(failed), len(done), failed[0].request_id, failed[0].error)
        return done

    def _tokenizer(self) -> "Tokenizer | None":
        try:
            return self._client.get_tokenizer()
        except UnsupportedError:
            return None


def _close(client: Client, services: BackgroundStack) -> None:
    try:
        client.close()
    finally:
        services.close()
