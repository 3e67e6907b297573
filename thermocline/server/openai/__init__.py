"""OpenAI's interface: chat completions, completions and models, and the tokenizer beside them."""
