"""Benchmarks of uringloop against asyncio, uvloop and any other loop: see README.md.

`python -m benchmarks echo` measures echo servers, `python -m benchmarks http` an aiohttp server.
The package runs from a checkout and is not part of the distribution.
"""
