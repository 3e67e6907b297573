"""The demo model: its corpus, its vocabulary, its training and its GGUF file."""
