"""Speculation: drafters propose tokens, and a decode step verifies several of them at once."""
