"""What users of vLLM, llama.cpp and Ollama type, and what stands for it here.

docs/coming-from.md shows these tables, with the flags that are the same here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from octavo.sampling.params import parameters


class Flag(NamedTuple):
    """Flags of another server that Octavo does not have under this name.

    ``here`` is the counterpart, or why there is none. ``same``: values that ask for what is so
    here anyway, which are accepted; "" stands for the flag without a value.
    """

    names: tuple[str, ...]
    here: str
    same: tuple[str, ...] = ()
    takes_value: bool = True


class Given(NamedTuple):
    """One of these flags as it was given."""

    name: str
    value: str
    flag: Flag

    def __str__(self) -> str:
        return f"{self.name} {self.value}".rstrip()


_GPU = "Octavo computes on CPUs, all that the process may use: --threads"
_ONE = "one process serves one model; more servers stand behind a proxy"
_TOOLS = "tools are not supported: docs/limits.md"
_LORA = "adapters are not supported: merge them into the checkpoint"
_TLS = "TLS is a proxy's: docs/serving.md"
_FORMAT = "structured outputs are not supported: docs/limits.md"
_MEDIA = "text only: docs/limits.md"


def _flag(names: str, here: str, *same: str, switch: bool = False) -> Flag:
    return Flag(tuple(names.split()), here, same, not switch)


def _switch(names: str, here: str, *, same: bool = False) -> Flag:
    return Flag(tuple(names.split()), here, ("",) if same else (), takes_value=False)


MODEL = _flag("--model -m", "MODEL is the first argument")

VLLM = (
    # Where and how it computes.
    _flag("--dtype", "numbers are kept as they are stored; see --quantization", "auto"),
    _flag("--tensor-parallel-size -tp", _GPU, "1"),
    _flag("--pipeline-parallel-size -pp", _GPU, "1"),
    _flag("--data-parallel-size -dp", _ONE, "1"),
    _flag("--api-server-count", "one process serves HTTP", "1"),
    _flag("--distributed-executor-backend", _GPU),
    _switch("--enable-expert-parallel", _GPU),
    _switch("--enable-eplb", _GPU),
    _flag("--device", "the CPUs of this machine, always", "cpu", "auto"),
    _switch("--enforce-eager", "there are no graphs to capture", same=True),
    _flag("--compilation-config -O", "nothing is compiled when a model is loaded"),
    _flag("--num-gpu-blocks-override", "--kv-cache-memory-bytes"),
    _flag("--swap-space", "--kv-offload-memory"),
    _flag("--kv-offloading-size", "--kv-offload-memory"),
    _flag("--kv-offloading-backend", "--kv-offload-memory and --kv-offload-dir", "native"),
    _flag("--cpu-offload-gb", "weights are in the CPU's memory anyway"),
    _switch("--enable-sleep-mode", "stop the server: it starts in seconds"),
    # The model.
    _flag("--tokenizer", "the tokenizer is the model's own"),
    _flag("--tokenizer-mode", "the tokenizer is the model's own", "auto"),
    _switch("--skip-tokenizer-init", "the tokenizer is always loaded"),
    _switch("--trust-remote-code", "code of a model is never run", same=True),
    _flag("--revision", "download the revision, and give its folder"),
    _flag("--load-format", "GGUF or safetensors, told by the file", "auto"),
    _flag("--download-dir", "OCTAVO_HOME, and HF_HOME for Hugging Face's"),
    _flag("--config", "options are given one by one"),
    _flag("--hf-overrides", "edit config.json"),
    _flag("--chat-template", "put it into the model's folder as chat_template.jinja"),
    _flag("--chat-template-content-format", _MEDIA, "auto", "string"),
    _flag("--runner --task", "models generate text", "auto", "generate"),
    _flag("--limit-mm-per-prompt", _MEDIA),
    _switch("--enable-lora", _LORA),
    _flag("--lora-modules", _LORA),
    _flag("--max-loras", _LORA),
    _flag("--max-lora-rank", _LORA),
    _flag("--max-cpu-loras", _LORA),
    # Batches.
    _switch("--enable-chunked-prefill", "prompts always go in parts that fit", same=True),
    _switch("--no-enable-chunked-prefill", "prompts always go in parts that fit"),
    _flag("--long-prefill-token-threshold", "--itl-target"),
    _switch("--async-scheduling", "the next step is planned while one runs, where that helps"),
    _flag("--stream-interval", "each token is sent as it comes", "1"),
    _flag("--prefix-caching-hash-algo", "prefixes are compared, not only hashed"),
    _flag("--spec-method", """--speculative-config '{"method": "suffix"}'"""),
    _flag("--spec-model", """--speculative-config '{"model": "SMALLER"}'"""),
    _flag("--spec-tokens", """--speculative-config '{…, "num_speculative_tokens": 4}'"""),
    # Answers.
    _switch("--enable-auto-tool-choice", _TOOLS),
    _flag("--tool-call-parser", _TOOLS),
    _flag("--tool-parser-plugin", _TOOLS),
    _flag("--reasoning-parser", "what a model thinks is part of its answer"),
    _flag("--structured-outputs-config", _FORMAT),
    _flag("--guided-decoding-backend", _FORMAT),
    _flag("--logprobs-mode", "log-probabilities are the model's own", "raw_logprobs"),
    _flag("--logits-processors", "requests have logit_bias, allowed and banned token ids"),
    _switch("--return-tokens-as-token-ids", "octavo generate --json gives token_ids"),
    _switch("--enable-prompt-tokens-details", "usage always has cached_tokens", same=True),
    # The server.
    _flag("--ssl-keyfile", _TLS),
    _flag("--ssl-certfile", _TLS),
    _flag("--ssl-ca-certs", _TLS),
    _flag("--ssl-cert-reqs", _TLS),
    _flag("--middleware", "code of others is not loaded into the server"),
    _switch("--enable-request-id-headers", "X-Request-Id is always sent", same=True),
    _switch("--enable-log-requests", "there is a log line per request, without its text"),
    _switch("--disable-log-requests", "prompts are not logged", same=True),
    _flag("--max-log-len", "prompts are not logged"),
    _switch("--disable-log-stats", "figures are at /metrics, not in the log", same=True),
    _switch("--headless", _ONE),
    _switch("--grpc", "HTTP only"),
    _flag("--kv-transfer-config", _ONE),
    _flag("--kv-events-config", _ONE),
    _flag("--collect-detailed-traces", "--otlp-traces-endpoint sends what there is"),
    _flag("--show-hidden-metrics-for-version", "no metric is hidden"),
)

LLAMA_CPP = (
    _flag("-c --ctx-size", "--max-model-len, of one request; memory: --kv-cache-memory"),
    _flag("-ngl --n-gpu-layers --gpu-layers", _GPU, "0"),
    _flag("-t", "--threads"),
    _flag("-tb --threads-batch", "--threads, for prompts as well"),
    _flag("--threads-http", "one process serves HTTP"),
    _flag("-np --parallel", "--max-num-seqs"),
    _switch("-cb --cont-batching", "batches are always continuous", same=True),
    _flag("-b --batch-size", "--max-num-batched-tokens"),
    _flag("-ub --ubatch-size", "--max-num-batched-tokens"),
    _flag("-fa --flash-attn", "attention never stores its scores", "on", "auto", "1"),
    _flag("-ctk --cache-type-k", "--kv-cache-dtype, of keys and values"),
    _flag("-ctv --cache-type-v", "--kv-cache-dtype, of keys and values"),
    _flag("--cache-reuse", "--enable-prefix-caching, which is on"),
    _switch("--mlock", "weights are read into memory once, and stay"),
    _switch("--no-mmap", "weights are read into memory once, and stay", same=True),
    _flag("--numa", "numactl before the command"),
    _flag("-sm --split-mode", _GPU),
    _flag("-ts --tensor-split", _GPU),
    _flag("-mg --main-gpu", _GPU),
    _flag("-hf -hfr --hf-repo", "MODEL: org/repo or org/repo:Q4_K_M"),
    _flag("-hff --hf-file", "MODEL: org/repo:file.gguf"),
    _flag("-a --alias", "--served-model-name"),
    _switch("--metrics", "/metrics is always there", same=True),
    _switch("--slots", "octavo top shows what runs"),
    _switch("--jinja", "the model's own template is always used", same=True),
    _flag("--chat-template-file", "put it into the model's folder as chat_template.jinja"),
    _flag("-md --model-draft", """--speculative-config '{"model": "SMALLER"}'"""),
    _flag("--draft-max --draft", """--speculative-config '{…, "num_speculative_tokens": 4}'"""),
    _switch("--embedding --embeddings", "embeddings are not supported: docs/limits.md"),
    _switch("--rerank --reranking", "embeddings are not supported: docs/limits.md"),
    _flag("--grammar", _FORMAT),
    _flag("--grammar-file", _FORMAT),
    _flag("-j --json-schema", _FORMAT),
    _flag("--lora", _LORA),
    _flag("-mm --mmproj", _MEDIA),
    _flag("--rope-scaling", "positions are as the model's file says"),
    _flag("--rope-freq-base", "positions are as the model's file says"),
    _flag("-to --timeout", "--max-queue-time, and the client's own"),
    _flag("--ssl-key-file", _TLS),
    _flag("--ssl-cert-file", _TLS),
    _switch("--no-webui", "there is no web page to switch off", same=True),
    _flag("-p --prompt", "octavo generate MODEL PROMPT"),
    _flag("-f --file", "octavo generate MODEL - < FILE"),
    *(
        _flag(row.llama_cpp, "--" + name.replace("_", "-"))
        for name, row in parameters().items()
        if row.llama_cpp
    ),
    _flag("-sys --system-prompt", "octavo chat MODEL --system TEXT"),
    _switch("-cnv --conversation", "octavo chat MODEL"),
    _switch("-i --interactive", "octavo chat MODEL"),
)

OLLAMA = (
    _flag("--keepalive", "a model stays until its server stops"),
    _flag("--format", "structured outputs are not supported: docs/limits.md"),
    _switch("--nowordwrap", "what is no terminal gets unwrapped text: octavo chat MODEL | cat"),
    _flag("--think", "what a model thinks is part of its answer"),
    _switch("--hidethinking", "what a model thinks is part of its answer"),
)

_FLAGS = {name: flag for flag in (*OLLAMA, *LLAMA_CPP, *VLLM, MODEL) for name in flag.names}

# Commands of these programs that Octavo does not have, and what stands for them.
COMMANDS = {
    "run": "octavo chat MODEL, or octavo generate MODEL PROMPT",
    "ps": "octavo top",
    "show": "octavo inspect MODEL",
    "stop": "Ctrl-C or SIGTERM ends a server",
    "create": "octavo quantize MODEL makes a model small; a GGUF file is served as it is",
    "cp": "octavo serve MODEL --served-model-name NAME",
    "push": "upload the files with hf upload",
    "ls": "octavo list",
    "remove": "octavo rm NAME",
    "download": "octavo pull NAME",
    "complete": "octavo generate MODEL PROMPT",
    "run-batch": "octavo generate MODEL PROMPT PROMPT … --json",
    "collect-env": "octavo bench machine",
    "perplexity": "octavo fidelity MODEL",
    "benchmark": "octavo bench throughput MODEL, or octavo bench serve",
    "latency": "octavo bench throughput MODEL",
    "help": "octavo --help, or octavo COMMAND --help",
    "version": "octavo --version",
    "start": "octavo serve MODEL",
    "server": "octavo serve MODEL",
    "models": "octavo list; what a server serves is at /v1/models",
    "status": "octavo top",
    "convert": "octavo quantize MODEL; a Hugging Face folder is served as it is",
    "embed": "embeddings are not supported: docs/limits.md",
    "completion": "octavo generate MODEL PROMPT",
    "prompt": "octavo generate MODEL PROMPT",
    "info": "octavo inspect MODEL",
    "delete": "octavo rm NAME",
    "stats": "octavo top",
}


def row(flag: Flag) -> str:
    """The flag as a row of a Markdown table, as docs/coming-from.md has it."""
    names = ", ".join(f"`{name}`" for name in flag.names)
    values = [f"`{value}`" for value in flag.same if value]
    same = ""
    if flag.same:
        same = f"{' or '.join(values)} accepted; else " if values else "accepted; "
    return f"| {names} | {same}{flag.here} |"


def adapted(arguments: Sequence[str], known: Mapping[str, bool]) -> Iterator[str | Given]:
    """The arguments, with another server's flags and their values told apart. ``known`` are the
    command's own flags, and whether each takes a value.
    """
    left = list(arguments)
    while left:
        word = left.pop(0)
        if word == "--":
            yield word
            yield from left
            return
        name, equals, value = word.partition("=")
        if name.startswith("--") and name not in known:
            dashed = name.replace("_", "-")  # vLLM takes --max_model_len, too
            if dashed in known or dashed in _FLAGS:
                name, word = dashed, dashed + equals + value
        if name in known:
            yield word
            if known[name] and not equals and left:
                yield left.pop(0)
        elif name in _FLAGS:
            flag = _FLAGS[name]
            if flag.takes_value and not equals and left and not left[0].startswith("-"):
                value = left.pop(0)
            yield Given(name, value, flag)
        else:
            yield word
