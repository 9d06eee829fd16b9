# SPDX-License-Identifier: Apache-2.0
"""What of vLLM this project relies on, read from its sources; as a script, records a version.

A difference or missing symbol needs a reason in `vllm_symbols.json` why it does not concern us.
"""

import argparse
import ast
import functools
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import vllm_redrafter

PACKAGE = Path(vllm_redrafter.__file__).parent
RECORDED = Path(__file__).with_name("vllm_symbols.json")

GPU = "vllm.v1.worker.gpu"
HIDDEN_STATES = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"
MEMBERS = {
    "vllm.config.vllm:VllmConfig": """__post_init__ _get_v2_model_runner_unsupported_features
        _maybe_disable_dynamic_sd_for_v1 use_v2_model_runner additional_config speculative_config
        compilation_config model_config parallel_config cache_config kv_transfer_config
        lora_config aux_output_config num_speculative_tokens scheduler_config""",
    "vllm.config.speculative:SpeculativeConfig": """model num_speculative_tokens
        num_speculative_tokens_per_batch_size""",
    "vllm.config.scheduler:SchedulerConfig": """max_num_seqs max_num_batched_tokens
        scheduler_cls async_scheduling""",
    "vllm.v1.core.sched.scheduler:Scheduler": "update_from_output make_spec_decoding_stats",
    "vllm.config.parallel:ParallelConfig": """worker_cls tensor_parallel_size
        pipeline_parallel_size prefill_context_parallel_size decode_context_parallel_size
        use_ubatching enable_batch_sharded_sampling enable_elastic_ep data_parallel_index
        data_parallel_size distributed_executor_backend""",
    "vllm.config.model:ModelConfig": """get_hidden_size get_vocab_size get_head_size dtype
        runner_type is_encoder_decoder use_mla is_hybrid is_attention_free
        use_fp64_gumbel logits_processors enable_trace_replay return_sampling_mask rswa_window
        is_mm_prefix_lm is_moe served_model_name get_total_num_hidden_layers""",
    "vllm.config.cache:CacheConfig": "cache_dtype kv_sharing_fast_prefill kv_offloading_size",
    "vllm.config.kv_transfer:KVTransferConfig": """kv_connector kv_connector_module_path
        kv_connector_extra_config""",
    "vllm.config.attention:AttentionConfig": "backend backend_per_kind",
    "vllm.config.aux_output:AuxOutputConfig": "enabled",
    "vllm.config.compilation:CompilationConfig": """static_forward_context cudagraph_mode
        cudagraph_capture_sizes max_cudagraph_capture_size""",
    "vllm.config.compilation:CUDAGraphMode": "NONE FULL FULL_DECODE_ONLY has_full_cudagraphs",
    "vllm.engine.arg_utils:EngineArgs": """create_engine_config speculative_config spec_method
        spec_model spec_tokens additional_config worker_cls attention_backend attention_config
        compilation_config cudagraph_capture_sizes max_cudagraph_capture_size
        _api_process_rank""",
    "vllm.v1.engine.async_llm:AsyncLLM": "__init__",
    "vllm.v1.engine.input_processor:InputProcessor": "process_inputs",
    "vllm.v1.engine:EngineCoreRequest": "resumable sampling_params",
    "vllm.v1.metrics.loggers:StatLoggerBase": "__init__ record log log_engine_initialized",
    "vllm.sampling_params:SamplingParams": """_validate_spec_decode structured_outputs
        bad_words_token_ids thinking_token_budget repetition_penalty""",
    "vllm.v1.attention.backend:CommonAttentionMetadata": """query_start_loc seq_lens max_seq_len
        query_start_loc_cpu seq_lens_cpu_upper_bound is_prefilling mm_req_doc_ranges""",
    "vllm.v1.attention.backend:AttentionCGSupport": "UNIFORM_BATCH",
    "vllm.v1.attention.backend:AttentionType": "DECODER",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum": "CUSTOM CPU_ATTN",
    "vllm.v1.attention.backends.triton_attn:TritonAttentionBackend": """get_impl_cls
        get_builder_cls supports_head_size supports_attn_type supports_non_causal supports_rswa
        supports_mm_prefix supports_batch_invariance supported_kv_cache_dtypes""",
    "vllm.v1.attention.backends.triton_attn:TritonAttentionMetadataBuilder": """build
        build_for_cudagraph_capture _cudagraph_support""",
    "vllm.v1.attention.backend:AttentionMetadataBuilder": "get_varlen_cudagraph_max_query_len",
    "vllm.v1.attention.backends.triton_attn:TritonAttentionMetadata": """num_actual_tokens
        max_query_len query_start_loc max_seq_len seq_lens block_table slot_mapping causal
        mm_prefix_range_tensor""",
    "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl": """forward do_kv_cache_update
        fused_output_quant_supported supports_quant_query_input head_size attn_type alibi_slopes
        chunk_lookback _is_per_token_head_quant kv_cache_dtype fp8_dtype scale sliding_window
        logits_soft_cap sinks num_heads num_kv_heads""",
    "vllm.v1.attention.backend:AttentionBackend": "validate_configuration",
    "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl": """__init__ forward fa4_hd256
        vllm_flash_attn_version""",
    "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadata": """num_actual_tokens
        max_query_len query_start_loc max_seq_len seq_lens block_table slot_mapping causal
        max_num_splits""",
    "vllm.v1.worker.gpu_worker:Worker": """__init__ _make_model_runner execute_model sample_tokens
        take_draft_token_ids sleep wake_up""",
    "vllm.v1.worker.cpu_worker:CPUWorker": "__init__ init_device sleep wake_up",
    "vllm.v1.executor.multiproc_executor:MultiprocExecutor": """execute_model sample_tokens
        take_draft_token_ids""",
    "vllm.v1.core.sched.output:SchedulerOutput": """has_structured_output_requests
        num_invalid_spec_tokens num_spec_tokens_to_schedule num_scheduled_tokens""",
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler": "_update_after_schedule",
    f"{GPU}.model_runner:BatchReqState": "num_draft_tokens_np",
    f"{GPU}.model_runner:GPUModelRunner": """__init__ load_model reload_weights execute_model
        sample sample_tokens prepare_attn postprocess_sampled model_memory_usage speculator
        initialize_kv_cache adaptive_verification _dummy_run _dummy_sampler_run max_num_tokens
        use_aux_hidden_state_outputs execute_model_state lora_state""",
    f"{GPU}.pp_utils:PPHandler": """__init__ broadcast get_prev_sampled_outputs queue main_stream
        broadcast_stream broadcast_group last_rank is_last_rank req_idx_gen_np device""",
    f"{GPU}.pp_utils:PendingRecv": "event num_sampled idx_mapping_np gen_at_receive_np",
    f"{GPU}.lora_utils:LoraState": "make_lora_inputs lora_ids",
    f"{GPU}.model_states.interface:ModelState": """add_request apply_staged_writes
        initialize_kv_cache custom_sampler max_num_reqs device vllm_config supports_mm_inputs""",
    f"{GPU}.model_states.default:DefaultModelState": """__init__ add_request apply_staged_writes
        prepare_attn prepare_inputs rope_state dummy_inputs_embeds""",
    f"{GPU}.mm.rope:RopeState": "positions",
    f"{GPU}.spec_decode.speculator:BaseSpeculator": """init_cudagraph_manager capture propose
        num_query_per_req""",
    f"{GPU}.cudagraph_utils:CudaGraphManager": """__init__ needs_capture capture dispatch
        run_fullgraph _init_candidates _candidates _capture_descs decode_query_len varlen_decode
        max_num_reqs lora_capture_cases""",
    f"{GPU}.cudagraph_utils:BatchExecutionDescriptor": """cg_mode num_tokens num_reqs
        uniform_token_count max_query_len num_active_loras""",
    f"{GPU}.block_table:BlockTables": "slot_mappings",
    f"{GPU}.buffer_utils:StagedWriteTensor": "__init__ gpu stage_write_elem apply_write",
    f"{GPU}.states:RequestState": """__init__ max_num_reqs prefill_len last_sampled_tokens
        draft_tokens req_id_to_index num_computed_tokens_np all_token_ids total_len
        vocab_size""",
    f"{GPU}.input_batch:InputBatch": """req_ids num_reqs num_reqs_after_padding
        num_tokens_after_padding idx_mapping idx_mapping_np expanded_idx_mapping
        expanded_local_pos num_draft_tokens
        num_draft_tokens_per_req query_start_loc query_start_loc_np seq_lens
        seq_lens_cpu_upper_bound input_ids is_padding positions logits_indices cu_num_logits
        cu_num_logits_np max_query_len""",
    f"{GPU}.sample.sampler:Sampler": """sample get_logprobs_dims compute_nans logprobs_mode
        logits_processors logprob_token_ids_state req_states sampling_states use_fp64_gumbel
        needs_logits_processing""",
    f"{GPU}.sample.states:SamplingStates": """__init__ add_request apply_staged_writes
        max_num_reqs vocab_size temperature seeds min_p top_k top_p""",
    f"{GPU}.buffer_utils:UvaBackedTensor": "cpu np gpu",
    f"{GPU}.sample.output:SamplerOutput": """sampled_token_ids logprobs_tensors num_nans
        num_sampled num_rejected""",
    f"{GPU}.spec_decode.rejection_sampler:RejectionSampler": """__call__
        enable_adaptive_verification""",
    f"{GPU}.spec_decode.adaptive_verification:AdaptiveVerificationManager": """__init__ add_request
        record_confidences get_num_tokens reallocate_drafts query_start_loc
        cost_tables num_speculative_steps num_bonus_tokens
        req_states _max_total_logits _batch_budget _stale_confidences _stale_idx
        _confidence_probs _pending_resets _copy_stream _copy_events batches_to_profile
        set_initial_cost_curves""",
    f"{GPU}.async_utils:StepTimingSample": "full_cudagraph",
    "vllm.v1.utils:CpuGpuBuffer": "__init__ cpu gpu np copy_to_cpu",
    "vllm.v1.outputs:LogprobsTensors": "cat",
    "vllm.v1.outputs:AsyncModelRunnerOutput": "get_output get_kv_connector_output",
    "vllm.v1.outputs:SamplerOutput": "sampled_token_ids logprobs_tensors",
    "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding": """__init__
        forward tp_size num_embeddings embedding_dim org_vocab_size padding_size disable_tp
        quant_method""",
    "vllm.model_executor.models.interfaces:SupportsEagle3": "set_aux_hidden_state_layers",
    "vllm.model_executor.models.interfaces:SupportsMultiModal": "get_language_model",
    # The CPU engine's
    "vllm.v1.worker.cpu_model_runner:CPUModelRunner": "load_model",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": """_prepare_inputs _build_attention_metadata
        _preprocess uses_mrope mrope_positions
        _model_forward execute_model sample_tokens speculative_config _sample _bookkeeping_sync
        _input_fits_in_drafter propose_draft_token_ids take_draft_token_ids initialize_kv_cache
        _on_request_state_removed use_aux_hidden_state_outputs get_model _dummy_run input_ids
        inputs_embeds supports_mm_inputs enable_prompt_embeds""",
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl": "forward",
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend": "get_impl_cls get_builder_cls",
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder": """build isa window_size
        num_heads num_kv_heads head_dim dtype block_size kv_cache_dtype""",
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadata": """query_start_loc seq_lens
        block_table scheduler_metadata""",
    "vllm.v1.sample.sampler:Sampler": "__init__ forward",
    "vllm.v1.spec_decode.metadata:SpecDecodeMetadata": "num_draft_tokens",
    "vllm.v1.sample.metadata:SamplingMetadata": """temperature top_p top_k generators
        prompt_token_ids output_token_ids allowed_token_ids_mask bad_words_token_ids
        logprob_token_ids logitsprocs spec_token_ids no_penalties""",
    "vllm.v1.core.sched.output:NewRequestData": "sampling_params",
    "vllm.v1.core.sched.output:CachedRequestData": "resumed_req_ids",
    # For capture
    f"{HIDDEN_STATES}:ExampleHiddenStatesConnector": """_submit_async_write _write_tensors
        _is_tp_rank_zero _kv_cache _block_size _lock_fds _req_copy_events""",
    f"{HIDDEN_STATES}:PendingSave": "req_id filename token_ids block_ids",
}
"""What is used of classes, by the class that defines it: methods, fields, attributes."""


def names() -> list[str]:
    """All symbols, as `module:name` or `module:Class.member`."""
    used = {f"{owner}.{name}" for owner, members in MEMBERS.items() for name in members.split()}
    return sorted(used | set(imported()))


def imported() -> Iterator[str]:
    """What engine/, offline/ and plugin.py import from vLLM's modules."""
    rooms = (file for room in ("engine", "offline") for file in (PACKAGE / room).rglob("*.py"))
    for file in (PACKAGE / "plugin.py", *rooms):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
                yield from (f"{node.module}:{alias.name}" for alias in node.names)


def signatures(root: Path, symbols: Iterable[str]) -> dict[str, str | None]:
    """What each symbol is in the sources below `root`; None where it does not exist."""
    return {symbol: _signature(root, symbol) for symbol in symbols}


def _signature(root: Path, symbol: str) -> str | None:
    module, _, path = symbol.partition(":")
    if (as_module := _file(root, f"{module}.{path}")) is not None and "." not in path:
        return "module" if as_module.exists() else None
    file = _file(root, module)
    if file is None:
        return None
    body: list[ast.stmt] = _parsed(file).body
    *owners, name = path.split(".")
    for owner in owners:
        found = [n for n in body if isinstance(n, ast.ClassDef) and n.name == owner]
        if not found:
            return None
        body = found[0].body
    return _described(body, name)


def _file(root: Path, module: str) -> Path | None:
    path = root.joinpath(*module.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.exists():
            return candidate
    return None


@functools.cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _described(body: list[ast.stmt], name: str) -> str | None:
    for node in _flattened(body):
        match node:
            case ast.FunctionDef(name=found) if found == name:
                return f"({ast.unparse(node.args)})"
            case ast.ClassDef(name=found) if found == name:
                return f"class({', '.join(ast.unparse(base) for base in node.bases)})"
            case ast.AnnAssign(target=ast.Name(id=found)) if found == name:
                return ast.unparse(node.annotation)
            case ast.Assign(targets=targets):
                if any(isinstance(t, ast.Name) and t.id == name for t in targets):
                    return "value"
            case ast.ImportFrom(names=aliases):
                if any((alias.asname or alias.name) == name for alias in aliases):
                    return "imported"
    assigned = (
        target
        for method in body
        if isinstance(method, ast.FunctionDef)
        for node in ast.walk(method)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    )
    for target in assigned:
        if isinstance(target, ast.Attribute) and target.attr == name:
            return "attribute"
    return None


def _flattened(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements, and those below `if` (TYPE_CHECKING) and `try`."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _flattened([*node.body, *node.orelse])


@dataclass
class Record:
    """Each symbol of a version (None: missing); reasons for differences and absences."""

    symbols: dict[str, str | None]
    differences: dict[str, str]
    absent: dict[str, str]


def read_records() -> dict[str, Record]:
    """The recorded versions, the oldest first."""
    found = json.loads(RECORDED.read_text())
    return {version: Record(**found[version]) for version in sorted(found, key=_numbers)}


def with_version(
    records: Mapping[str, Record], version: str, symbols: dict[str, str | None]
) -> dict[str, Record]:
    """The records with one more, or with one renewed; reasons that were given are kept."""
    old = records.get(version, Record({}, {}, {}))
    added = {**records, version: Record(symbols, old.differences, old.absent)}
    ordered = {v: added[v] for v in sorted(added, key=_numbers)}
    for before, later in pairwise(ordered.values()):
        known = before.symbols.keys() | later.symbols.keys()
        names = (n for n in known if before.symbols.get(n) != later.symbols.get(n))
        later.differences = {name: later.differences.get(name, "") for name in sorted(names)}
    oldest = next(iter(ordered.values()))
    oldest.differences = {}
    for record in ordered.values():
        absent = [name for name, found in record.symbols.items() if found is None]
        record.absent = {name: record.absent.get(name, "") for name in absent}
    return ordered


def unjudged(record: Record) -> list[str]:
    """The differences and missing symbols that no reason is given for."""
    reasons = [*record.differences.items(), *record.absent.items()]
    return sorted({name for name, reason in reasons if not reason.strip()})


def described(records: Mapping[str, Record], version: str) -> Iterator[str]:
    """Lines that tell what is different in a version, and why that does not concern us."""
    versions = list(records)
    record = records[version]
    yield f"vLLM {version}: {len(record.symbols)} symbols"
    if (index := versions.index(version)) > 0:
        before = records[versions[index - 1]]
        yield f"{len(record.differences)} differ from vLLM {versions[index - 1]}:"
        for name, reason in record.differences.items():
            yield f"  {name}"
            yield f"    - {before.symbols.get(name)}"
            yield f"    + {record.symbols.get(name)}"
            yield f"    {reason or 'no reason yet'}"
    yield f"{len(record.absent)} do not exist:"
    for name, reason in record.absent.items():
        yield f"  {name}"
        yield f"    {reason or 'no reason yet'}"


def version_of(root: Path) -> str:
    """The version of the vLLM below `root`, without a local part such as `+cpu`."""
    file = root / "vllm" / "_version.py"
    if not file.exists():
        sys.exit(f"{root}: there is no vllm/_version.py below it; name the folder that has vllm/")
    found = re.search(r"^__version__ = .*['\"]([\d.]+)", file.read_text(), re.MULTILINE)
    return found[1] if found else sys.exit(f"{file}: it has no __version__")


def installed_root() -> Path:
    """The folder that has the installed vLLM's package."""
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parents[1]


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Record what a version of vLLM has of the symbols that we rely on, and print "
        "what is different there from the version before it."
    )
    parser.add_argument(
        "root",
        type=Path,
        nargs="?",
        help="a folder that has vllm/, such as an unpacked wheel (default: the installed vLLM's)",
    )
    parser.add_argument("--print-only", action="store_true", help="do not write the record")
    arguments = parser.parse_args()
    root = arguments.root or installed_root()
    version = version_of(root)
    records = with_version(read_records(), version, signatures(root, names()))
    print("\n".join(described(records, version)))
    if arguments.print_only:
        return
    values = {version: asdict(record) for version, record in records.items()}
    RECORDED.write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")
    if missing := unjudged(records[version]):
        print(f"write {len(missing)} reason(s) into {RECORDED}")


if __name__ == "__main__":
    main()
