"""What becomes of every field of the engines' request classes.

The fields are those of the classes behind the relayed endpoints, in vLLM 0.32.0
(vllm/entrypoints/**/protocol.py) and SGLang 0.5.23 (sglang/srt/entrypoints/**/protocol.py). With a
newer engine, enter its new fields here: each steers, chooses the model, or passes.
"""

import json

import pytest

from gateway.errors import BadRequest
from gateway.payload.body import read_body
from gateway.payload.members import STEERING_FIELDS
from gateway.records.endpoint import CHAT

OLDER = {"logits_processors"}
"""Of engines' earlier versions."""
STEER = {
    "vllm": """
priority cache_salt request_id session_id kv_transfer_params ec_transfer_params vllm_xargs
""",
    "sglang": """
priority cache_salt data_parallel_rank request_id session_id rid session_params extra_key
routed_dp_rank disagg_prefill_dp_rank bootstrap_host bootstrap_port bootstrap_room
custom_logit_processor custom_params custom_labels
""",
}
CHOOSE_THE_MODEL = {"vllm": "model", "sglang": "model lora_path"}
PASS = {
    "vllm": """
add_generation_prompt add_special_tokens allowed_token_ids apply_softmax background bad_words
chat_template chat_template_kwargs continue_final_message data data_1 data_2 dimensions
documents echo embed_dtype embedding_types enable_response_messages encoding_format endianness
file frequency_penalty hotwords ignore_eos images include include_reasoning
include_stop_str_in_output input input_type inputs instruction instructions item_first items
label_token_ids language length_penalty logit_bias logprob_token_ids logprobs
max_completion_tokens max_output_tokens max_tokens max_tokens_per_doc max_tokens_per_query
max_tool_calls media_io_kwargs messages metadata min_p min_tokens mm_payload mm_processor_kwargs
n output_config output_dimension padding parallel_tool_calls presence_penalty
previous_input_messages previous_response_id prompt prompt_cache_key prompt_embeds
prompt_logprobs queries query reasoning reasoning_effort repetition_detection repetition_penalty
response_format return_mm_kwargs return_prompt_text return_token_ids return_token_offsets
return_token_strs return_tokens_as_token_ids routed_experts_prompt_start seed service_tier
skip_special_tokens spaces_between_special_tokens stop stop_sequences stop_token_ids store
stream stream_continuous_usage_stats stream_include_usage stream_interval stream_options
structured_outputs suffix system task temperature text text_1 text_2 texts thinking
thinking_token_budget timestamp_granularities to_language tokens tool_choice tools top_k
top_logprobs top_n top_p truncate truncate_prompt_tokens truncation truncation_side
use_activation use_beam_search user watermarking
""",
    "sglang": """
add_generation_prompt add_special_tokens apply_softmax audio_data audio_duration_s background
best_of betas chat_template_kwargs continue_final_message dimensions documents ebnf echo
embed_override_token_id embed_overrides encoding_format frequency_penalty ignore_eos
images_config include input input_ids instruct instructions item_embed_overrides item_first
items json_schema label_token_ids language logit_bias logprobs max_completion_tokens
max_dynamic_patch max_output_tokens max_tokens max_tool_calls messages metadata
min_dynamic_patch min_p min_tokens mm_processor_kwargs n no_stop_trim output_config
parallel_tool_calls presence_penalty previous_response_id prompt query query_embed_overrides
reasoning reasoning_effort regex repetition_penalty response_format return_cached_tokens_details
return_documents return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64
return_hidden_states return_input_ids_in_sglext return_meta_info return_output_ids_in_sglext
return_pooled_hidden_states return_prompt_token_ids return_routed_experts return_sampling_mask
return_spec_tokens_details return_token_ids return_token_logprobs routed_experts_start_len
sampling_logprobs_mode score_extraction_token seed separate_reasoning service_tier
skip_special_tokens stop stop_regex stop_sequences stop_token_ids store stream stream_options
stream_reasoning suffix system task temperature text thinking timestamp_granularities tokens
tool_choice tools top_k top_logprobs top_n top_p truncation use_audio_in_video user video_config
watermark
""",
}
ENGINES = ("vllm", "sglang")


def steering_of(field: str) -> tuple[str, ...]:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    return read_body(CHAT, json.dumps({field: None, **body}).encode()).steering_fields


@pytest.mark.parametrize("engine", ENGINES)
def test_fields_that_steer_are_taken_out_and_the_others_pass(engine: str) -> None:
    steer, chosen, passing = (kind[engine].split() for kind in (STEER, CHOOSE_THE_MODEL, PASS))
    assert len({*steer, *chosen, *passing}) == len(steer) + len(chosen) + len(passing)
    assert [field for field in steer if steering_of(field) != (field,)] == []
    assert [field for field in passing if steering_of(field)] == []


def test_no_field_is_taken_out_that_no_engine_has() -> None:
    known = {"lora_path"}.union(OLDER, *(fields.split() for fields in STEER.values()))
    assert known >= STEERING_FIELDS


@pytest.mark.parametrize("several", [["a", "b"], ["a", None], {"a": 1}, 5])
def test_a_body_names_one_adapter(several: object) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "lora_path": several}
    with pytest.raises(BadRequest, match="expected the name of one LoRA adapter"):
        read_body(CHAT, json.dumps(body).encode())
