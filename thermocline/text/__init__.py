"""Text in, token ids out, and back: tokenizer, chat templates, detokenizer, stop strings.

Everything here is synchronous and pure Python over the `tokenizers` and `jinja2` packages. It knows
no tensors, no event loop and no HTTP. Import from the module that owns the name.
"""
