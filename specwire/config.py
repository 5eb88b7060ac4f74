"""Configuration of each service: frozen dataclasses, built once in `main` (specwire.arguments); every field is a flag and a key of the file."""

import dataclasses
from dataclasses import dataclass
from typing import TypeVar

from specwire.config_fields import MAX_NUM_SEQS, check_fields, flag_name, format_value, option
from specwire.config_pairs import check_canary, check_drafter, check_half_batches, check_verifier
from specwire.errors import InvalidArgumentError
from specwire.number_formats import FORMAT_DTYPES
from specwire.speculative_config import SpeculativeConfig

Config = TypeVar("Config")

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
DEFAULT_PORT = 50050
DEFAULT_HTTP_PORT = 8000
DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_PORT}"
"""Where the coordinator serves, and clients call, if nobody says otherwise."""
DEFAULT_FILE = "specwire.yaml"
FILE_VARIABLE = "SPECWIRE_CONFIG"
ADDRESS_VARIABLE = "SPECWIRE_ADDRESS"
API_KEY_VARIABLE = "SPECWIRE_API_KEY"
PROGRAM_VARIABLE = "SPECWIRE_PROGRAM"
"""What the user has typed to start a service, for its messages; set by `specwire verifier` and its like."""
MAX_MESSAGE_MB = 2047  # gRPC holds the bytes in an int32
_MAX_BYTES = 2**63 - 1
_DTYPES = "auto|float32|bfloat16"
_FORMATS = "|".join(("auto", *FORMAT_DTYPES))
_WEIGHTS = "how a CPU keeps the weights: auto (the fastest that the checkpoint's numbers allow), int4, int8, bf16 or fp32"
_UTILIZATION = "share of the device's memory that this process may use in all, on CUDA; kv_cache_memory goes before it"
_ONE_DEVICE = "a model must fit on one device: take a smaller model or dtype, and for more throughput several verifiers"
_SHARING = "auto|always|never"
_DEVICES = r"cpu|cuda(:\d+)?"
MAX_REPLICAS = 64
"""Of verifiers and of drafters that `specwire up` starts."""
_ENDPOINT = r"|(https?://)?[^\s/]+(:\d+)?/?"


@dataclass(frozen=True, slots=True)
class VerifierConfig:
    """The verifier's section."""

    listen: tuple[str, ...] = option(("127.0.0.1:50052",), "addresses to serve on: host:port or unix:path", lowest_port=0)
    model: str = option(DEFAULT_MODEL, "target model: a Hugging Face folder, a GGUF file or a hub id", pattern=".+")
    load_format: str = option("auto", "auto, or dummy for seeded random weights of the model's shape", pattern="auto|dummy")
    skip_tokenizer: bool = option(False, "serve token ids only: no tokenizer is loaded, clients can send no text and no stop strings")
    dtype: str = option("auto", "auto (bfloat16), float32 or bfloat16", pattern=_DTYPES)
    weights: str = option("auto", _WEIGHTS, pattern=_FORMATS)
    device: str = option("cpu", "cpu or cuda", pattern=_DEVICES)
    num_threads: int = option(0, "CPU threads of the model; 0 = all cores", low=0, high=1024)
    max_model_len: int = option(0, "longest sequence in tokens; 0 = the model's context", low=0)
    max_num_seqs: int = option(16, "most sequences open at once", low=1, high=MAX_NUM_SEQS)
    max_num_batched_tokens: int = option(512, "most tokens in one round", low=1)
    gpu_memory_utilization: float = option(0.9, _UTILIZATION, low=0.01, high=1)
    kv_cache_memory: int = option(0, "bytes for the paged KV cache; 0 = what gpu_memory_utilization leaves, on a CPU 1 GiB", low=0, high=_MAX_BYTES)
    num_kv_blocks: int = option(0, "KV blocks; 0 = as many as the memory for them holds", low=0)
    kv_cache_dtype: str = option("auto", "dtype of keys and values: auto is the model's", instead="leave it, and lower max_num_seqs or max_model_len")
    enable_prefix_caching: bool = option(True, "reuse the KV of equal prompt prefixes")
    features: tuple[str, ...] = option((), "folders of draft heads whose features of the target are kept beside its KV")
    share_features: str = option(
        "auto", "drafters of this host and user read features in memory: always, never, or auto (unless TLS is on)", pattern=_SHARING
    )
    feature_address: str = option("", "where drafters reach this verifier for features; empty = where the coordinator does", lowest_port=1)
    max_outstanding_rounds: int = option(2, "rounds that may be in flight (W)", low=1)
    profile_context_len: int = option(8192, "tokens of context behind which costs are measured at the start, as far as they fit", low=1)
    use_cuda_graphs: bool = option(True, "on CUDA run rounds as captured graphs; no = kernel by kernel, to look for faults")
    tensor_parallel_size: int = option(1, "devices that share each layer of a model", instead=_ONE_DEVICE)
    pipeline_parallel_size: int = option(1, "devices that share a model's layers", instead=_ONE_DEVICE)
    enable_lora: bool = option(False, "serve LoRA adapters", instead="merge the adapter into a checkpoint and serve that")
    grace_s: float = option(10.0, "most seconds from SIGTERM until the coordinator has gone on elsewhere", low=0)
    metrics_listen: str = option("", "host:port of the metrics for Prometheus; none = no metrics endpoint", pattern="(?!unix:).*", lowest_port=0)
    max_message_mb: int = option(64, "largest gRPC message in MiB", low=1, high=MAX_MESSAGE_MB)
    tls_cert: str = option("", "PEM file of the certificate chain to serve with on TCP addresses; empty = no TLS")
    tls_key: str = option("", "PEM file of its key")
    tls_ca: str = option("", "PEM file of the authorities that clients' certificates must come from, with tls_client_auth")
    tls_client_auth: bool = option(False, "clients must have a certificate from tls_ca")
    trace_endpoint: str = option("", "OTLP collector (gRPC) for spans: host:port or a URL; empty = OTEL_EXPORTER_OTLP_ENDPOINT", pattern=_ENDPOINT)
    trace_file: str = option("", "file to which spans are appended as OTLP JSON lines; services of a machine may share it")
    speculative_config: SpeculativeConfig = option(SpeculativeConfig(), "speculation as JSON; docs/configuration.md has its keys")

    def __post_init__(self) -> None:
        check_fields(self)
        _check_tls(self)
        check_verifier(self.weights, self.dtype, self.device, self.max_model_len, self.speculative_config)


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """The drafter's section; method and draft model are in speculative_config."""

    listen: tuple[str, ...] = option(("127.0.0.1:50051",), "addresses to serve on: host:port or unix:path", lowest_port=0)
    load_format: str = option("auto", "auto, or dummy for seeded random weights of a draft model's shape (not a head's)", pattern="auto|dummy")
    target_model: str = option("", "the target, whose tensors draft heads may share, and whose tokenizer use_heterogeneous_vocab compares")
    skip_tokenizer: bool = option(False, "load no tokenizer: whether ids are the target's is seen by the size of the vocabulary only")
    dtype: str = option("auto", "draft model: auto (bfloat16), float32 or bfloat16", pattern=_DTYPES)
    weights: str = option("auto", _WEIGHTS, pattern=_FORMATS)
    device: str = option("cpu", "cpu or cuda", pattern=_DEVICES)
    num_threads: int = option(0, "CPU threads of the draft model; 0 = all cores", low=0, high=1024)
    max_num_seqs: int = option(64, "most sequences open at once, over all lanes", low=1, high=MAX_NUM_SEQS)
    prefill_chunk: int = option(
        256,
        "most prompt tokens the draft model computes between two rounds; fewer if rounds would wait for their end too long, as measured at the start",
        low=1,
    )
    profile_context_len: int = option(8192, "tokens of context behind which costs are measured at the start, as far as they fit", low=1)
    use_cuda_graphs: bool = option(True, "on CUDA draft in captured graphs; no = kernel by kernel, to look for faults")
    read_shared_features: bool = option(True, "draft heads: read features in the memory of verifiers of this host and user where these share it")
    grace_s: float = option(10.0, "most seconds from SIGTERM until all coordinators have gone on elsewhere", low=0)
    metrics_listen: str = option("", "host:port of the metrics for Prometheus; none = no metrics endpoint", pattern="(?!unix:).*", lowest_port=0)
    gpu_memory_utilization: float = option(0.9, _UTILIZATION, low=0.01, high=1)
    kv_cache_memory: int = option(
        0, "bytes for the draft model's paged KV cache; 0 = what gpu_memory_utilization leaves, on a CPU 1 GiB", low=0, high=_MAX_BYTES
    )
    max_message_mb: int = option(64, "largest gRPC message in MiB", low=1, high=MAX_MESSAGE_MB)
    tls_cert: str = option("", "PEM file of the certificate chain to serve with on TCP addresses; empty = no TLS")
    tls_key: str = option("", "PEM file of its key")
    tls_ca: str = option(
        "", "PEM file of the authorities of verifiers, which are called with TLS for features then, and of clients, with tls_client_auth"
    )
    tls_client_auth: bool = option(False, "clients must have a certificate from tls_ca")
    trace_endpoint: str = option("", "OTLP collector (gRPC) for spans: host:port or a URL; empty = OTEL_EXPORTER_OTLP_ENDPOINT", pattern=_ENDPOINT)
    trace_file: str = option("", "file to which spans are appended as OTLP JSON lines; services of a machine may share it")
    speculative_config: SpeculativeConfig = option(SpeculativeConfig(), "speculation as JSON; docs/configuration.md has its keys")

    def __post_init__(self) -> None:
        check_fields(self)
        _check_tls(self)
        check_drafter(self.weights, self.dtype, self.device, self.speculative_config)


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """The coordinator's section."""

    listen: tuple[str, ...] = option((DEFAULT_ADDRESS,), "addresses to serve on: host:port or unix:path", lowest_port=0)
    verifiers: tuple[str, ...] = option((), "verifier addresses, one lane each; a host name stands for all its replicas", lowest_port=1)
    drafters: tuple[str, ...] = option((), "drafter addresses, names alike; none = plain decoding", lowest_port=1)
    discovery_interval_s: float = option(2.0, "seconds between two look-ups of the host names of verifiers and drafters", low=0.05, high=5)
    coordinator_id: str = option("coordinator", "name under which this coordinator holds its verifiers", pattern=".+")
    max_num_seqs: int = option(0, "most running sequences a lane; 0 = the verifier's limit", low=0, high=MAX_NUM_SEQS)
    max_num_batched_tokens: int = option(0, "most tokens a round; 0 = the verifier's limit", low=0)
    max_queue: int = option(1024, "most waiting sequences (choices of requests) before new requests are refused", low=1)
    max_stream_backlog: int = option(1024, "most undelivered tokens of a stream before the sequence waits for its client", low=1)
    client_stall_s: float = option(120.0, "how long a client may read nothing of what waits for it before its call is ended", low=0.1)
    max_outstanding_rounds: int = option(2, "rounds in flight a lane (W)", low=1)
    half_batches_from: int = option(
        0,
        "decoding sequences of a lane from which on steps with drafts take half of them, drafted for while the other half is verified; 0 = never",
        low=0,
    )
    max_decode_gap_ms: float = option(
        100.0,
        "most time that a round with prefill chunks may take while sequences decode, or twice that of decoding alone if that is more; 0 = any",
        low=0,
    )
    min_draft_wait_ms: float = option(5.0, "least time that a step waits for a drafter; the wait is max(this, 3 x predicted)", low=0)
    schedule_hysteresis_steps: int = option(0, "steps in a row that the schedule must ask for another K before it changes; 0 = none", low=0)
    adaptive_hysteresis: float = option(
        0.01, "adaptive verification: how much better another number of drafts must be to be asked for", low=0, high=1
    )
    adaptive_probe_share: float = option(
        0.01, "adaptive verification: most of the time that may go into drafts that do not pay, to learn when they do; 0 = none", low=0, high=0.1
    )
    canary_config: str = option("", "canary from the start on: what is different of the speculative configuration, as JSON; empty = none")
    canary_share: float = option(0.1, "share of the requests that run with canary_config; 0 = only those that ask for it", low=0, high=1)
    calibration_file: str = option("", "adaptive verification: file in which what was learned of scores outlives a restart; empty = none")
    verifier_timeout_s: float = option(
        60.0,
        "least time after which a verifier that does not answer a round is given up; 20 x the longest of its last rounds if that is more; 0 = never",
        low=0,
    )
    verifier_wait_s: float = option(60.0, "how long running requests wait for a lost verifier before they fail", low=0)
    grace_s: float = option(10.0, "most seconds from SIGTERM until the running requests have ended", low=0)
    metrics_listen: str = option("", "host:port of the metrics for Prometheus; none = no metrics endpoint", pattern="(?!unix:).*", lowest_port=0)
    max_message_mb: int = option(64, "largest gRPC message in MiB", low=1, high=MAX_MESSAGE_MB)
    tls_cert: str = option("", "PEM file of the certificate chain to serve with on TCP addresses; empty = no TLS")
    tls_key: str = option("", "PEM file of its key")
    tls_ca: str = option(
        "", "PEM file of the authorities of verifiers and drafters, which are called with TLS then, and of clients, with tls_client_auth"
    )
    tls_client_auth: bool = option(False, "clients must have a certificate from tls_ca")
    api_keys: str = option("", "file of the API keys that clients need (`specwire keys new`); empty = none are needed")
    max_batch_requests: int = option(10_000, "most requests of one GenerateBatch", low=1)
    max_session_requests: int = option(4096, "most unfinished requests of one Session", low=1)
    trace_endpoint: str = option("", "OTLP collector (gRPC) for spans: host:port or a URL; empty = OTEL_EXPORTER_OTLP_ENDPOINT", pattern=_ENDPOINT)
    trace_file: str = option("", "file to which spans are appended as OTLP JSON lines; services of a machine may share it")
    trace_sample_ratio: float = option(1.0, "share of the requests that are traced, where their clients do not decide it", low=0, high=1)
    trace_max_steps: int = option(16, "most step spans of a request: the first ones, then ever fewer", low=0)
    trace_content: bool = option(False, "put token ids of prompt and output into spans")
    speculative_config: SpeculativeConfig = option(SpeculativeConfig(), "speculation as JSON; docs/configuration.md has its keys")

    def __post_init__(self) -> None:
        check_fields(self)
        _check_tls(self)
        check_half_batches(self.half_batches_from, self.max_outstanding_rounds, self.speculative_config)
        check_canary(self.canary_config, self.speculative_config)


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """The section of the OpenAI-compatible HTTP service."""

    listen: tuple[str, ...] = option((f"127.0.0.1:{DEFAULT_HTTP_PORT}",), "addresses to serve on: host:port or unix:path", lowest_port=0)
    coordinator: str = option(DEFAULT_ADDRESS, "the coordinator to call: host:port or unix:path", lowest_port=1)
    processes: int = option(1, "processes that share the addresses, and add up in one scrape", low=1, high=MAX_REPLICAS)
    served_model_name: tuple[str, ...] = option((), "names that requests may give as model, the one in answers first; none = the coordinator's")
    cors_origins: tuple[str, ...] = option((), "origins of web pages that may call, such as https://chat.example.com, or *; none = only its own")
    metrics_listen: str = option("", "host:port of the metrics alone, without TLS, beside /metrics", pattern="(?!unix:).*", lowest_port=0)
    playground: bool = option(True, "serve a page at / that chats and shows what the services do")
    vllm_metrics: bool = option(False, "vLLM's names of metrics beside ours, with the coordinator's numbers")
    max_body_mb: int = option(16, "largest body of a request in MiB", low=1, high=MAX_MESSAGE_MB)
    max_message_mb: int = option(64, "largest gRPC message in MiB; at most the coordinator's", low=1, high=MAX_MESSAGE_MB)
    keep_alive_s: int = option(75, "seconds for which an idle connection is kept", low=1)
    client_stall_s: float = option(120.0, "how long a client may read nothing of its answer, or send nothing of a body, before it is cut", low=0.1)
    grace_s: float = option(10.0, "most seconds from SIGTERM until running requests must have ended", low=0)
    health_listen: str = option("", "address of the gRPC health service: host:port or unix:path; none = no such service", lowest_port=0)
    tls_cert: str = option("", "PEM file of the certificate chain to serve with on TCP addresses; empty = no TLS")
    tls_key: str = option("", "PEM file of its key")
    tls_ca: str = option("", "PEM file of the authorities that clients' certificates must come from, with tls_client_auth")
    tls_client_auth: bool = option(False, "clients must have a certificate from tls_ca")
    coordinator_tls_ca: str = option("", "PEM file of the authorities of the coordinator, which is called with TLS then")
    coordinator_tls_cert: str = option("", "PEM file of the certificate chain to show to the coordinator")
    coordinator_tls_key: str = option("", "PEM file of its key")
    trace_endpoint: str = option("", "OTLP collector (gRPC) for spans: host:port or a URL; empty = OTEL_EXPORTER_OTLP_ENDPOINT", pattern=_ENDPOINT)
    trace_file: str = option("", "file to which spans are appended as OTLP JSON lines; services of a machine may share it")
    trace_sample_ratio: float = option(1.0, "share of the requests that are traced, where their clients do not decide it", low=0, high=1)

    def __post_init__(self) -> None:
        check_fields(self)
        _check_tls(self)
        check_both("--coordinator-tls-cert", self.coordinator_tls_cert, "--coordinator-tls-key", self.coordinator_tls_key)
        sockets = [address for address in self.listen if address.startswith("unix:")]
        if self.processes > 1 and sockets:
            raise InvalidArgumentError(f"--listen has {sockets[0]}, but --processes is {self.processes}, which share TCP ports only; leave one out")


@dataclass(frozen=True, slots=True)
class UpConfig:
    """What only `specwire up` knows."""

    port: int = option(DEFAULT_PORT, "port on 127.0.0.1 for clients; 0 = any free one", low=0, high=65535)
    http: bool = option(True, "serve the OpenAI-compatible HTTP API, too")
    http_port: int = option(DEFAULT_HTTP_PORT, "port on 127.0.0.1 of the HTTP API; 0 = any free one", low=0, high=65535)
    verifiers: int = option(1, "number of verifiers, each with a copy of the target model", low=1, high=MAX_REPLICAS)
    drafters: int = option(1, "number of drafters, where the list of drafters does not say it; 0 = plain decoding", low=0, high=MAX_REPLICAS)
    startup_timeout_s: float = option(600.0, "how long each service may take to become healthy", low=0.1)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """What the commands that call a coordinator read."""

    address: str = option(DEFAULT_ADDRESS, "the coordinator: host:port or unix:path", lowest_port=1)

    def __post_init__(self) -> None:
        check_fields(self)


def flags(config: object) -> list[str]:
    """The command-line flags that rebuild this configuration: one for every field that differs from its default."""
    arguments: list[str] = []
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if value != field.default:
            # One argument, not two: a value that starts with a dash would be taken for a flag.
            arguments.append(f"{flag_name(field.name)}={format_value(value)}")
    return arguments


def check_both(first: str, first_value: str, second: str, second_value: str) -> None:
    """Raise InvalidArgumentError if only one of two files is named."""
    if bool(first_value) != bool(second_value):
        given, missing = (first, second) if first_value else (second, first)
        raise InvalidArgumentError(f"{given} is given without {missing}; a certificate needs its key: give both or none")


def _check_tls(config: VerifierConfig | DrafterConfig | CoordinatorConfig | HttpConfig) -> None:
    check_both("--tls-cert", config.tls_cert, "--tls-key", config.tls_key)
    if config.tls_client_auth and not (config.tls_cert and config.tls_ca):
        raise InvalidArgumentError("--tls-client-auth is true, which needs --tls-cert and --tls-ca; give both, or leave it out")
