"""What vLLM, SGLang and llama.cpp call options: who takes Headrace in vLLM's place keeps his command line, file or LLM(...).

An option of vLLM's that has another name here is taken for that one. One that can change no answer here, nor who may ask, is
left out and named. Any other is refused with what there is instead, as are those of the others. A value that says what is so
here anyway is neither named nor refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from headrace.errors import ParameterError
from headrace.options import nearest


def _of(groups: Mapping[str, str]) -> Mapping[str, str]:
    """name -> words, of words -> names."""
    return MappingProxyType({name.rstrip("!"): words for words, names in groups.items() for name in names.split()})


# theirs -> ours, with the same value
SAME = _of({
    "quantization": "q", "tensor-parallel-size": "tp", "data-parallel-size": "dp", "tool-parser": "tool-call-parser",
    "api-processes": "api-server-count asc", "kv-cache-bytes": "kv-cache-memory-bytes kv-cache-memory",
    "lora": "lora-modules", "cors-origin": "allowed-origins", "drain-timeout": "shutdown-timeout",
    "prompt-lookup-min": "ngram-prompt-lookup-min", "prompt-lookup-max": "ngram-prompt-lookup-max",
})  # fmt: skip
NEUTRAL = '{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}'
# their option and value (a switch: "") -> our option and value
SAME_AS: Mapping[tuple[str, str], tuple[str, str]] = MappingProxyType({
    ("disable-log-stats", ""): ("stats-interval", "0"), ("generation-config", "vllm"): ("override-generation-config", NEUTRAL),
})  # fmt: skip
# their option with a JSON object -> the options that its fields are here
PARTS: Mapping[str, Mapping[str, str]] = MappingProxyType({
    "speculative-config": {
        "method": "speculative-method", "model": "speculative-model", "num_speculative_tokens": "num-speculative-tokens",
        "prompt_lookup_min": "prompt-lookup-min", "prompt_lookup_max": "prompt-lookup-max",
    },
    "kv-events-config": {"endpoint": "kv-events", "replay_endpoint": "kv-events-replay", "topic": "kv-events-topic"},
})  # fmt: skip
# values that say what is so here anyway
AS_HERE: Mapping[str, Container[str]] = MappingProxyType({
    **dict.fromkeys((
        "pipeline-parallel-size", "pp", "decode-context-parallel-size", "dcp", "prefill-context-parallel-size", "pcp", "nnodes",
        "data-parallel-size-local", "dpl",
    ), ("1",)),
    **dict.fromkeys(("node-rank", "data-parallel-rank", "ssl-cert-reqs"), ("0",)), "max-logprobs": tuple(map(str, range(21))),
    "generation-config": ("auto",), "logprobs-mode": ("raw_logprobs",), "response-role": ("assistant",),
    "data-parallel-backend": ("mp",), "override-attention-dtype": ("auto",),
})  # fmt: skip
# why it says nothing -> which; those with ! have no value, and there is --no-NAME too
_LEFT_OUT = {
    "with tool_choice none tools are not shown": "exclude-tools-when-tool-choice-none!",
    "tools need no option": "enable-auto-tool-choice!", "reasoning needs no option": "enable-reasoning!",
    "grammars need no option": """
        guided-decoding-backend guided-decoding-disable-fallback! guided-decoding-disable-any-whitespace!
        guided-decoding-disable-additional-properties! structured-outputs-config reasoning-config
    """,
    "prompts are computed in chunks of --max-num-batched-tokens": """
        enable-chunked-prefill! max-num-partial-prefills max-long-partial-prefills long-prefill-token-threshold
        disable-chunked-mm-input! scheduler-reserve-full-isl!
    """,
    "only --log-level info logs requests": """
        disable-log-requests! enable-log-requests! disable-uvicorn-access-log! disable-access-log-for-endpoints
        uvicorn-log-level max-log-len enable-log-outputs! enable-log-deltas! log-config-file log-error-stack!
        aggregate-engine-logging! enable-logging-iteration-details!
    """,
    "statistics are logged by the server": "disable-log-stats!",
    "an answer's model is the one that was loaded": "served-model-name",
    "weights are where the model runs": "swap-space cpu-offload-* offload-* kv-offloading-*",
    "graphs, kernels and their order are chosen for the card": """
        compilation-config cc optimization-level O O0! O1! O2! O3! max-seq-len-to-capture max-context-len-to-capture
        cuda-graph-sizes cudagraph-* max-cudagraph-capture-size disable-custom-all-reduce! disable-cascade-attn! moe-backend
        linear-backend kernel-config attention-config performance-mode enable-flashinfer-autotune! use-v2-block-manager!
        num-scheduler-steps multi-step-stream-outputs! scheduler-delay-factor num-lookahead-slots preemption-mode
        disable-async-output-proc! additional-config ir-op-priority stream-interval calculate-kv-scales! mamba-* gdn-*
        device-ids enable-layerwise-nvtx-tracing!
    """,
    "the cache is one of its own kind": """
        prefix-caching-hash-algo kv-sharing-fast-prefill! disable-hybrid-kv-cache-manager! prefix-match-unit
        use-tqdm-on-load! disable-sliding-window!
    """,
    "no code of a model's directory is ever run": "trust-remote-code! code-revision",
    "each model generates and embeds": "task runner convert",
    "files are read in Hugging Face's form, or as GGUF": """
        tokenizer-mode config-format model-impl ignore-patterns model-loader-extra-config safetensors-load-strategy
        pt-load-map-location tokenizer-pool-* max-parallel-loading-workers
    """,
    "text alone is taken and made": """
        limit-mm-per-prompt language-model-only! mm-* media-io-kwargs interleave-mm-strings! skip-mm-profiling! image-*
        allowed-local-media-path allowed-media-domains disable-mm-preprocessor-cache! enable-mm-embeds!
        enable-prompt-embeds! video-pruning-rate enable-multimodal-encoder-data-parallel! limit-mm-data-per-prompt
    """,
    "with --tensor-parallel-size each card has whole experts anyway": """
        enable-expert-parallel! ep! enable-eplb! eplb-* num-redundant-experts expert-placement-strategy enable-dbo! dbo-*
        ubatch-size all2all-backend enable-ep-weight-filter!
    """,
    "the ranks of a model are processes of this host; --ray spreads whole cores": """
        distributed-executor-backend ray-workers-use-nsight! worker-use-ray! distributed-timeout-seconds numa-bind!
        numa-bind-*
    """,
    "--lora and --lora-dir say so": "enable-lora!",
    "adapters are held as they come": """
        max-cpu-loras fully-sharded-loras! lora-dtype lora-extra-vocab-size enable-lora-bias! long-lora-scaling-factors
        specialize-active-lora! enable-mixed-moe-lora-format! max-lora-size
    """,
    "a request has its seed; without one each is another": "seed",
    "usage has cached_tokens without an option": "enable-prompt-tokens-details!",
    "a template's form is found": "chat-template-content-format trust-request-chat-template!",
    "memory is given back at the end; several models: --model-keep-alive": """
        enable-sleep-mode! enable-cumem-allocator!
    """,
    "paths are served as they are: a proxy in front takes its prefix away": "root-path",
    "/metrics says what there is": """
        show-hidden-metrics-for-version collect-detailed-traces kv-cache-metrics! kv-cache-metrics-sample cudagraph-metrics!
        enable-mfu-metrics! enable-server-load-tracking! profiler-config
    """,
    "HTTP needs no option for it": """
        disable-frontend-multiprocessing! disable-fastapi-docs! enable-offline-docs! enable-request-id-headers! h11-*
        allow-credentials! allowed-methods allowed-headers enable-tokenizer-info-endpoint! renderer-num-workers
        fail-on-environ-validation!
    """,
}  # fmt: skip
# what there is instead -> of what; the last ones are SGLang's and llama.cpp's
_REFUSED = {
    "HF_HUB_CACHE=DIR in the environment": "download-dir", "HF_TOKEN in the environment": "hf-token",
    "what config.json says holds: change a copy": """
        hf-overrides rope-scaling rope-theta hf-config-path override-attention-dtype json-model-override-args
    """,
    "--revision is the tokenizer's too": "tokenizer-revision", "scales are in the file": "quantization-param-path",
    "--tensor-parallel-size splits a model, --data-parallel-size and --ray multiply it": """
        pipeline-parallel-size pp decode-context-parallel-size dcp prefill-context-parallel-size pcp nnodes node-rank
        master-addr master-port headless! data-parallel-size-local dpl data-parallel-address dpa data-parallel-rpc-port dpp
        data-parallel-start-rank dpr data-parallel-rank dpn data-parallel-hybrid-lb! dph! data-parallel-external-lb! dpe!
        data-parallel-backend dpb
    """,
    "no code but its own is loaded": """
        worker-cls worker-extension-cls scheduler-cls middleware tool-parser-plugin reasoning-parser-plugin
        io-processor-plugin
    """,
    "logit_bias, bad_words and allowed_token_ids of a request": """
        logits-processors logits-processor-pattern
    """,
    "chat_template_kwargs of a request": "default-chat-template-kwargs", "tools are run by whoever asks": "tool-server",
    "return_tokens_as_token_ids of a request": "return-tokens-as-token-ids!",
    "stream_options.include_usage of a request": "enable-force-include-usage!",
    "text alone is made": "mm-encoder-only!",
    "certificates of clients and ciphers are a proxy's in front": """
        ssl-ca-certs ssl-cert-reqs ssl-ciphers
    """,
    "a new certificate is read at the next start": "enable-ssl-refresh!", "--host and --port": "uds",
    "each server has its own cache; --router finds the core that holds most": """
        kv-transfer-config ec-transfer-config
    """,
    "--embedding-pooling": "pooler-config override-pooler-config", "--kv-cache-bytes": "num-gpu-blocks-override",
    "in Python, LLM(skip_tokenizer_init=True)": "skip-tokenizer-init!",
    "up to 20 of a position without an option": "max-logprobs",
    "logarithms before temperature and penalties": "logprobs-mode", "roles are the template's": "response-role",
    "temperature, top_p, top_k, min_p and repetition_penalty of a request, or of --override-generation-config": """
        generation-config
    """,
    "in Python, SamplingParams of a call": "override-generation-config",
    "--speculative-method, --speculative-model, --num-speculative-tokens": "speculative-config",
    "--kv-events": "kv-events-config", "--model": "m model-path", "--tokenizer": "tokenizer-path",
    "--served-model-name": "alias", "--max-model-len": "c ctx-size context-length", "--tensor-parallel-size": "tp-size",
    "--data-parallel-size": "dp-size", "--max-num-seqs": "np parallel max-running-requests",
    "--gpu-memory-utilization": "mem-fraction-static", "--max-num-batched-tokens": "chunked-prefill-size",
    "--lora NAME=PATH, again for each": "lora-paths", "chat templates need no option": "jinja!",
    "a request has its seed": "random-seed", "usage has cached_tokens": "enable-cache-report!",
    "a model is on the GPU as a whole or not at all (--device)": "ngl n-gpu-layers gpu-layers",
}  # fmt: skip
LEFT_OUT, REFUSED = _of(_LEFT_OUT), _of(_REFUSED)
SWITCHES = frozenset(name[:-1] for name in " ".join((*_LEFT_OUT.values(), *_REFUSED.values())).split() if name[-1] == "!")
# of variables of vLLM's
VARIABLES: Mapping[str, str] = MappingProxyType({
    "VLLM_LOGGING_LEVEL": "--log-level", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "--lora-dir", "VLLM_CACHE_ROOT": "HEADRACE_CACHE",
    "VLLM_ATTENTION_BACKEND": "--attention-backend", "VLLM_CPU_KVCACHE_SPACE": "--kv-cache-bytes",
    "VLLM_CPU_OMP_THREADS_BIND": "--threads", "VLLM_USE_MODELSCOPE": "models are the Hugging Face Hub's",
})  # fmt: skip
_KNOWN = frozenset((*SAME, *PARTS, *LEFT_OUT, *REFUSED, *(name for name, _ in SAME_AS)))
_OFF = ("false", "0", "no", "off")


class Meaning(NamedTuple):
    """Of an option of vLLM's: ours, with their values, and the names of what is left out, each with why."""

    ours: dict[str, list[Any]]
    left_out: dict[str, str]


def plain(name: str) -> str:
    """An option's name as the tables have it; of --compilation-config.mode that of the whole."""
    return name.lstrip("-").replace("_", "-").partition(".")[0]


def whole(name: str) -> str:
    """Of the beginning of one name the name, as on vLLM's command line; any other as it is."""
    found = [name] if is_known(name) else [known for known in _KNOWN if len(name) > 5 and known.startswith(name)]
    return found[0] if len(found) == 1 else name


def is_known(name: str) -> bool:
    return bool(_why_left_out(name)) or name in _KNOWN or name.removeprefix("no-") in SWITCHES


def _why_left_out(name: str) -> str:
    """That of the longest name with a * that fits, where there is none of the name itself."""
    parts = name.split("-")
    beginnings = ("-".join(parts[:n]) + "-*" for n in range(len(parts), 0, -1))
    return next((LEFT_OUT[one] for one in (name, *beginnings) if one in LEFT_OUT), "")


def meaning(name: str, value: Any, known: Container[str]) -> Meaning | None:
    """Of an option of vLLM's (as `plain` has it) where there are the options `known`; None: it has none here. `value`: a
    switch's may be any that is not false."""
    if name.startswith("no-") and name[3:] in SWITCHES:
        return Meaning({}, {name: words} if (words := _why_left_out(name[3:])) else {})
    if name in SWITCHES:
        if str(value).lower() in _OFF:
            return Meaning({}, {})
        value = ""
    if name in PARTS:
        return _of_parts(name, value, known)
    if (same := SAME_AS.get((name, str(value)))) is not None and same[0] in known:
        return Meaning({same[0]: [same[1]]}, {})
    if SAME.get(name, "") in known:
        return Meaning({SAME[name]: _each(value)}, {})
    if str(value) in AS_HERE.get(name, ()):
        return Meaning({}, {})
    words = _why_left_out(name)
    return Meaning({}, {name: words}) if words else None


def _each(value: Any) -> list[Any]:
    """Of values in a list or in JSON, as vLLM has origins and adapters."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            value = json.loads(value)
        except ValueError:
            return [value]
    values = value if isinstance(value, list | tuple) else [value]
    found: list[Any] = []
    for one in values:
        if isinstance(one, str) and one[:1] == "{":
            one = _each(one)[0]
        elif isinstance(one, Mapping) and {"name", "path"} <= one.keys():
            one = f"{one['name']}={one['path']}"
        found.append(one)
    return found


def _of_parts(name: str, value: Any, known: Container[str]) -> Meaning | None:
    try:
        given = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return None
    if not isinstance(given, Mapping):
        return None
    fill = _speculative if name == "speculative-config" else _events
    given, why = fill({key: one for key, one in given.items() if one is not None})
    parts = PARTS[name]
    if why or not all(parts[key] in known for key in given.keys() & parts.keys()):
        return Meaning({}, {name: why}) if why else None
    others = {f"{name}.{key}": "it changes no answer" for key in given if key not in parts}
    return Meaning({parts[key]: [one] for key, one in given.items() if key in parts}, others)


def _speculative(given: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """With what vLLM makes of it where it is silent. Also why there are no drafts, if so."""
    model = str(given.get("model", ""))
    method = given.get("method") or ("ngram" if "ngram" in model else "eagle3" if "eagle3" in model.lower() else "draft_model")
    if method not in ("ngram", "draft_model", "eagle3"):
        return {}, f"of {method} there are no drafts here, and answers are the same without"
    unused = ("model",) if method == "ngram" else ("prompt_lookup_min", "prompt_lookup_max")
    given = {key: one for key, one in given.items() if key not in unused} | {"method": method}
    if bounds := [given[key] for key in ("prompt_lookup_min", "prompt_lookup_max") if key in given]:
        given |= {"prompt_lookup_min": bounds[0], "prompt_lookup_max": bounds[-1]}
    return given, ""


def _events(given: dict[str, Any]) -> tuple[dict[str, Any], str]:
    on, publisher = given.pop("enable_kv_cache_events", False), given.pop("publisher", "zmq")
    if str(on).lower() in _OFF or publisher != "zmq":
        return {}, ""
    return {"endpoint": "tcp://*:5557", **{key: one for key, one in given.items() if one != ""}}, ""


def instead_of(word: str, known: Container[str] | None) -> str:
    """What to give instead of the option `word`, where there are the options (without dashes) that this names; else nothing.
    `known`: None for those that a server has."""
    advice = REFUSED.get(name := plain(word.partition("=")[0])) or (f"--{SAME[name]}" if name in SAME else "")
    if not advice or (known is not None and not all(flag in known for flag in re.findall(r"--([a-z][\w-]*)", advice))):
        return ""
    return f" (here: {advice})"


def _in_python(words: str) -> str:
    return re.sub(r"--([a-z][\w-]*)", lambda flag: flag[1].replace("-", "_"), words)


def left_out_in_words(options: Mapping[str, str], variables: Iterable[str] = ()) -> list[str]:
    """What is told, once, of options, each with why, and of variables."""
    found, of_words = [], dict[str, list[str]]()
    for name, words in options.items():
        of_words.setdefault(words, []).append(name)
    if names := "; ".join(f"{', '.join(names)} ({words})" for words, names in of_words.items()):
        found.append(f"options of vLLM that change nothing here: {names}")
    if told := ", ".join(name + (f" (here: {VARIABLES[name]})" if name in VARIABLES else "") for name in sorted(variables)):
        found.append(f"variables of vLLM are not read here: {told}")
    return found


def of_python(options: Mapping[str, Any], fields: Iterable[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The fields that keywords of vLLM's LLM(...) are here, and what is left out. Raises ParameterError for what is neither."""
    known = {name.replace("_", "-"): name for name in fields}
    found = {name: value for name, value in options.items() if name in known.values()}
    left_out: dict[str, str] = {}
    for name in options.keys() - found.keys():
        value = options[name]
        if is_known(plain(name)) and (value is None or value == {} or value == []):
            continue
        meant = meaning(plain(name), value, known)
        if meant is None or any(known[ours] in options for ours in meant.ours):
            advice = _in_python(instead_of(name, None))
            raise ParameterError(name, value, f"nothing: there is no such option{advice or nearest(name, known.values())}")
        found |= {known[ours]: tuple(values) if ours == "lora" else values[-1] for ours, values in meant.ours.items()}
        left_out |= {theirs.replace("-", "_"): _in_python(words) for theirs, words in meant.left_out.items()}
    return {name: value for name, value in found.items() if value is not None}, left_out
