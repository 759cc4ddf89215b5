"""Benchmarks of uringloop against asyncio, uvloop and any other loop: see README.md.

`python -m benchmarks` lists the commands.
The package runs from a checkout and is not part of the distribution.
"""
