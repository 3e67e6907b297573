"""Makes generation jobs of chats: the encoded prompt, and the format of its answer.

Knows the engine, but no interface.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from thermocline.messages import RequestOptions
from thermocline.server.core.generation_jobs import GenerationJob
from thermocline.server.core.structured import plan_format

if TYPE_CHECKING:
    from thermocline.engine.api import Engine
    from thermocline.server.core.normalized_chat import NormalizedChat
    from thermocline.server.core.structured import FormatPlan

# Enough to see whether the template has opened the model's reasoning.
_PROMPT_END_TOKENS: Final = 16


class ChatRequest(Protocol):
    """A typed body that stands for a chat."""

    def normalized(self) -> NormalizedChat:
        """Return the normalized chat. Raises RequestError for fields that can not be served."""
        ...


async def chat_job(engine: Engine, request: ChatRequest) -> GenerationJob:
    """Return the job of one answer to a chat. Raises RequestError for what the model can not do."""

    def read() -> tuple[NormalizedChat, FormatPlan]:
        chat = request.normalized()
        return chat, plan_format(engine.template_facts, chat.format)

    chat, plan = await engine.offload.run_if_long(read, request)
    prompt = await engine.encode_chat(
        chat.messages,
        tools=plan.tools,
        variables=plan.template_variables,
        continue_final=chat.continues_final,
    )
    options = RequestOptions(speculate=chat.speculate)
    job = GenerationJob((prompt,), chat.params, options=options)
    return await with_answer_format(job, engine, plan)


async def with_answer_format(job: GenerationJob, engine: Engine, plan: FormatPlan) -> GenerationJob:
    """Return `job` with the answers' format. Raises RequestError for a format that can not be enforced."""
    end = engine.tokenizer.decode(job.prompts[0][-_PROMPT_END_TOKENS:], skip_special=False)
    about = plan.tools, None if plan.wanted is None else plan.wanted.text
    answer_format = await engine.offload.run_if_long(partial(plan.for_prompt, end), *about)
    params = replace(
        job.params,
        constraint=answer_format.constraint,
        reasoning_budget=answer_format.reasoning_budget,
        shown_token_ids=answer_format.shown_token_ids,
    )
    return replace(job, params=params, make_parser=answer_format.make_parser)
