"""The HTTP server: OpenAI's interface in front of one engine.

`settings` can be imported without aiohttp; `app.serve` runs the server.
"""

from __future__ import annotations
