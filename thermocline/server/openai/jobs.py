"""From OpenAI's typed requests to generation jobs and the encoders of their answers. Knows no HTTP."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

from thermocline.errors import RequestError
from thermocline.server.core.generation_jobs import GenerationJob, check_size
from thermocline.server.core.prompts import with_answer_format
from thermocline.server.core.structured import plan_format
from thermocline.server.openai.chat_encoder import ChatEncoder
from thermocline.server.openai.completion_encoder import CompletionEncoder
from thermocline.server.openai.encoder import EncoderOptions, ServedModel
from thermocline.server.openai.schema import refuse_non_text
from thermocline.text.templates.template_facts import NO_TEMPLATE, read_template
from thermocline.workers.offload import BULK_CHARS, is_bulk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thermocline.engine.api import Engine
    from thermocline.messages import RequestOptions
    from thermocline.sampling.params import SamplingParams
    from thermocline.server.core.backend import OpenModel
    from thermocline.server.core.settings import ServerConfig
    from thermocline.server.core.structured import FormatPlan
    from thermocline.server.openai.fields import GenerationRequest
    from thermocline.server.openai.schema import ChatCompletionRequest, CompletionRequest
    from thermocline.workers.offload import StillWanted

_SHOWN_NAMES: Final = 32


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """How the server answers one request. unknown: fields of the request that the interface does not have."""

    unknown: Sequence[str] = ()
    trusts_templates: bool = False
    is_tracing: bool = False

    @classmethod
    def of(cls, config: ServerConfig, engine: Engine, unknown: Sequence[str] = ()) -> Self:
        """Return the options of a server with this config and engine."""
        return cls(unknown, config.trust_request_chat_template, engine.is_tracing)


async def prepare_chat(
    model: OpenModel, request: ChatCompletionRequest, options: ResponseOptions
) -> tuple[GenerationJob, ChatEncoder]:
    """Return a chat's job and encoder. Raises RequestError."""
    params, n, job_options = request.sampling_params(), request.num_answers, request.options()
    _check_slot(model.engine, job_options)
    plan, prompt = await encode_chat(model.engine, request, options)
    params = await _with_bad_words(model.engine, request, params)
    job = GenerationJob((prompt,), params, n, options=job_options)
    job = await with_answer_format(job, model.engine, plan)
    prefix = _final_text(request.messages) if request.echo and request.continues_final else ""
    return job, ChatEncoder(_served(model), job, _encoder_options(request, options), prefix)


async def prepare_completion(
    model: OpenModel, request: CompletionRequest, options: ResponseOptions
) -> tuple[GenerationJob, CompletionEncoder]:
    """Return a completion's job and encoder. Raises RequestError."""
    params, n, job_options = request.sampling_params(), request.num_answers, request.options()
    engine, echoes = model.engine, bool(request.echo)
    _check_slot(engine, job_options)
    # A completion has no chat template: its answer is text, without tool calls or reasoning.
    fields = request.format_fields()
    plan = await engine.offload.run_if_long(
        partial(plan_format, NO_TEMPLATE, fields), fields.response_format, fields.structured_outputs
    )
    limit = engine.max_context_tokens
    prompts = [
        await engine.encode(prompt, max_tokens=limit) if isinstance(prompt, str) else prompt
        for prompt in request.prompts()
    ]
    params = await _with_bad_words(engine, request, params)
    job = GenerationJob(
        tuple(prompts),
        params,
        n,
        options=job_options,
        prompt_logprobs=params.logprobs if echoes else None,
    )
    check_size(job)
    job = await with_answer_format(job, engine, plan)
    encoder_options = _encoder_options(request, options)
    encoder = CompletionEncoder(_served(model), job, encoder_options, echoes=echoes)
    if echoes:
        num_echoed = n * sum(map(len, prompts))
        await engine.offload.run(encoder.read_prompts, is_bulk=num_echoed > BULK_CHARS)
    return job, encoder


async def encode_chat(
    engine: Engine, request: ChatCompletionRequest, options: ResponseOptions
) -> tuple[FormatPlan, list[int]]:
    """Return the plan of a chat's answer, and its prompt's token ids. Raises RequestError."""
    if request.chat_template is not None and not options.trusts_templates:
        raise RequestError(
            "chat_template is a program: it is taken only by a server that was started with "
            "--trust-request-chat-template",
            param="chat_template",
        )

    def read() -> FormatPlan:
        facts = engine.template_facts
        if request.chat_template is not None:
            facts = read_template(request.chat_template, vocabulary=engine.tokenizer)
        plan = plan_format(facts, request.format_fields())
        refuse_non_text(request.messages)
        return plan

    plan = await engine.offload.run_if_long(read, request)
    continues = request.continues_final
    prompt = await engine.encode_chat(
        request.messages,
        tools=plan.tools,
        variables=plan.template_variables,
        add_generation_prompt=request.add_generation_prompt is not False or continues,
        continue_final=continues,
        template=request.chat_template,
    )
    return plan, prompt


def _check_slot(engine: Engine, options: RequestOptions) -> None:
    if options.slot is not None and options.slot >= engine.max_requests:
        raise RequestError(
            f"there is no slot {options.slot}: choose 0 to {engine.max_requests - 1}, or leave id_slot out",
            param="id_slot",
        )


def _encoder_options(request: GenerationRequest, options: ResponseOptions) -> EncoderOptions:
    """Return what the answer shows beside the text."""
    extension: dict[str, Any] = {}
    traced = bool(request.trace) and options.is_tracing
    untraced = ["trace"] if request.trace and not traced else []
    ignored = [*options.unknown, *request.without_effect, *untraced]
    if ignored:
        extension["ignored_params"] = ignored[:_SHOWN_NAMES]
    shown = request.stream_options
    return EncoderOptions(
        include_usage=shown is not None and bool(shown.include_usage),
        continuous_usage=shown is not None and bool(shown.continuous_usage_stats),
        timings_per_token=bool(request.timings_per_token),
        return_progress=bool(request.return_progress),
        return_token_ids=bool(request.return_token_ids),
        trace_id=traced,
        extension=extension,
    )


def _final_text(messages: Sequence[dict[str, Any]]) -> str:
    """Return the text of the last message, whose parts `refuse_non_text` has checked."""
    content = messages[-1].get("content")
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""


async def _with_bad_words(
    engine: Engine, request: GenerationRequest, params: SamplingParams
) -> SamplingParams:
    """Return `params` with each bad word's token sequences: at a text's start, and after a space."""
    words = request.bad_word_texts()
    if not words:
        return params

    def encoded(still_wanted: StillWanted) -> tuple[tuple[int, ...], ...]:
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, " " + word.lstrip(" ")):
                still_wanted()
                sequences[tuple(engine.tokenizer.encode_more(text))] = None
        return tuple(filter(None, sequences))

    sequences = await engine.offload.run(encoded, is_bulk=is_bulk(words))
    return replace(params, bad_token_sequences=sequences)


def _served(model: OpenModel) -> ServedModel:
    return ServedModel(model.card.id, model.fingerprint, model.engine.tokenizer)
