"""The long tail of vLLM's flags, from 0.5 to 0.33: what becomes of each, in groups.

Each group is a note or a refusal, and the names that it is for.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Renamed:
    """A flag with a value, which another of ours takes."""

    ours: str


@dataclass(frozen=True, slots=True)
class Noted:
    """A flag without effect: ``values`` are those it may have, none for any; None: it has none."""

    note: str
    values: tuple[str, ...] | None = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """A flag whose meaning cannot be had here; ``fix`` tells what to do in its place."""

    reason: str
    fix: str


_LEAVE = "Leave it out."

#: Flags that take all values up to the next flag.
WITH_SEVERAL_VALUES = frozenset({"--cudagraph-capture-sizes", "--collect-detailed-traces"})

GROUPS: tuple[tuple[Renamed | Noted | Refused, str], ...] = (
    (Renamed("--speculative-config"), "-sc"),
    (Renamed("--quantization"), "-q"),
    (
        Noted("steps are neither compiled nor captured"),
        "--compilation-config -cc --cudagraph-capture-sizes --max-cudagraph-capture-size"
        " --optimization-level -O",
    ),
    (
        Noted("device and model choose the kernels"),
        "--attention-backend --attention-config -ac --moe-backend --linear-backend --kernel-config"
        " --performance-mode --all2all-backend --mm-encoder-attn-backend",
    ),
    (
        Noted("steps are planned one at a time"),
        "--num-scheduler-steps --num-lookahead-slots --max-num-scheduled-tokens",
    ),
    (Noted("a job is admitted as soon as there is room for it"), "--scheduler-delay-factor"),
    (Noted("weights are always mapped, and read by one thread"), "--safetensors-load-strategy"),
    (Noted("weights are always mapped, and read by one thread"), "--max-parallel-loading-workers"),
    (Noted("weights and KV cache stay on the device", ("0",)), "--cpu-offload-gb"),
    (Noted("logs and metrics have settings of their own"), "--log-level --uvicorn-log-level"),
    (Noted("logs and metrics have settings of their own"), "--max-log-len"),
    (Noted("there is one replica in a worker", ("0",)), "--data-parallel-rank"),
    (
        Noted("there is none here", None),
        "--disable-cascade-attn --disable-hybrid-kv-cache-manager --disable-chunked-mm-input"
        " --disable-nccl-for-dp-synchronization --disable-uvicorn-access-log --use-tqdm-on-load"
        " --disable-fastapi-docs --disable-async-output-proc --disable-frontend-multiprocessing"
        " --enable-flashinfer-autotune",
    ),
    (
        Noted("grammars never fall back to another library", None),
        "--guided-decoding-disable-fallback",
    ),
    (
        Refused("changes what a schema means", "Say it in the schema: additionalProperties, enum."),
        "--guided-decoding-disable-any-whitespace --guided-decoding-disable-additional-properties",
    ),
    (
        Refused(
            "is part of --speculative-config here",
            "Write --speculative-config with method (ngram), num_speculative_tokens,"
            " prompt_lookup_max and prompt_lookup_min as JSON.",
        ),
        "--speculative-model --num-speculative-tokens --ngram-prompt-lookup-max"
        " --ngram-prompt-lookup-min --spec-method --spec-tokens --spec-model"
        " --speculative-disable-by-batch-size",
    ),
    (
        Refused(
            "wants a draft model, which there is none of",
            'Guess from earlier text: --speculative-config \'{"method": "ngram", ...}\'.',
        ),
        "--speculative-model-quantization --speculative-draft-tensor-parallel-size"
        " --speculative-max-model-len --speculative-disable-mqa-scorer"
        " --spec-decoding-acceptance-method --typical-acceptance-sampler-posterior-threshold"
        " --typical-acceptance-sampler-posterior-alpha --disable-logprobs-during-spec-decoding"
        " --per-request-spec-decode-metrics",
    ),
    (
        Refused("is how vLLM makes several tokens in one step, which is not done here", _LEAVE),
        "--multi-step-stream-outputs",
    ),
    (
        Refused("changes the model", "Change config.json in a copy of its directory."),
        "--rope-scaling --rope-theta --hf-overrides --disable-sliding-window"
        " --model-class-overrides --hf-config-path --config-format --override-pooler-config"
        " --pooler-config --override-neuron-config --model-loader-extra-config"
        " --quantization-config --quantization-param-path"
        " --kv-cache-dtype-skip-layers --calculate-kv-scales --code-revision --tokenizer-revision"
        " --tokenizer-pool-size --tokenizer-pool-type --tokenizer-pool-extra-config"
        " --skip-tokenizer-init --allow-deprecated-quantization",
    ),
    (
        Refused("goes by another name", "Write --task generate, embed, score or transcribe."),
        "--runner --convert",
    ),
    (
        Refused(
            "spreads a model over machines, which is not done",
            "Use --tensor-parallel-size and --pipeline-parallel-size on one machine.",
        ),
        "--worker-use-ray --engine-use-ray --ray-workers-use-nsight --nnodes --node-rank -n -r"
        " --master-addr --master-port --distributed-timeout-seconds"
        " --cpu-distributed-timeout-seconds --device-ids --decode-context-parallel-size -dcp"
        " --prefill-context-parallel-size -pcp --dcp-comm-backend --dcp-kv-cache-interleave-size"
        " --cp-kv-cache-interleave-size --dcp-q-replicate --numa-bind --numa-bind-cpus"
        " --numa-bind-nodes --enable-nccl-comm-suspend",
    ),
    (
        Refused("is a matter of replicas", "Start more workers: they share the queue."),
        "-dp --data-parallel-size-local -dpl --data-parallel-start-rank -dpr -dpn"
        " --data-parallel-address -dpa --data-parallel-rpc-port -dpp --data-parallel-backend -dpb"
        " --data-parallel-external-lb -dpe --data-parallel-hybrid-lb -dph"
        " --data-parallel-multi-port-external-lb -dpm --data-parallel-supervisor-port"
        " --dp-sync-interval --api-server-count -asc --elastic-ep-max-dp-size --enable-elastic-ep"
        " --dp-supervisor-probe-failure-threshold --dp-supervisor-probe-interval-s"
        " --dp-supervisor-probe-timeout-s",
    ),
    (
        Refused("is for experts on several devices, which are split like all layers", _LEAVE),
        "--enable-expert-parallel -ep --enable-eplb --eplb-config --expert-placement-strategy"
        " --num-redundant-experts --eplb-window-size --eplb-step-interval"
        " --enable-ep-weight-filter --enable-return-routed-experts --enable-dbo --ubatch-size"
        " --dbo-decode-token-threshold --dbo-prefill-token-threshold",
    ),
    (
        Refused("is for images, sound and video in prompts, which are not taken", _LEAVE),
        "--limit-mm-per-prompt --mm-processor-kwargs --media-io-kwargs --mm-encoder-tp-mode"
        " --mm-processor-cache-gb --mm-processor-cache-type --disable-mm-preprocessor-cache"
        " --mm-shm-cache-max-object-size-mb --mm-encoder-only --mm-encoder-attn-dtype"
        " --mm-encoder-fp8-scale-path --mm-encoder-fp8-scale-save-margin"
        " --mm-encoder-fp8-scale-save-path --mm-hasher-algorithm --mm-ipc-gpu-memory-gb"
        " --mm-processor-device --mm-tensor-ipc --mm-device-do-normalize --skip-mm-profiling"
        " --interleave-mm-strings --enable-mm-embeds --language-model-only --video-pruning-method"
        " --video-pruning-rate --allowed-local-media-path --allowed-media-domains"
        " --limit-per-prompt --image-input-type --image-token-id --image-input-shape"
        " --image-feature-size --enable-tower-connector-lora --default-mm-loras"
        " --trust-request-mm-kwargs",
    ),
    (
        Refused("concerns adapters of vLLM's kind", "See LoRA in docs/engine.md for ours."),
        "--max-cpu-loras --lora-dtype --lora-extra-vocab-size --fully-sharded-loras"
        " --long-lora-scaling-factors --lora-target-modules --specialize-active-lora"
        " --max-lora-cls-labels --enable-mixed-moe-lora-format --enable-moe-shared-loras"
        " --enable-lora-bias --enable-prompt-adapter --max-prompt-adapters"
        " --max-prompt-adapter-token",
    ),
    (
        Refused("moves KV blocks between servers, which is not done", "See --swap-space."),
        "--kv-transfer-config --kv-events-config --ec-transfer-config --ec-manager-config"
        " --kv-sharing-fast-prefill --offload-backend --offload-params --offload-group-size"
        " --offload-num-in-group --offload-prefetch-step --cpu-offload-params"
        " --prefix-cache-retention-interval --prefix-match-unit --swa-bounded-replay",
    ),
    (
        Refused("bounds what waits, which the scheduler does", "See docs/operations.md, Bounds."),
        "--max-num-queued-reqs --max-num-queued-tokens --max-num-active-seqs"
        " --prefill-schedule-interval --long-prefill-token-threshold-adaptive"
        " --scheduler-reserve-full-isl --num-prefill-slots",
    ),
    (
        Refused("is a device's share by another name", "Write --gpu-memory-utilization."),
        "--device-memory-utilization",
    ),
    (
        Refused("would run code of others in the worker", _LEAVE),
        "--worker-cls --worker-extension-cls --scheduler-cls --logits-processors"
        " --logits-processor-pattern --io-processor-plugin --reasoning-parser-plugin"
        " --tool-parser-plugin --middleware --additional-config",
    ),
    (
        Refused("is for state-space models and others that are not served", _LEAVE),
        "--mamba-backend --mamba-block-size --mamba-cache-dtype --mamba-cache-mode"
        " --mamba-cache-philox-rounds --mamba-ssm-cache-dtype --mamba-ssu-algorithm"
        " --enable-mamba-cache-stochastic-rounding --enable-mamba-shared-prefix-checkpoint"
        " --gdn-prefill-backend --kda-decode-backend --kda-prefill-backend --use-replayssm"
        " --replayssm-buffer-len --sparse-indexer-topk-backend --diffusion-config -dc"
        " --engram-config --use-fp64-gumbel --enable-hc-sp",
    ),
    (
        Refused("is a matter of logs and metrics", "See --metrics-port and TIDEMILL_LOG_LEVEL."),
        "--otlp-traces-endpoint --collect-detailed-traces --show-hidden-metrics-for-version"
        " --profiler-config --kv-cache-metrics --kv-cache-metrics-sample --cudagraph-metrics"
        " --enable-mfu-metrics --enable-layerwise-nvtx-tracing --enable-logging-iteration-details"
        " --aggregate-engine-logging --logging-config --log-config-file --custom-histogram-buckets"
        " --jit-monitor-mode --jit-monitor-verbose --enable-trace-replay --log-error-stack"
        " --qlora-adapter-name-or-path",
    ),
    (
        Refused("has no counterpart here", _LEAVE),
        "--enable-sleep-mode --sleep-mode-offload-cudagraph --sleep-preserve-parameter-names"
        " --enable-prompt-embeds --enable-cumem-allocator --enable-fault-tolerance"
        " --fault-tolerance-config --fail-on-environ-validation --weight-transfer-config"
        " --watermark-config --aux-output-config --return-sampling-mask --enable-shm-tensor-arena"
        " --enable-batch-sharded-sampling --renderer-num-workers --reasoning-config"
        " --ir-op-priority --pt-load-map-location --ignore-patterns --hf-token"
        " --safetensors-prefetch-block-size --safetensors-prefetch-num-threads"
        " --enable-reasoning --config --intial-incremental-detokenization-offset",
    ),
    (
        Refused("is a matter of HTTP, which workers do not speak", "See docs/gateway.md."),
        "--host --port --api-key --uds --root-path --tool-call-parser --reasoning-parser"
        " --allow-credentials --allowed-origins --allowed-methods --allowed-headers --ssl-keyfile"
        " --ssl-certfile --ssl-ca-certs --ssl-cert-reqs --ssl-ciphers --enable-ssl-refresh"
        " --response-role --chat-template-content-format --default-chat-template-kwargs"
        " --trust-request-chat-template --return-tokens-as-token-ids --tool-server"
        " --tool-strict-level --exclude-tools-when-tool-choice-none --enable-request-id-headers"
        " --enable-server-load-tracking --enable-force-include-usage --enable-log-outputs"
        " --enable-log-deltas --enable-tokenizer-info-endpoint --enable-per-request-metrics"
        " --enable-offline-docs --disable-access-log-for-endpoints --h11-max-header-count"
        " --h11-max-incomplete-event-size --sse-keep-alive-interval --fingerprint-mode"
        " --fingerprint-value --headless --grpc --grpc-port --tokens-only --prompt-adapters"
        " --anthropic-disabled-thinking-effort --cohere-format --cohere-is-reasoning-model"
        " --enable-flash-late-interaction --enable-scale-out",
    ),
)

OTHER_FLAGS = {name: group for group, names in GROUPS for name in names.split()}
