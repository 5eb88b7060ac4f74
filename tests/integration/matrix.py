"""The matrix: requests with every sampling, and the configurations of services that must all give them the same tokens."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specwire.config import DEFAULT_MODEL, DrafterConfig, VerifierConfig
from specwire.engine.checkpoint import resolve_model
from specwire.engine.heads.kinds import open_head
from specwire.sampling_params import SamplingParams
from specwire.speculative_config import SpeculativeConfig
from specwire.tokenizer import Tokenizer

from .noisy_model import noisy_twin
from .stack import NUM_THREADS

PROMPTS = Path(__file__).parents[1] / "data" / "prompts.jsonl"
HEAD = Path(__file__).parents[2] / "models" / "smollm2-135m-instruct-eagle3"
"""Of the default model."""
MAX_PROMPT_TOKENS = 96
MAX_MODEL_LEN = 192
K_MAX = 8
_K_HEAD = 5
"""No configuration asks a head for more; a block of DSpark has seven drafts."""
BATCH_SIZE = 12
_MAX_NUM_SEQS = 16
"""Of drafters with a model: as many as the verifiers have. On a GPU each size is a graph to capture at every start."""
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "T=0.7 top_p=0.95": SamplingParams(temperature=0.7, top_p=0.95),
    "T=1 top_k=40 penalties": SamplingParams(temperature=1.0, top_k=40, presence_penalty=0.4, frequency_penalty=0.3, repetition_penalty=1.1),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One request of the matrix; seeds differ from prompt to prompt."""

    prompt: str
    sampling: str
    prompt_token_ids: list[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to run the cases.

    Args:
        name: in reports.
        verifiers, drafters: names in the fleet; drafter `garbage` is one in this process.
        speculation, coordinator: its speculative configuration, and other fields of the coordinator's.
        kill: a service of the fleet that gets SIGKILL once half of the tokens have come.
        waves: how many requests start together; the next ones follow when these have some tokens. Empty: all at once.
        max_outstanding_rounds: W.
        preempts: whether sequences must have been preempted.
        accepts: whether drafts must have been accepted.
        has_free_drafts: the coordinator is made to believe that drafts cost next to nothing, so that they pay on every machine.
    """

    name: str
    verifiers: tuple[str, ...] = ("verifier",)
    drafters: tuple[str, ...] = ()
    speculation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    kill: str = ""
    waves: tuple[int, ...] = ()
    max_outstanding_rounds: int = 2
    preempts: bool = False
    accepts: bool = True
    has_free_drafts: bool = False
    coordinator: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def services(self) -> tuple[str, ...]:
        """Of the fleet."""
        return tuple(name for name in (*self.verifiers, *self.drafters) if name != "garbage")

    def has_head(self, method: str) -> bool:
        """Whether a head of this method drafts, alone or in a list."""
        return any(method in name.split(" and ") for name in self.drafters)


def fleet_configs(
    model: str = DEFAULT_MODEL, noisy_model: Path | None = None, head: Path = HEAD, *, device: str = "cpu", dtype: str = "float32"
) -> dict[str, VerifierConfig | DrafterConfig]:
    """The services of the matrix: verifiers of equal model, dtype and threads; drafters by name.

    Args:
        noisy_model: the model with noise; None = made here and kept in the user's cache.
        head: a draft head of the model, whose features all verifiers keep; that of the default model runs in the numbers that users get. Its
            drafters have its method's name.
    """
    method = head_method(head)
    verifier = VerifierConfig(
        model=model, device=device, dtype=dtype, num_threads=NUM_THREADS, max_model_len=MAX_MODEL_LEN, num_kv_blocks=256, features=(str(head),),
        speculative_config=SpeculativeConfig(num_speculative_tokens=K_MAX),
    )  # fmt: skip
    noisy = DrafterConfig(
        device=device, dtype=dtype, num_threads=NUM_THREADS, max_num_seqs=_MAX_NUM_SEQS, kv_cache_memory=256 << 20,
        speculative_config=SpeculativeConfig.from_dict(
            {"method": "draft_model", "model": str(noisy_model or noisy_twin(resolve_model(model))), "num_speculative_tokens": K_MAX}
        ),
    )  # fmt: skip
    same = dataclasses.replace(
        noisy, speculative_config=SpeculativeConfig.from_dict({"method": "draft_model", "model": model, "num_speculative_tokens": K_MAX})
    )
    drafting_head = DrafterConfig(
        device=device, dtype="auto" if model == DEFAULT_MODEL else dtype, num_threads=NUM_THREADS, target_model=model, max_num_seqs=_MAX_NUM_SEQS,
        kv_cache_memory=256 << 20,
        speculative_config=SpeculativeConfig.from_dict({"method": method, "model": str(head), "num_speculative_tokens": _K_HEAD}),
    )  # fmt: skip
    return {
        "verifier": verifier,
        "second": verifier,
        "scarce": dataclasses.replace(verifier, num_kv_blocks=18),
        "ngram": DrafterConfig(speculative_config=SpeculativeConfig(num_speculative_tokens=K_MAX)),
        "suffix": DrafterConfig(speculative_config=SpeculativeConfig(method="suffix", num_speculative_tokens=K_MAX)),
        "lookups": DrafterConfig(speculative_config=SpeculativeConfig(method=("ngram", "suffix"), num_speculative_tokens=K_MAX)),
        "noisy": noisy,
        "same": same,
        "mixed": dataclasses.replace(noisy, speculative_config=dataclasses.replace(noisy.speculative_config, method=("ngram", "draft_model"))),
        method: drafting_head,
        f"ngram and {method}": dataclasses.replace(
            drafting_head, speculative_config=dataclasses.replace(drafting_head.speculative_config, method=("ngram", method))
        ),
    }


def head_method(head: Path) -> str:
    """Which method the checkpoint in a folder is for."""
    return open_head(head)[0].method


_ADAPTIVE = {"enable_adaptive_verification": True}
_MANY_PROBES = {"adaptive_probe_share": 0.1}
"""The most that there may be, so that there are drafts, and trims, even where none pays."""


def full_matrix(head: str = "eagle3") -> list[Configuration]:
    """Every configuration that must not change a token.

    Args:
        head: method of the fleet's head.
    """
    both = f"ngram and {head}"
    return [
        Configuration("no drafter"),
        Configuration("no drafter, W=1", max_outstanding_rounds=1),
        Configuration("no drafter, one by one", waves=(1,)),
        Configuration("ngram K=5", drafters=("ngram",), speculation=_k(5)),
        Configuration("ngram K=5, W=1", drafters=("ngram",), speculation=_k(5), max_outstanding_rounds=1),
        Configuration("suffix K=8", drafters=("suffix",), speculation=_k(8)),
        Configuration("ngram and suffix K=5", drafters=("lookups",), speculation=_k(5)),
        Configuration("draft_model K=1", drafters=("noisy",), speculation=_k(1)),
        Configuration("draft_model K=3", drafters=("noisy",), speculation=_k(3)),
        Configuration("draft_model K=8", drafters=("noisy",), speculation=_k(8)),
        Configuration("draft_model K=3, one by one", drafters=("noisy",), speculation=_k(3), waves=(1,)),
        Configuration(f"{head} K=5", drafters=(head,), speculation=_k(5)),
        Configuration(f"{head} K=5, one by one", drafters=(head,), speculation=_k(5), waves=(1,)),
        Configuration(f"{both} K=5", drafters=(both,), speculation=_k(5)),
        Configuration("adaptive, ngram K=5", drafters=("ngram",), speculation=_k(5) | _ADAPTIVE, coordinator=_MANY_PROBES),
        # A draft model as large as the target hardly ever pays.
        Configuration(
            "adaptive, draft_model K=8",
            drafters=("noisy",),
            speculation=_k(8) | _ADAPTIVE,
            coordinator=_MANY_PROBES,
            waves=(1,),
            has_free_drafts=True,
        ),
        Configuration(f"adaptive, {head} K=5", drafters=(head,), speculation=_k(5) | _ADAPTIVE, coordinator=_MANY_PROBES),
        Configuration(f"adaptive, {both} K=5", drafters=(both,), speculation=_k(5) | _ADAPTIVE, coordinator=_MANY_PROBES),
        crossing_zero("noisy", (3, 3, 6), 8),
        crossing_zero(head, (3, 3, 6), 5, f"schedule crossing K=0, {head}"),
        Configuration("garbage drafter K=5", drafters=("garbage",), speculation=_k(5), accepts=False),
        Configuration("drafter killed half-way", drafters=("noisy",), speculation=_k(3), kill="noisy"),
        Configuration("head's drafter killed half-way", drafters=(head,), speculation=_k(5), kill=head),
        Configuration("two drafters", drafters=("noisy", "ngram"), speculation=_k(3)),
        Configuration("two drafters, one suffix", drafters=("noisy", "suffix"), speculation=_k(3)),
        Configuration(f"two drafters, {head} and suffix", drafters=(head, "suffix"), speculation=_k(3)),
        Configuration("two verifiers, one killed half-way", ("verifier", "second"), ("noisy",), _k(3), kill="second"),
        Configuration(f"two verifiers, one killed half-way, {head}", ("verifier", "second"), (head,), _k(3), kill="second"),
        Configuration("forced preemption, no drafter", ("scarce",), preempts=True),
        Configuration("forced preemption, draft_model K=3", ("scarce",), ("noisy",), _k(3), preempts=True),
        Configuration(f"forced preemption, {both} K=3", ("scarce",), (both,), _k(3), preempts=True),
    ]


def crossing_zero(drafter: str, waves: tuple[int, ...], k: int, name: str = "schedule crossing K=0") -> Configuration:
    """K is k for the first wave, 0 while two waves run, less than k above that, and back as sequences end."""
    first, both = waves[0], waves[0] + waves[1]
    schedule = [[1, first, k], [first + 1, both, 0], [both + 1, 64, -(-k // 3)]]
    speculation = _k(k) | {"num_speculative_tokens_per_batch_size": schedule}
    return Configuration(name, drafters=(drafter,), speculation=speculation, waves=waves)


def _k(num_speculative_tokens: int) -> dict[str, Any]:
    return {"num_speculative_tokens": num_speculative_tokens}


def load_cases(tokenizer: Tokenizer, num_prompts: int = 12, samplings: Sequence[str] = tuple(SAMPLINGS), max_tokens: int = 64) -> list[Case]:
    """Prompts of at most 96 tokens, as chats where they fit as such, each with every sampling."""
    lines = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    chosen = lines[:: len(lines) // num_prompts][:num_prompts]
    cases = []
    for sampling in samplings:
        for seed, line in enumerate(chosen):
            text = line["turns"][0]
            token_ids = tokenizer.encode_chat([{"role": "user", "content": text}])
            if len(token_ids) > MAX_PROMPT_TOKENS:
                token_ids = tokenizer.encode(text)
            assert len(token_ids) <= MAX_PROMPT_TOKENS, f"prompt {line['id']} has {len(token_ids)} tokens"
            cases.append(Case(line["id"], sampling, token_ids, SAMPLINGS[sampling].replace(seed=seed, max_tokens=max_tokens)))
    return cases
