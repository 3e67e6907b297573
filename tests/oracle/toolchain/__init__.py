"""The users' own tool chain in small: transformers' models, llama.cpp's converter, its quantiser."""
