"""llama.cpp's names of flags: which of ours they are, which change nothing here, and what to type for the others.

The one table of them. Knows no command by what it does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from collections.abc import Mapping

ALSO: Final[Mapping[str, tuple[str, ...]]] = {
    "--model": ("-m",),
    "--ctx": ("-c", "--ctx-size"),
    "--kv-type": ("-ctk", "--cache-type-k"),
    "--prefill-chunk": ("-ub", "--ubatch-size"),
    "--threads": ("-t",),
    "--gpu-layers": ("-ngl", "--n-gpu-layers"),
    "--override-tensor": ("-ot",),
    "--cpu-moe": ("-cmoe",),
    "--n-cpu-moe": ("-ncmoe",),
    "--max-tokens": ("-n", "--n-predict", "--predict"),
    "--temperature": ("--temp",),
    "--typical-p": ("--typical",),
    "--repetition-penalty": ("--repeat-penalty",),
    "--seed": ("-s",),
    "--prompt": ("-p",),
    "--file": ("-f",),
    "--json-schema": ("-j", "-jf", "--json-schema-file"),
    "--system": ("-sys", "--system-prompt"),
    "--alias": ("-a",),
    "--models": ("--models-dir",),
    "--request-timeout": ("-to", "--timeout"),
    "--verbose": ("-v",),
}
"""Ours -> llama.cpp's with the same meaning."""


@dataclass(frozen=True, slots=True)
class _Foreign:
    """Flags of one meaning that has no setting here.

    says: what to type instead, or why not. by_command: the same where a command has another answer. fine: values that ask
    for what is done anyway ("" is no value); others are refused.
    """

    names: tuple[str, ...]
    says: str
    by_command: Mapping[str, str] = field(default_factory=dict)
    fine: tuple[str, ...] = ()

    def option(self, command: str) -> click.Option:
        """Return a hidden option of a command that refuses these flags, or takes them without effect."""

        def check(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
            if value is not None and value not in self.fine:
                given = f"{'/'.join(self.names)} {value}".strip()
                raise click.UsageError(f"{given}: {self.by_command.get(command, self.says)}")

        takes_none = self.fine == ("",)
        return click.Option(
            [*self.names, f"llama_{self.names[-1].strip('-').replace('-', '_')}"],
            hidden=True,
            expose_value=False,
            is_eager=True,
            callback=check,
            # An optional value: what follows may be the model.
            is_flag=takes_none,
            flag_value="",
            default=None,
            type=str,
        )


_CHAT = "type `thermocline chat MODEL` for a conversation"
_FOREIGN: Final = (
    # Asked for, or not: it is always so.
    _Foreign(("-cb", "--cont-batching"), "", fine=("",)),
    _Foreign(("--jinja",), "", fine=("",)),
    _Foreign(("--metrics",), "", fine=("",)),
    _Foreign(("--embedding", "--embeddings"), "", fine=("",)),
    _Foreign(("--no-display-prompt",), "", fine=("",)),
    _Foreign(
        ("-fa", "--flash-attn"),
        "attention has one form here, which needs no memory for scores: leave -fa out, or type -fa on",
        fine=("", "on", "auto", "1", "true", "enabled"),
    ),
    _Foreign(
        ("--reasoning-format",),
        "reasoning is always told apart, as reasoning_content: leave it out, or type --reasoning-format auto",
        fine=("auto", "deepseek"),
    ),
    # Refused.
    _Foreign(("--no-jinja",), "chat templates are always Jinja: leave it out"),
    _Foreign(
        ("-nocb", "--no-cont-batching"),
        "requests are always decoded together: leave it out; --max-requests 1 takes one at a time",
    ),
    _Foreign(
        ("-b", "--batch-size"),
        "tokens of a prompt are computed in chunks: type -ub N (--prefill-chunk N)",
    ),
    _Foreign(
        ("-np", "--parallel"),
        "there are no slots, and every request may have the whole context: leave it out, or type --max-requests N",
    ),
    _Foreign(
        ("-nkvo", "--no-kv-offload"),
        "the cache is where attention computes: type --trunk-device cpu",
    ),
    _Foreign(
        ("--mlock",),
        "the model is mapped, and read into memory as far as there is room: leave it out (--prefetch on reads ahead)",
    ),
    _Foreign(
        ("--no-mmap", "-nommap"), "the model is always computed from the mapped file: leave it out"
    ),
    _Foreign(("--mmap", "-mmp"), "the model is always mapped: leave it out", fine=("", "1")),
    _Foreign(("-tb", "--threads-batch"), "prompts and answers have the same threads: type -t N"),
    _Foreign(("-C", "--cpu-mask", "--cpu-range"), "type -t N and --pin-threads"),
    _Foreign(
        ("--numa",),
        "start one rank for each node (docs/distributed.md), or type --pin-threads and numactl around the command",
    ),
    _Foreign(
        ("-dev", "--device", "-mg", "--main-gpu"),
        "one GPU is used: type CUDA_VISIBLE_DEVICES=N before the command, or --trunk-device and --hot-device",
    ),
    _Foreign(
        ("-sm", "--split-mode", "-ts", "--tensor-split"),
        "one GPU is used: leave it out; --expert-worker spreads experts over machines",
    ),
    _Foreign(
        ("-cnv", "--conversation", "-i", "--interactive", "-if", "--interactive-first"),
        _CHAT,
        {"chat": "this is a conversation: leave it out", "serve": "leave it out"},
    ),
    _Foreign(
        ("-no-cnv", "--no-conversation"),
        "type `thermocline run MODEL -p TEXT` for one answer",
        fine=("",),
    ),
    _Foreign(("-st", "--single-turn"), "type `thermocline run MODEL -p TEXT -st` for one answer"),
    _Foreign(("-r", "--reverse-prompt"), "type --stop TEXT"),
    _Foreign(
        ("-p", "--prompt"),
        "type `thermocline run MODEL -p TEXT`",
        {"serve": "clients send prompts", "chat": "type --system TEXT, or `run` for one answer"},
    ),
    _Foreign(
        ("-n", "--n-predict", "--predict"),
        "requests say max_tokens",
        {"perplexity": "the whole text is scored: leave it out"},
    ),
    _Foreign(("--keep", "--context-shift"), "a full context ends the answer: type a larger -c N"),
    _Foreign(("-e", "--escape"), "texts are taken as they are: type $'line one\\nline two'"),
    _Foreign(
        ("--chat-template",),
        "the model's own template is used: type --chat-template-file FILE for another",
    ),
    _Foreign(
        ("--reasoning-budget",),
        'requests say it: "reasoning_effort": "none", or thinking_token_budget',
    ),
    _Foreign(
        ("--grammar", "--grammar-file", "-j", "--json-schema", "-jf", "--json-schema-file"),
        "requests to `thermocline serve` say it: response_format, or structured_outputs",
    ),
    _Foreign(
        ("--temp", "--top-k", "--top-p", "--min-p", "--repeat-penalty"),
        "requests say it: temperature, top_k, top_p, min_p, repetition_penalty",
        {"bench": "the most likely token is taken: leave it out", "perplexity": "leave it out"},
    ),
    _Foreign(
        ("--mirostat", "--xtc-probability", "--dry-multiplier", "--dynatemp-range", "--samplers"),
        "there is no such sampler: type --temp, --top-k, --top-p, --min-p or --typical",
    ),
    _Foreign(("--pooling",), "embeddings are pooled as the model file says: leave it out"),
    _Foreign(
        (
            "--rope-scaling",
            "--rope-scale",
            "--rope-freq-base",
            "--rope-freq-scale",
            "--yarn-ext-factor",
        ),
        "positions are as the model file says: leave it out",
    ),
    _Foreign(
        ("-cram", "--cache-ram"),
        "type --cache-spill with a unit, such as --cache-spill 8GiB, and --cache-spill-dir for more on a disk",
        {
            "run": "it is for several conversations: type it with `thermocline serve`, as --cache-spill 8GiB"
        },
    ),
    _Foreign(("--lora", "--lora-scaled"), "adapters are not run: merge it into the model file"),
    _Foreign(
        ("-mm", "--mmproj"), "pictures are not read: leave it out, the model answers about text"
    ),
    _Foreign(("--no-warmup", "--warmup"), "leave it out: a GPU is always warmed up"),
    _Foreign(("--log-disable",), "type --quiet"),
    _Foreign(("--log-file",), "messages go to stderr: type 2>FILE"),
    _Foreign(("--no-webui",), "the page is part of the server: leave it out"),
    _Foreign(("-o", "--output"), "type --json", {"run": "type >FILE", "serve": "leave it out"}),
    _Foreign(("-d", "--n-depth", "-pg"), "type -p for the prompt and -n for the answer behind it"),
)


def names(flag: str) -> tuple[str, ...]:
    """Return a flag of ours with llama.cpp's names of it; ours is the first long one."""
    also = ALSO.get(flag, ())
    short = tuple(name for name in also if not name.startswith("--"))
    return (*short, flag, *also[len(short) :])


def take_llama_flags(command: click.Command) -> None:
    """Let a command answer every flag of llama.cpp's that it does not have by what to do."""
    taken = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    for foreign in _FOREIGN:
        left = tuple(name for name in foreign.names if name not in taken)
        if left:
            row = _Foreign(left, foreign.says, foreign.by_command, foreign.fine)
            command.params.append(row.option(command.name or ""))
            taken.update(left)
