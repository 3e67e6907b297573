"""The GGUF file as typed facts: metadata, tensor table and read-only views of the mapped bytes.

Knows no architecture, no torch and no asyncio; what the facts mean is for others to say.
"""
