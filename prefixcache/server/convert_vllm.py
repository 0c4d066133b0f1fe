"""Requests of the gateway's protocol, said in our own, so that the same checks hold for both."""

from __future__ import annotations

from dataclasses import replace

from smg_grpc_proto import vllm_engine_pb2 as vllm

from prefixcache._pb.prefixcache.v1 import inference_pb2 as pb
from prefixcache.errors import InvalidRequest
from prefixcache.server.convert import CheckedRequest, ModelLimits, is_request_id

_MAX_INT32 = 2**31 - 1  # some numbers are unsigned there and signed here; above this every one of them is too much

# Parts of a request that we would have to ignore: each changes the answer or where it is computed.
_UNSUPPORTED_FIELDS = (
    ("mm_inputs", "this server takes text only"),
    ("media_refs", "this server takes text only"),
    ("kv_transfer_params", "prefill and decode are not split here"),
    ("kv_transfer_params_json", "prefill and decode are not split here"),
)


def to_generate_request(request: vllm.GenerateRequest) -> pb.GenerateRequest:
    """Says a Generate request in our own protocol; what both call the same is checked there.

    Plain numbers that the protocol can't leave unset count as unset where they are 0.

    Raises:
        InvalidRequest: It asks for something that we don't have, or its prompt is empty.
    """
    _check_supported(request)
    params = request.sampling_params
    message = pb.GenerateRequest(
        top_k=min(params.top_k, _MAX_INT32),
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        min_tokens=min(params.min_tokens, _MAX_INT32),
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        skip_special_tokens=params.skip_special_tokens,
        ignore_eos=params.ignore_eos,
        logit_bias=params.logit_bias,
    )
    for name in ("top_p", "repetition_penalty", "n"):
        if value := getattr(params, name):
            setattr(message, name, min(value, _MAX_INT32))
    for name in ("temperature", "max_tokens", "logprobs", "prompt_logprobs", "seed"):
        if params.HasField(name):
            setattr(message, name, min(getattr(params, name), _MAX_INT32))
    if is_request_id(request.request_id):  # a longer one, made of a client's header, names the call for Abort alone
        message.request_id = request.request_id
    if request.WhichOneof("input") == "text":
        message.text = request.text
    elif request.tokenized.input_ids:
        message.token_ids.extend(request.tokenized.input_ids)
    else:
        raise InvalidRequest("tokenized.input_ids", "the prompt is empty; it needs at least one token")
    return message


def with_room_for_output(checked: CheckedRequest, num_prompt_tokens: int, limits: ModelLimits) -> CheckedRequest:
    """Cuts `max_tokens` to what the prompt leaves of the model's length; unset, it is all of that."""
    num_left = max(1, limits.max_model_len - num_prompt_tokens)
    return replace(checked, max_tokens=min(checked.max_tokens or num_left, num_left))


def _check_supported(request: vllm.GenerateRequest) -> None:
    for name, reason in _UNSUPPORTED_FIELDS:
        if request.HasField(name):
            raise InvalidRequest(name, reason)
    if request.extra_mm_inputs:
        raise InvalidRequest("extra_mm_inputs", "this server takes text only")
    if request.data_parallel_rank:
        raise InvalidRequest("data_parallel_rank", f"is {request.data_parallel_rank}, but there is rank 0 only")
    params = request.sampling_params
    if constraint := params.WhichOneof("constraint"):
        raise InvalidRequest(constraint, "output can't be constrained to a format here")
    if params.HasField("truncate_prompt_tokens"):
        raise InvalidRequest("truncate_prompt_tokens", "prompts are not shortened here")
